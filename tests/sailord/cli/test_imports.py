"""What ``sailorctl`` imports: a command loads only what it needs."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from sailord.cli.main import main
from sailord.cli.shared.exit_codes import TEXT
from tests.sailord.cli.imported import excess_of, modules_of

HEAVY = ("torch", "deepspeed", "numpy", "aiohttp", "google", "grpc", "matplotlib", "fsspec")
PLANNING = ("plan", "simulate", "compare", "frontier", "replan", "replay", "share", "validate")
FILES = ("examples/opt-350m.toml", "examples/three-zones.toml")

QUESTIONS = (
    *("status", "nodes", "jobs", "events", "history", "moves", "why", "capacity", "doctor"),
    "goodput",
    *("checkpoint ls", "checkpoint now j", "checkpoint pin j 1", "checkpoint rollback j 1"),
    *("logs a", "drain a", "preempt a", "withdraw a", "cordon a", "uncordon a"),
    *("pause j", "resume j", "cancel j"),
)
"""Commands that only ask sailord."""


def loaded_by(*arguments: str) -> set[str]:
    """Return which of the heavy packages a command imports."""
    return set(HEAVY) & modules_of(*arguments)


@pytest.mark.parametrize("command", QUESTIONS)
def test_a_command_that_only_asks_imports_click_and_light_parts_of_the_standard_library(
    command: str,
) -> None:
    nowhere = ("--server", "unix:///nonexistent/sailord.sock")
    assert excess_of(modules_of(*command.split(), *nowhere)) == set()


def test_submit_of_a_job_file_imports_what_reads_toml_besides() -> None:
    words = ("submit", "examples/small.toml", "--server", "unix:///nonexistent/sailord.sock")
    tomllib = {"tomllib", "tomllib._parser", "tomllib._re", "tomllib._types"}
    assert excess_of(modules_of(*words)) == {*tomllib, "simulator.documents.files"}


@pytest.mark.parametrize("arguments", [("--help",), ("status", "--help"), ("up", "--help")])
def test_help_imports_nothing_heavy(arguments: tuple[str, ...]) -> None:
    assert loaded_by(*arguments) == set()


@pytest.mark.slow
@pytest.mark.parametrize("command", PLANNING)
def test_planning_commands_import_numpy_at_most(command: str) -> None:
    assert loaded_by(command, "--help") <= {"numpy"}


@pytest.mark.slow
def test_a_search_imports_numpy_at_most() -> None:
    assert loaded_by("plan", *FILES, "--budget", "1") <= {"numpy"}


@pytest.mark.parametrize("name", main.entries)
def test_the_listed_summary_is_the_first_sentence_of_the_command(name: str) -> None:
    command = main.get_command(None, name)
    assert command is not None
    assert command.get_short_help_str(200) == main.entries[name][1]


def test_the_summaries_of_checkpoint_are_the_first_sentences_of_its_commands() -> None:
    group = main.get_command(None, "checkpoint")
    for name, (_, summary) in group.entries.items():
        assert group.get_command(None, name).get_short_help_str(200) == summary


def test_help_lists_the_exit_codes() -> None:
    text = " ".join(CliRunner().invoke(main, ["--help"]).output.split())
    assert TEXT in text
