"""The documents are true: their commands run and print what is shown, their files parse.

Lines of a ``console`` block that start with ``$`` are run; the other lines are compared with what
the command prints. In the shown output a line ``...`` stands for any lines, and seconds of a
search are not compared. Two comments before a block change that, each with its reason:
``<!-- not run: needs a GPU -->`` and ``<!-- for example: figures of another machine -->`` (run, not
compared). ``SAILOR_RETELL=1 pytest tests/test_docs.py`` rewrites the shown output; read the diff.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import sailor

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
WITHIN = "SAILOR_RUNS_DOCUMENTS"
HANG_S = 150
SLOW = ("docs/accuracy.md", "docs/replay.md", "docs/training.md")
"""Documents whose commands train or search for seconds; `make test-slow` runs them."""

FENCE = re.compile(r"^\s*(`{3,}|~{3,})\s*([\w-]*)")
EXCUSE = re.compile(r"^\s*<!--\s*(not run|for example):\s*(.*?)\s*-->\s*$")
SECONDS = re.compile(r"^(search +)[\d.]+ m?s", re.MULTILINE)
"""How long a search took is the one figure of a plan that differs between runs."""


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block of a document."""

    place: str
    language: str
    text: str
    excuse: str | None
    """Why it is not run, if it is not."""
    is_example: bool = False
    """It is run, and its output is not compared."""
    introduction: str = ""
    """The paragraph before it."""


def blocks(text: str, name: str) -> Iterator[Block]:
    """Every fenced block of a document, in order."""
    fence, start, language = "", 0, ""
    held: list[str] = []
    remark: tuple[str, str] | None = None
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        opened = FENCE.match(line)
        if fence:
            if line.strip() == fence:
                excuse = remark[1] if remark and remark[0] == "not run" else None
                example = remark is not None and remark[0] == "for example"
                said = introduction(lines[: start - 1])
                yield Block(f"{name}:{start}", language, "\n".join(held), excuse, example, said)
                fence, remark = "", None
            else:
                held.append(line)
        elif opened:
            fence, language, start, held = opened[1], opened[2], number, []
        elif excused := EXCUSE.match(line):
            remark = (excused[1], excused[2])
        elif line.strip():
            remark = None  # The comment belongs to the block right after it.
    assert not fence, f"{name}:{start} opens a block that never closes"


def introduction(lines: list[str]) -> str:
    """The paragraph that ends these lines, without the comment between it and a block."""
    text = "\n".join(line for line in lines if not EXCUSE.match(line))
    return text.rstrip().rpartition("\n\n")[2]


def script(block: Block) -> str:
    """The commands of a console block, as one shell script."""
    commands: list[str] = []
    continued = False
    for line in block.text.splitlines():
        if continued:
            commands.append(line.removeprefix("> "))
        elif line.lstrip().startswith("$ "):
            commands.append(line.lstrip().removeprefix("$ "))
        else:
            continue
        continued = line.endswith("\\")
    return "\n".join(commands)


def shown(block: Block) -> list[str]:
    """The output that a console block shows, line by line."""
    lines: list[str] = []
    continued = False
    for line in block.text.splitlines():
        is_command = continued or line.lstrip().startswith("$ ")
        continued = is_command and line.endswith("\\")
        if not is_command:
            lines.append(line)
    return lines


def agrees(expected: list[str], printed: list[str]) -> bool:
    """Whether the output is the expected one, where ``...`` stands for any lines."""
    parts = [re.escape(line.rstrip()) + "\n" for line in expected]
    pattern = "".join(r"(?:.*\n)*?" if part == re.escape("...") + "\n" else part for part in parts)
    return re.fullmatch(pattern, "".join(f"{line.rstrip()}\n" for line in printed)) is not None


def retold(expected: list[str], printed: list[str]) -> list[str]:
    """The output as it would be shown now: as many lines before and after a ``...`` as now."""
    if "..." not in expected:
        return printed
    head = expected.index("...")
    tail = len(expected) - 1 - head
    return [*printed[:head], "...", *(printed[-tail:] if tail else [])]


