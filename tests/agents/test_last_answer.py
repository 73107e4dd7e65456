"""The time without a sailord is counted across crashes of the agent, not across stops."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agents import last_answer
from agents.last_answer import AT_LEAST_S, LastAnswer

NOW = {"s": 0.0}


def started(path: Path) -> LastAnswer:
    return LastAnswer.read(path, lambda: NOW["s"])


@pytest.fixture
def at() -> dict[str, float]:
    """A clock that is set."""
    NOW["s"] = 1000.0
    return NOW


def test_crashes_do_not_restart_the_count(tmp_path: Path, at) -> None:
    started(tmp_path / "x").note()
    for _ in range(10):
        at["s"] += 350.0
        agent = started(tmp_path / "x")
    assert agent.left_s(4 * 3600.0) == 4 * 3600.0 - 3500.0
    at["s"] += 4 * 3600.0
    agent = started(tmp_path / "x")
    assert agent.left_s(4 * 3600.0) == AT_LEAST_S, "a sailord may be back"
    at["s"] += AT_LEAST_S
    asyncio.run(agent.wait(4 * 3600.0))
    agent.note()
    assert started(tmp_path / "x").left_s(100.0) == 100.0


def test_time_without_leader_is_counted_anew_after_a_stop_or_boot(
    tmp_path: Path, at, monkeypatch
) -> None:
    started(tmp_path / "x").forget()
    at["s"] += 500.0
    assert started(tmp_path / "x").left_s(600.0) == 600.0
    monkeypatch.setattr(last_answer, "boot_id", lambda: "another")
    at["s"] = 10.0
    assert started(tmp_path / "x").left_s(600.0) == 600.0
    at["s"] += 500.0
    assert started(tmp_path / "x").left_s(600.0) == 100.0


@pytest.mark.usefixtures("at")
@pytest.mark.parametrize("text", ["", "x", "x y", "a b c", "\0"])
def test_a_damaged_file_or_a_folder_that_cannot_be_written_counts_anew(tmp_path, text) -> None:
    (tmp_path / "x").write_text(text)
    assert started(tmp_path / "x").left_s(600.0) == 600.0
    assert started(tmp_path / "none" / "x").left_s(600.0) == 600.0


def test_answers_are_saved_at_most_every_15_s(tmp_path: Path, at) -> None:
    agent = started(tmp_path / "x")
    written = (tmp_path / "x").read_text()
    at["s"] += 1.0
    agent.note()
    assert (tmp_path / "x").read_text() == written
    at["s"] += 15.0
    agent.note()
    assert (tmp_path / "x").read_text() != written
    assert LastAnswer().path is None
