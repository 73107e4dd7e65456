"""Which changes of a job keep its checkpoints usable, and what is said of the others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from simulator.inputs.job_file import load_job
from simulator.spec.job import Job
from tests.worker.small_run import write
from worker.checkpoint.compatibility import differences


def job_in(folder: Path, **change: tuple[str, str]) -> Job:
    write(folder, **change)
    return load_job(folder / "job.toml")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_precision_may_change_since_masters_and_moments_have_32_bits(
    tmp_path: Path, precision: str
) -> None:
    was = job_in(tmp_path)
    now = replace(was, precision=precision)
    assert differences(now, was, step=3, place="--resume") == []


def test_of_two_changes_the_one_that_matters_is_named(tmp_path: Path) -> None:
    was = job_in(tmp_path)
    now = job_in(tmp_path, change=("hidden = 16", "hidden = 32"))
    (found,) = differences(replace(now, precision="bf16"), was, step=3, place="--resume")
    assert found.what.startswith("the model was changed since step 3: ")
    assert "is (64, 32) and was (64, 16)" in found.what
