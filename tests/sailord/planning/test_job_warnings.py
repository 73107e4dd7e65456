"""Files of a job that sailord cannot see cause a warning, not an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from sailord.client import ServerProblem
from sailord.planning.job_spec import read_job
from sailord.planning.job_warnings import warnings_of
from simulator.documents.problems import Problem
from tests.sailord.daemon.running import JOB


def with_data(data: str) -> tuple[str, ...]:
    return warnings_of(read_job(f"{JOB}\n[data]\n{data}\n"))


def test_job_without_files_has_no_warnings(tmp_path: Path) -> None:
    assert warnings_of(read_job(JOB)) == ()
    there = tmp_path / "text.npy"
    there.write_bytes(b"")
    assert with_data(f'tokens = "{there}"') == ()


@pytest.mark.parametrize(
    ("tokens", "why"),
    [
        ("/no/such/text.npy", "No such file or directory"),
        ("text.npy", "data folder of its configuration"),
        ("/" + "x" * 5000, "File name too long"),
    ],
)
def test_invisible_file_is_warned_about(tokens: str, why: str) -> None:
    (warning,) = with_data(f'tokens = "{tokens}"')
    assert warning.startswith(f"[data] tokens: {tokens} ")
    assert why in warning


def test_problem_names_the_submitted_file() -> None:
    said = ServerProblem(
        [Problem("job: line 3, column 1", "is wrong"), Problem("jobs", "are not it", "look")]
    )
    assert str(said.about("job", "x.toml")) == (
        "x.toml: line 3, column 1: is wrong\njobs: are not it; look"
    )
    assert str(ServerProblem("it is away").about("job", "x.toml")) == "it is away"
