"""What the documents show can be done: their commands run, their files parse.

Blocks fenced as ``console`` are run line by line where a line starts with ``$``; the other
lines are output, shown for the reader and not compared. A block is left out by a comment
before it that says why: ``<!-- not run: needs a GPU -->``.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
WITHIN = "SAILOR_RUNS_DOCUMENTS"
HANG_S = 150
SLOW = ("docs/training.md", "docs/replay.md")
"""Documents whose commands train or search for seconds; `make test-slow` runs them."""

FENCE = re.compile(r"^\s*(`{3,}|~{3,})\s*([\w-]*)")
EXCUSE = re.compile(r"^\s*<!--\s*not run:\s*(.*?)\s*-->\s*$")


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block of a document; ``excuse`` says why it is not run, if it is not."""

    place: str
    language: str
    text: str
    excuse: str | None


def blocks(text: str, name: str) -> Iterator[Block]:
    """Every fenced block of a document, in order."""
    fence, start, language = "", 0, ""
    held: list[str] = []
    excuse: str | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        opened = FENCE.match(line)
        if fence:
            if line.strip() == fence:
                yield Block(f"{name}:{start}", language, "\n".join(held), excuse)
                fence, excuse = "", None
            else:
                held.append(line)
        elif opened:
            fence, language, start, held = opened[1], opened[2], number, []
        elif excused := EXCUSE.match(line):
            excuse = excused[1]
        elif line.strip():
            excuse = None  # The comment belongs to the block right after it.
    assert not fence, f"{name}:{start} opens a block that never closes"


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
        env={**os.environ, "PATH": path, WITHIN: "1"},
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


@pytest.mark.parametrize("block", FILES, ids=lambda block: block.place)
def test_files_shown_can_be_parsed(block):
    parse = json.loads if block.language == "json" else tomllib.loads
    assert isinstance(parse(block.text), dict | list)


def test_no_command_hides_from_this_test():
    hidden = [
        b.place for b in BLOCKS if b.language in ("sh", "bash", "shell", "zsh", "shell-session")
    ]
    assert hidden == [], "fence commands as `console`, with `$ ` before each"


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


def test_blocks_and_their_excuses_are_read():
    first, second, third = blocks(SAMPLE, "sample")
    assert (first.place, first.language, first.excuse) == ("sample:3", "console", None)
    assert script(first) == "echo one \\\n  two\nfalse"
    assert (second.excuse, script(second)) == ("takes an hour", "sleep 3600")
    assert (third.language, third.text, third.excuse) == ("toml", "[job]", None)


def test_a_failing_command_is_seen():
    assert run("true").returncode == 0
    assert run("false\ntrue").returncode != 0
    assert run("false | true").returncode != 0


def test_an_unclosed_block_is_seen():
    with pytest.raises(AssertionError, match="never closes"):
        list(blocks("```console\n$ true\n", "sample"))
