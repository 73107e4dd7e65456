"""What ``sailorctl`` imports: a command loads only what it needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from sailord.cli.exit_codes import TEXT
from sailord.cli.main import COMMANDS, main

ROOT = Path(__file__).resolve().parents[3]
HEAVY = ("torch", "deepspeed", "numpy", "aiohttp", "google", "grpc", "matplotlib", "fsspec")
PLANNING = ("plan", "simulate", "compare", "frontier", "replan", "replay", "validate")
FILES = ("examples/opt-350m.toml", "examples/three-zones.toml")


def loaded_by(*arguments: str) -> set[str]:
    """Run a command in a fresh process; return which of the heavy packages it imported."""
    code = (
        "import sys\n"
        "from sailord.cli.main import main\n"
        f"main({list(arguments)!r}, standalone_mode=False)\n"
        f"print('LOADED', *(name for name in {HEAVY!r} if name in sys.modules))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(done.stdout.splitlines()[-1].split()[1:])


@pytest.mark.parametrize("arguments", [("--help",), ("status", "--help"), ("doctor", "--help")])
def test_help_and_cluster_commands_import_nothing_heavy(arguments: tuple[str, ...]) -> None:
    assert loaded_by(*arguments) == set()


@pytest.mark.parametrize("command", PLANNING)
def test_planning_commands_import_numpy_at_most(command: str) -> None:
    assert loaded_by(command, "--help") <= {"numpy"}


def test_a_search_imports_numpy_at_most() -> None:
    assert loaded_by("plan", *FILES, "--budget", "1") <= {"numpy"}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_listed_summary_is_the_first_sentence_of_the_command(name: str) -> None:
    command = main.get_command(None, name)
    assert command is not None
    assert command.get_short_help_str(200) == COMMANDS[name][1]


def test_help_lists_the_exit_codes() -> None:
    text = " ".join(CliRunner().invoke(main, ["--help"]).output.split())
    assert TEXT in text