def rewrite(block: Block, lines: list[str]) -> None:
    """Put other output into a block of one command, where the block stands in its document."""
    path, _, number = block.place.partition(":")
    document = (ROOT / path).read_text(encoding="utf-8").splitlines()
    first = int(number)
    end = first + len(block.text.splitlines())
    commands = block.text.splitlines()[: len(block.text.splitlines()) - len(shown(block))]
    hint = f"{block.place}: give each command with output a block of its own"
    assert shown(block) == block.text.splitlines()[len(commands) :], hint
    document[first:end] = [*commands, *lines]
    (ROOT / path).write_text("\n".join(document) + "\n", encoding="utf-8")


def _all_blocks() -> list[Block]:
    return [
        block
        for path in DOCUMENTS
        if path.exists()
        for block in blocks(path.read_text(encoding="utf-8"), str(path.relative_to(ROOT)))
    ]


BLOCKS = _all_blocks()
CONSOLE = [
    pytest.param(
        block, id=block.place, marks=[pytest.mark.slow] if block.place.startswith(SLOW) else []
    )
    for block in BLOCKS
    if block.language == "console"
]
FILES = [block for block in BLOCKS if block.language in ("json", "toml")]


def run(commands: str) -> subprocess.CompletedProcess[str]:
    """Run a script from the root of the project, with its own commands first."""
    path = os.pathsep.join([str(ROOT / ".venv" / "bin"), os.environ.get("PATH", os.defpath)])
    return subprocess.run(
        ["bash", "-c", f"set -eo pipefail\n{commands}"],
        cwd=ROOT,
        # Threads of torch that wait for one another are slow where other tests take the cores.
        env={**os.environ, "PATH": path, WITHIN: "1", "OMP_NUM_THREADS": "1"},
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=HANG_S,  # Ends what hangs; how long a command takes is not judged.
    )


@pytest.mark.parametrize("block", CONSOLE)
def test_commands_succeed(block):
    assert WITHIN not in os.environ, "a document runs these tests: mark its block as not run"
    if block.excuse is not None:
        assert block.excuse, f"{block.place}: say why this is not run"
        pytest.skip(block.excuse)
    commands = script(block)
    assert commands, f"{block.place}: a console block without a line that starts with `$ `"
    done = run(commands)
    assert done.returncode == 0, f"{block.place}\n{commands}\n{done.stdout}"
    expected = [SECONDS.sub(r"\1_", line) for line in shown(block)]
    if block.is_example or not expected:
        return
    printed = done.stdout.splitlines()
    if os.environ.get("SAILOR_RETELL"):
        rewrite(block, retold(shown(block), printed))
        return
    now = [SECONDS.sub(r"\1_", line) for line in printed]
    assert agrees(expected, now), f"{block.place} shows another output\n{done.stdout}"


@pytest.mark.parametrize("block", FILES, ids=lambda block: block.place)
def test_files_shown_can_be_parsed(block):
    parse = json.loads if block.language == "json" else tomllib.loads
    assert isinstance(parse(block.text), dict | list)


def unproved(found: Iterable[Block]) -> list[str]:
    """Return blocks whose output is not compared, and that are not called examples."""
    return [
        block.place
        for block in found
        if block.language == "console" and block.excuse is not None and shown(block)
        if "example" not in f"{block.excuse} {block.introduction}".lower()
    ]


def test_output_that_is_not_compared_is_called_an_example():
    assert unproved(BLOCKS) == []
    text = "{}:\n\n<!-- not run: takes an hour -->\n```console\n$ date\n{}```\n"
    assert unproved(blocks(text.format("It prints", "today\n"), "sample")) == ["sample:4"]
    assert unproved(blocks(text.format("For example", "today\n"), "sample")) == []
    assert unproved(blocks(text.format("Run this", ""), "sample")) == []


def test_readme_can_be_read_in_one_go():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 200


