"""Files that a submitted job names: what sailord cannot see is told, and is no mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from sailord.client import ServerProblem
from sailord.planning.job_warnings import doubts
from sailord.planning.pool import read_job
from simulator.documents.problems import Problem
from tests.sailord.daemon.running import JOB


def with_data(data: str) -> tuple[str, ...]:
    return doubts(read_job(f"{JOB}\n[data]\n{data}\n"))


def test_a_job_without_files_raises_no_doubt(tmp_path: Path) -> None:
    assert doubts(read_job(JOB)) == ()
    there = tmp_path / "text.npy"
    there.write_bytes(b"")
    assert with_data(f'tokens = "{there}"') == ()


@pytest.mark.parametrize(
    ("tokens", "told"),
    [
        ("/no/such/text.npy", "No such file or directory"),
        ("text.npy", "its agent's configuration names as data"),
        ("/" + "x" * 5000, "File name too long"),
    ],
)
def test_what_cannot_be_seen_from_here_is_told(tokens: str, told: str) -> None:
    (doubt,) = with_data(f'tokens = "{tokens}"')
    assert doubt.startswith(f"[data] tokens: {tokens} ")
    assert told in doubt


def test_a_mistake_is_told_with_the_name_of_the_file_that_was_sent() -> None:
    said = ServerProblem(
        [Problem("job: line 3, column 1", "is wrong"), Problem("jobs", "are not it", "look")]
    )
    assert str(said.about("job", "x.toml")) == (
        "x.toml: line 3, column 1: is wrong\njobs: are not it; look"
    )
    assert str(ServerProblem("it is away").about("job", "x.toml")) == "it is away"
