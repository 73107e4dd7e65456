"""Every command of sailorctl, run against one sailord: what it says to people and to programs."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import click
import jsonschema
import pyte
import pytest
from click.testing import CliRunner

from sailord.cli.main import main
from tests.control.cluster import Cluster
from tests.processes import wait_until
from tests.sailord.cli.imported import excess_of, modules_of
from tests.sailord.daemon.running import ROOT, Place

# So small that one node is enough, and it is planned in no time.
JOB = """
[model]
family = "gpt2"
layers = 2
hidden = 16
heads = 4
vocab = 61
sequence = 8

[training]
global_batch = 8
sequence = 8
precision = "fp32"
max_tp = 2

[checkpoint]
uri = "{kept}"
memory_every = 10
persist_every = 20
"""

ELSEWHERE = {
    "plan": "tests/sailord/cli/planning/test_simulate.py",
    "simulate": "tests/sailord/cli/planning/test_simulate.py",
    "validate": "tests/sailord/cli/planning/test_simulate.py",
    "replan": "tests/sailord/cli/planning/test_replan.py",
    "compare": "tests/planner/compare/test_compare.py",
    "frontier": "tests/planner/test_cost_frontier.py",
    "replay": "tests/planner/replay/test_run_replay.py",
    "share": "tests/sailord/cli/planning/test_share.py",
    "trace import": "tests/simulator/traces/test_published.py",
    "profile model": "tests/worker/cli/test_profile_run.py",
    "up": "tests/sailord/providers/test_emulated.py",
    "tour": "tests/sailord/local/tour/test_tour.py",
    "local add": "tests/sailord/local/test_up.py",
    "local kill": "tests/sailord/local/test_up.py",
    "local link": "tests/sailord/local/test_zones.py",
    "checkpoint export": "tests/worker/checkpoint/other_formats/test_export.py",
    "ca init": "tests/sailord/test_authority.py",
    "ca issue": "tests/sailord/test_authority.py",
    "ca renew": "tests/sailord/test_authority.py",
    "ca revoke": "tests/sailord/test_authority.py",
    "ca list": "tests/sailord/test_authority.py",
    "token create": "tests/sailord/api/access/test_callers.py",
    "token list": "tests/sailord/api/access/test_callers.py",
    "token revoke": "tests/sailord/api/access/test_callers.py",
    "completion": "tests/sailord/daemon/test_cluster_commands.py",
}
"""Commands that need no sailord, or bring their own, and where they are run."""


@dataclass(frozen=True)
class Line:
    """A command line and its expected output."""

    typed: str
    """With ``{file}`` for a job's file, ``{kept}`` for where checkpoints are, ``{step}`` for the
    newest."""
    says: str = ""
    """A part of the expected text output."""
    first: Callable[[Cluster], object] = lambda _: True
    """A condition to wait for before the command runs."""
    code: int = 0


def runs(cluster: Cluster, name: str = "j") -> bool:
    """The job trains, and a step is durable."""
    job = cluster.job()
    return cluster.is_running() and job["id"] == name and job["durable_step"]


def is_paused(name: str) -> Callable[[Cluster], bool]:
    return lambda cluster: cluster.head.ask("GET", f"/v1/jobs/{name}")[1]["state"] == "paused"


def has_ended(name: str) -> Callable[[Cluster], bool]:
    return lambda cluster: cluster.head.ask("GET", f"/v1/jobs/{name}")[1]["state"] == "cancelled"


def is_at_rest(cluster: Cluster) -> bool:
    """Nothing is on its way: all nodes stay, and the job runs."""
    return not cluster.head.status()["leaving"] and runs(cluster)


def both(typed: str, says: str, first: Callable[[Cluster], object] = lambda _: True) -> list[Line]:
    """The same for a person and for a program."""
    return [Line(typed, says, first), Line(f"{typed} --json", first=first)]


LINES = (
    Line("submit {file} --id j", "j is queued"),
    Line("submit {file} --id k", "k is queued behind j"),
    Line("submit {file} --id k2 --json"),
    Line("cancel k2"),
    *both("status", "j: running", runs),
    *both("nodes", "a  "),
    *both("nodes a", "if it died now"),
    *both("capacity", ""),
    *both("goodput", "training"),
    *both("timeline j", "each letter is"),
    *both("profile network --show", "no link was measured yet"),
    *both("jobs", "queued"),
    *both("events", "started on 1 node from step 0"),
    Line("events --all", "generation 1 on "),
    *both("history", "started on 1 node from step 0"),
    Line("history --all", "generation 1 on "),
    *both("moves j", "s in all", lambda cluster: "started on" in str(cluster.history())),
    *both("why", "j is running"),
    *both("logs a", ""),
    *both("doctor", "no problems found"),
    *both("checkpoint now j", "is durable"),
    *both("checkpoint ls j", "newest"),
    *both("checkpoint ls", "newest"),
    *both("checkpoint pin j {step}", "is pinned"),
    *both("checkpoint unpin j {step}", "is unpinned"),
    *both("checkpoint verify j {step}", ": intact"),
    Line("cordon b", "cordon b: ordered"),
    Line("uncordon b", "uncordon b: ordered"),
    Line("cordon b --json"),
    Line("uncordon b --json"),
    Line("drain b --reason bolts", "drain b: ordered", runs),
    Line("withdraw b", "withdraw b: ordered"),
    Line("drain b --json", first=is_at_rest),
    Line("withdraw b --json"),
    Line("preempt b --notice 3600", "b will be preempted in 60 min", is_at_rest),
    Line("withdraw b"),
    Line("preempt b --notice 3600 --json", first=is_at_rest),
    Line("withdraw b"),
    *both("checkpoint rollback j {step}", "rollback of j to step", is_at_rest),
    Line("pause j", "pause j: ordered", runs),
    Line("resume j", "resume j: ordered", is_paused("j")),
    Line("budget j 25", "budget j: ordered, at most $25.00 in all"),
    Line("budget j 25", "budget would change nothing: it has that budget", code=1),
    Line("budget k 30 --json"),
    Line("priority k 5", "priority k 5: ordered"),
    Line("priority k 5", "priority would change nothing: it has that priority", code=1),
    Line("priority k -5 --json"),
    Line("pause k --json"),
    Line("resume k --json", first=is_paused("k")),
    Line("cancel j", "cancel j: ordered"),
    Line("cancel k --json"),
    Line("cancel k", "it is cancelled", code=1),
    Line("submit {file} --id longest"),
    Line("submit {file} --id longer"),
    Line("pause long", "several jobs begin so; name one: longer, longest", code=1),
    Line("cancel longe", "several jobs begin so", code=1),
    Line("cancel longes", "cancel longest: ordered"),
    # One that has ended still counts, or the order would hit the other one a moment later.
    Line("cancel long", "several jobs begin so", has_ended("longest"), code=1),
    Line("cancel longer", "cancel longer: ordered"),
    Line("checkpoint import {kept} --job {file} --name x", "", code=2),
    # So that the commands that follow have something to print.
    Line("submit {file} --id last"),
    Line("status", "last: running", lambda cluster: runs(cluster, "last")),
)
FOLLOWED = {
    "status -w": "test, leader",
    "status -w --json": "",
    "events -f": "was elected leader",
    "events -f --json": "",
    "logs -f a": "",
    "logs -f a --json": "",
}
"""Commands that do not end, and what is soon to be read of each."""


def commands(group: click.Group = main, above: str = "") -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from commands(command, f"{above}{name} ")
        else:
            yield above + name, command


def has(command: click.Command, option: str) -> bool:
    return any(option in parameter.opts for parameter in command.params)


def command_of(typed: str) -> str:
    known = {name for name, _ in commands()}
    words = typed.split()
    return next(name for n in (2, 1) if (name := " ".join(words[:n])) in known)


def documented() -> dict[str, str | frozenset[str]]:
    """What docs/api.md promises of each command's JSON: the name of a shape, or all keys."""
    found: dict[str, str | frozenset[str]] = {}
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    for row in re.findall(r"^\| (`.*)$", text.partition("| command | shape |")[2], re.M):
        names, shapes = (re.findall(r"`([^`]*)`", cell) for cell in row.split(" | ")[:2])
        group = names[0].partition(" ")[0] + " " if " " in names[0] else ""
        names = [name if name.startswith(group) else group + name for name in names]
        for name, shape in zip(names, shapes * (len(names) // len(shapes)), strict=True):
            is_open = shape.startswith("{")
            found[name] = frozenset(re.findall(r'"(\w+)":?', shape)) if is_open else shape
    return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("commands")
    made = Cluster(folder, [Place(folder)])
    (folder / "job.toml").write_text(JOB.format(kept=folder / "kept"))
    try:
        made.heads[0].start()
        wait_until(lambda: made.head.ask("GET", "/readyz")[0] == 200)
        made.join("a", "b")
        yield made
    finally:
        made.end()


@pytest.fixture(scope="module")
def said(cluster):
    """The result of each line; they run in order, since each depends on the ones before."""
    found = {}
    server = ["--server", f"unix://{cluster.head.socket}"]
    for number, line in enumerate(LINES):
        wait_until(lambda line=line: line.first(cluster), within_s=90.0)
        step = (cluster.job() or {}).get("durable_step")
        file, kept = cluster.folder / "job.toml", cluster.folder / "kept"
        words = [word.format(file=file, kept=kept, step=step) for word in line.typed.split()]
        is_offline = not has(dict(commands())[command_of(line.typed)], "--server")
        found[number] = CliRunner().invoke(main, [*words, *([] if is_offline else server)])
    return found


def test_every_command_has_a_case_here():
    typed = [line.typed for line in LINES] + list(FOLLOWED)
    for name, command in commands():
        if name == "checkpoint import":
            assert any(command_of(line) == name for line in typed)
        elif name in ELSEWHERE:
            text = (ROOT / ELSEWHERE[name]).read_text(encoding="utf-8")
            assert f'"{name.split()[-1]}"' in text, f"{ELSEWHERE[name]} does not run {name}"
        else:
            check_lines(name, command, typed)
    assert set(documented()) <= {name for name, _ in commands()}, "docs/api.md tells of no command"


def check_lines(name: str, command: click.Command, typed: list[str]) -> None:
    """Check that a command is tested with text and JSON output, and followed if it can be."""
    own = [line for line in typed if command_of(line) == name]
    assert any("--json" not in line for line in own), f"no test runs {name} with text output"
    assert any("--json" in line for line in own), f"no test runs {name} --json"
    assert name in documented(), f"docs/api.md does not say what {name} --json prints"
    for option in ("-f", "-w"):
        is_there = any(option in line.split() for line in own)
        assert is_there or not has(command, option), f"no test runs {name} {option}"


def check(document, typed: str, value: object) -> None:
    """Compare JSON with what is promised of the command."""
    shape = documented()[command_of(typed)]
    if isinstance(shape, frozenset):
        assert isinstance(value, dict)
        assert set(value) == shape
        return
    whole = {"$ref": f"#/components/schemas/{shape}", "components": document["components"]}
    jsonschema.Draft202012Validator(whole).validate(value)


@pytest.mark.parametrize("number", range(len(LINES)), ids=lambda n: LINES[n].typed)
def test_each_command_answers_in_text_and_json(cluster, said, number):
    line, result = LINES[number], said[number]
    assert result.exit_code == line.code, result.output
    assert line.says in result.output
    if "--json" in line.typed:
        document = cluster.head.ask("GET", "/openapi.json")[1]
        one_a_line = command_of(line.typed) in ("events", "logs")
        texts = result.stdout.splitlines() if one_a_line else [result.stdout]
        assert texts
        for text in texts:
            check(document, line.typed, json.loads(text))


@pytest.mark.parametrize("typed", ["status", "why j", "doctor", "logs a", "checkpoint ls j"])
@pytest.mark.usefixtures("said")
def test_modules_that_print_answers_import_click_and_light_parts_of_the_standard_library(
    cluster, typed
):
    words = (*typed.split(), "--server", f"unix://{cluster.head.socket}")
    assert excess_of(modules_of(*words)) == set()


@pytest.mark.parametrize("typed", FOLLOWED)
@pytest.mark.usefixtures("said")
def test_following_commands_print_until_interrupted(cluster, typed):
    command = [sys.executable, "-c", "from sailord.cli.main import main; main()", *typed.split()]
    following = subprocess.Popen(
        [*command, "--server", f"unix://{cluster.head.socket}"],
        cwd=ROOT, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        first = following.stdout.readline()
        if "--json" in typed:
            check(cluster.head.ask("GET", "/openapi.json")[1], typed, json.loads(first))
        assert FOLLOWED[typed] in first
        assert following.poll() is None
    finally:
        following.kill()
        following.communicate()


@pytest.mark.usefixtures("said")
def test_status_w_on_a_terminal_uses_the_alternate_screen_and_ends_with_a_summary(cluster):
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ |= {"TERM": "xterm-256color", "LANG": "C.UTF-8", "COLUMNS": "", "LINES": ""}
        command = "from sailord.cli.main import main; main()"
        words = ["status", "-w", "--server", f"unix://{cluster.head.socket}"]
        os.execv(sys.executable, [sys.executable, "-c", command, *words])
    termios.tcsetwinsize(terminal, (20, 60))
    shows, raw = pyte.Screen(60, 20), b""
    stream = pyte.ByteStream(shows)
    try:
        while not (shows.display[-1].startswith(" p  preempt") and "zones" in str(shows.display)):
            raw += (fresh := os.read(terminal, 4096))
            stream.feed(fresh)
        assert all(len(line.rstrip()) <= 60 for line in shows.display)
        os.write(terminal, b"pb")
        while not shows.display[-1].startswith("preempt which node? b_"):
            stream.feed(os.read(terminal, 4096))
        os.write(terminal, b"\x1bq")
        with contextlib.suppress(OSError):  # The other end is closed.
            while fresh := os.read(terminal, 4096):
                raw += fresh
    finally:
        os.close(terminal)
        _, code = os.waitpid(pid, 0)
    assert code == 0
    assert b"\x1b[?1049h" in raw
    assert b"\x1b[?1049l" in raw
    assert b"moves" in raw.rpartition(b"\x1b[?1049l")[2] or b"no job was there" in raw