COMMAND = re.compile(
    r"^\s*(\$ |(sailorctl|sailord|sailor-agent|python|make|torchrun) [\w-])", re.MULTILINE
)


def test_every_command_block_is_fenced_as_console():
    shells = ("sh", "bash", "shell", "zsh", "shell-session")
    hidden = [
        b.place
        for b in BLOCKS
        if b.language in shells or (b.language in ("", "text") and COMMAND.search(b.text))
    ]
    assert hidden == [], "fence commands as `console`, with `$ ` before each"


PACKAGES = ("agents", "planner", "sailor", "sailord", "simulator", "worker")
READMES = sorted(
    path
    for folder in (*PACKAGES, "benchmarks", "examples", "images", "scripts", "tests")
    for path in (ROOT / folder).rglob("README.md")
)
PATH = re.compile(r"`([\w/.-]+/[\w.-]+\.(?:py|toml|sh))`")


def test_readme_of_sailor_names_all_that_scripts_import():
    text = (ROOT / "sailor" / "README.md").read_text(encoding="utf-8")
    assert [name for name in sailor.__all__ if f"`{name}`" not in text] == []


def test_paths_in_documents_exist():
    roots = (ROOT, *(ROOT / package for package in PACKAGES))
    missing = []
    for document in (*DOCUMENTS, *READMES):
        for path in PATH.findall(document.read_text(encoding="utf-8")):
            is_made = path.startswith(("build/", "/", "FOLDER/"))
            places = (*roots, document.parent)
            if not is_made and not any((place / path).exists() for place in places):
                missing.append(f"{document.relative_to(ROOT)}: {path}")
    assert missing == []


LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)")


def test_links_lead_to_files():
    missing = [
        f"{document.relative_to(ROOT)}: {link}"
        for document in (*DOCUMENTS, *READMES)
        for link in LINK.findall(document.read_text(encoding="utf-8"))
        if not (document.parent / link).exists()
    ]
    assert missing == []


def test_tests_that_a_document_names_exist():
    text = (ROOT / "docs" / "gpu-hazards.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(test_\w+)`", text))
    assert named
    for path in (ROOT / "tests").rglob("test_*.py"):
        named -= set(re.findall(r"def (test_\w+)", path.read_text(encoding="utf-8")))
    assert named == set()


SAMPLE = """\
Words.

```console
$ echo one \\
>   two
one two
$ false
```
<!-- not run: takes an hour -->

```console
$ sleep 3600
```
<!-- not run: does not reach the block below -->
Words between.
```toml
[job]
```
"""


def test_blocks_and_their_reasons_are_read():
    first, second, third = blocks(SAMPLE, "sample")
    assert (first.place, first.language, first.excuse) == ("sample:3", "console", None)
    assert script(first) == "echo one \\\n  two\nfalse"
    assert (second.excuse, script(second)) == ("takes an hour", "sleep 3600")
    assert (third.language, third.text, third.excuse) == ("toml", "[job]", None)


def test_a_failing_command_is_detected():
    assert run("true").returncode == 0
    assert run("false\ntrue").returncode != 0
    assert run("false | true").returncode != 0


def test_shown_output_is_compared():
    block = next(blocks("```console\n$ echo a \\\n>  b\na b\n...\nz\n```\n", "sample"))
    assert shown(block) == ["a b", "...", "z"]
    assert agrees(shown(block), ["a b", "z"])
    assert agrees(shown(block), ["a b", "c", "d", "z"])
    assert not agrees(shown(block), ["a b", "c"])
    assert not agrees(["a", "b"], ["a", "c"])
    assert not agrees(["a"], ["a", "b"])
    assert retold(["a", "...", "z"], ["A", "B", "C", "Z"]) == ["A", "...", "Z"]
    assert SECONDS.sub(r"\1_", "search      2.080 s, 7 plans") == "search      _, 7 plans"


def test_an_unclosed_block_is_an_error():
    with pytest.raises(AssertionError, match="never closes"):
        list(blocks("```console\n$ true\n", "sample"))
