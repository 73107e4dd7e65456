"""Each shell completes sailorctl's commands, by what `sailorctl completion` prints."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner

from sailord.cli.main import main

ROOT = Path(__file__).resolve().parents[3]
WITHIN_S = 60.0
OURS = "import sys; sys.argv[0] = 'sailorctl'; from sailord.cli.main import main; main()"
BASH = """
source "$FILE"
COMP_WORDS=($LINE)
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_sailorctl_completion sailorctl
printf '%s\\n' "${COMPREPLY[@]}"
"""
FISH = 'source "$FILE"; complete -C "$LINE"'


@dataclass(frozen=True, slots=True)
class Desk:
    """A home for shells, in whose path sailorctl is."""

    home: Path

    def environment(self, shell: str, line: str) -> dict[str, str]:
        file = self.home / f"completion.{shell}"
        file.write_text(CliRunner().invoke(main, ["completion", shell]).output)
        return {
            **os.environ,
            "PATH": f"{self.home}:{os.environ['PATH']}",
            "FILE": str(file),
            "LINE": line,
            "PYTHONPATH": str(ROOT),
            "HOME": str(self.home),
            "TERM": "xterm",
        }

    def ask(self, line: str, *command: str) -> str:
        """What a shell prints when asked to complete a line."""
        done = subprocess.run(
            command, env=self.environment(command[0], line), cwd=self.home,
            capture_output=True, text=True, check=False, timeout=WITHIN_S,
        )  # fmt: skip
        assert done.stderr == ""
        return done.stdout

    def type_to_zsh(self, line: str, awaited: str) -> str:
        """Return the screen of a pseudo terminal, as zsh completes only interactively."""
        ours, theirs = pty.openpty()
        shell = subprocess.Popen(
            ["zsh", "-f", "-i"], env=self.environment("zsh", line), cwd=self.home,
            stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        try:
            begin = 'PS1=; autoload -Uz compinit; compinit -u -D; source "$FILE"; print REA""DY\n'
            os.write(ours, begin.encode())
            _read_until(ours, "READY")
            os.write(ours, f"{line}\t".encode())
            return _read_until(ours, awaited)
        finally:
            shell.kill()
            shell.wait()
            os.close(ours)


def _read_until(terminal: int, awaited: str) -> str:
    text, end = "", time.monotonic() + WITHIN_S
    while awaited not in text:
        assert select.select([terminal], [], [], end - time.monotonic())[0], text
        text += os.read(terminal, 4096).decode(errors="replace")
    return text


@pytest.fixture
def desk(tmp_path):
    command = tmp_path / "sailorctl"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{OURS}" "$@"\n')
    command.chmod(0o755)
    return Desk(tmp_path)


def installed(shell: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(shell) is None, reason=f"{shell} is not installed")


@pytest.mark.slow
@installed("bash")
def test_bash_completes_our_commands_and_options(desk):
    assert desk.ask("sailorctl su", "bash", "--norc", "-c", BASH) == "submit\n"
    assert desk.ask("sailorctl submit --pri", "bash", "--norc", "-c", BASH) == "--priority\n"
    assert "replay" in desk.ask("sailorctl re", "bash", "--norc", "-c", BASH).split()


@pytest.mark.slow
@installed("fish")
def test_fish_completes_our_commands_and_options(desk):
    assert desk.ask("sailorctl su", "fish", "--no-config", "-c", FISH).startswith("submit\t")
    assert "--priority" in desk.ask("sailorctl submit --pri", "fish", "--no-config", "-c", FISH)


@pytest.mark.slow
@installed("zsh")
def test_zsh_completes_our_commands_and_options(desk):
    assert "submit" in desk.type_to_zsh("sailorctl su", "submit")
    assert "--priority" in desk.type_to_zsh("sailorctl submit --pri", "--priority")
