"""What sailorctl says of a running sailord, and to it."""

from __future__ import annotations

import errno
import json
import re
import socket
import subprocess

import pytest
from click.testing import CliRunner

from sailord.cli.main import SECTIONS, main
from tests.processes import SAILORCTL, wait_until
from tests.sailord.daemon.running import JOB, ROOT, TOKEN


def call(place, *arguments, server=None):
    server = server or f"unix://{place.socket}"
    return CliRunner().invoke(main, [*arguments, "--server", server])


@pytest.mark.slow
def test_job_is_followed_from_the_command_line(place):
    place.start()
    wait_until(lambda: place.ask("GET", "/readyz")[0] == 200)
    assert "there is no node" in call(place, "doctor").output
    place.start_agent("a")
    file = place.folder / "job.toml"
    file.write_text(JOB)
    assert call(place, "submit", str(file), "--id", "j").output.startswith("j is queued\n")
    wait_until(lambda: "j: running" in call(place, "status").output)
    said = call(place, "status").output
    assert "generation  1 (open) on a" in said
    assert "A100-40 tp" in said
    assert json.loads(call(place, "status", "--json").output)["job"]["id"] == "j"
    assert "a  " in call(place, "nodes").output
    assert "generation 1 on 1 node" in call(place, "history", "j", "--all").output
    assert "j is running" in call(place, "why").output
    assert "planning for 1 node" in call(place, "events", "--all").output
    assert call(place, "logs", "a").output == "step by step\n"
    assert "ranks on this node: 0" in call(place, "logs", "a", "--rank", "77").output
    assert "running: next in the queue" in call(place, "history").output
    assert call(place, "doctor").output.startswith("no problems found\n")
    assert call(place, "pause", "j", "--reason", "lunch").exit_code == 0
    wait_until(lambda: "paused" in call(place, "jobs").output)
    assert "lunch" in call(place, "jobs").output
    assert call(place, "cordon", "a").output == "cordon a: ordered\n"
    wait_until(lambda: "cordoned" in call(place, "nodes").output)


def test_errors_are_one_sentence_on_stderr(place):
    refused = call(place, "status")
    assert refused.exit_code == 1
    assert "did not answer" in refused.output
    assert "name another with --server" in refused.output
    assert call(place, "status", server="ftp://x").exit_code == 2
    place.start()
    wait_until(lambda: place.ask("GET", "/readyz")[0] == 200)
    file = place.folder / "job.toml"
    file.write_text(JOB + "\nno = toml =\n")
    line = JOB.count("\n") + 2
    assert f"error: {file}: line {line}, column 6: " in call(place, "submit", str(file)).output
    file.write_text(JOB + '\n[data]\ntokens = "no/such/file"\n')
    queued = call(place, "submit", str(file), "--id", "doubtful")
    assert queued.exit_code == 0
    assert queued.stdout.startswith("doubtful is queued\nsnapshots will take about ")
    assert "warning: [data] tokens: no/such/file is relative" in queued.stderr
    nameless = file.with_name("my job.toml")
    nameless.write_text(JOB)
    assert re.match("my-job-[0-9a-f]{6} is queued", call(place, "submit", str(nameless)).stdout)
    unknown = call(place, "cancel", "../../x")
    assert unknown.exit_code == 1
    assert "no such job" in unknown.output
    remote = f"http://127.0.0.1:{place.port}"
    assert "the token is missing or wrong" in call(place, "jobs", server=remote).output
    (place.folder / "t").write_text(TOKEN)
    given = call(place, "jobs", "--token-file", str(place.folder / "t"), server=remote)
    assert given.exit_code == 0


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_commands_have_shell_completion(shell):
    assert "_SAILORCTL_COMPLETE" in CliRunner().invoke(main, ["completion", shell]).output


@pytest.mark.slow
def test_status_is_watched_across_a_restart(place):
    head = place.start()
    wait_until(lambda: place.ask("GET", "/readyz")[0] == 200)
    watching = subprocess.Popen(
        [*SAILORCTL, "status", "-w", "--json", "--server", f"unix://{place.socket}"],
        cwd=ROOT, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert json.loads(watching.stdout.readline())["cluster"] == "test"
        head.kill()
        head.wait()
        while "error" not in json.loads(watching.stdout.readline()):
            pass
        place.start()
        while "cluster" not in json.loads(watching.stdout.readline()):
            pass
    finally:
        watching.kill()
        watching.wait()
        watching.stdout.close()


def test_help_lists_every_command_once():
    listed = [name for names in SECTIONS.values() for name in names]
    assert sorted(listed) == sorted(main.entries)
    said = CliRunner().invoke(main, ["--help"]).output
    assert all(f"\n  {name} " in said for name in listed)


def test_a_socket_of_another_user_says_what_to_use_instead(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket.socket, "connect", refuse)  # root may use every socket.
    refused = CliRunner().invoke(main, ["status", "--server", f"unix://{tmp_path}/s.sock"])
    assert refused.exit_code == 1
    assert "Permission denied; only root and the user sailor" in refused.output
    assert "--server and --token-file" in refused.output
