"""What a submitted job is warned about; which files sailord's host has is not told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from sailord.client import ServerProblem
from sailord.planning.job_spec import read_job
from sailord.planning.job_warnings import size_warnings, warnings_of
from simulator.documents.problems import Problem
from tests.sailord.daemon.running import JOB

LARGE = """
[model]
preset = "opt-30b"
[training]
global_batch = 8
sequence = 512
"""


def with_data(data: str) -> tuple[str, ...]:
    return warnings_of(read_job(f"{JOB}\n[data]\n{data}\n"))


def test_job_without_files_has_no_warnings(tmp_path: Path) -> None:
    assert warnings_of(read_job(JOB)) == ()
    there = tmp_path / "text.npy"
    there.write_bytes(b"")
    assert with_data(f'tokens = "{there}"') == ()


@pytest.mark.parametrize("tokens", ["/no/such/text.npy", "/etc/shadow", "/" + "x" * 5000])
def test_paths_that_exist_on_this_host_cause_no_warning(tokens: str) -> None:
    assert with_data(f'tokens = "{tokens}"') == ()


def test_relative_file_is_warned_about() -> None:
    (warning,) = with_data('tokens = "text.npy"')
    assert warning.startswith("[data] tokens: text.npy is relative")


def test_a_file_of_a_mount_causes_no_warning() -> None:
    mounts = 'mounts = {corpus = "gs://bucket/corpus"}'
    assert with_data(f'tokens = "corpus/text.npy"\n{mounts}') == ()
    assert len(with_data(f'tokens = "text.npy"\n{mounts}')) == 1


def test_dropout_that_switches_flash_attention_off_is_warned_about() -> None:
    job = read_job(LARGE + "dropout = 0.1\n")
    (warning,) = warnings_of(job)
    assert warning.startswith("[training] dropout: 0.1 switches flash attention off")
    assert warnings_of(replace(job, flash_attention=False)) == ()
    assert warnings_of(replace(job, dropout=0.0)) == ()
    assert warnings_of(replace(job, script="train.py")) == (), "its own code may keep it"


def test_problem_names_the_submitted_file() -> None:
    said = ServerProblem(
        [Problem("job: line 3, column 1", "is wrong"), Problem("jobs", "are not it", "look")]
    )
    assert str(said.about("job", "x.toml")) == (
        "x.toml: line 3, column 1: is wrong\njobs: are not it; look"
    )
    assert str(ServerProblem("it is away").about("job", "x.toml")) == "it is away"


def test_model_whose_state_exceeds_all_gpus_is_warned_about(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    pool = {"zone": "us-central1-a", "gpu": "T4", "gpus_per_machine": 1, "gpus": 1}
    rows = (f"{key} = {json.dumps(value)}" for key, value in pool.items())
    file.write_text("\n".join(["[[pool]]", *rows, ""]), encoding="utf-8")
    small, large = read_job(JOB), read_job(LARGE)
    assert size_warnings(small, {"T4": 5}, file) == ()
    assert size_warnings(large, {}, file) == (), "nodes may still come"
    assert size_warnings(large, {"T4": 5, "H100-80": 64}, file) == ()
    (warning,) = size_warnings(large, {"T4": 5}, file)
    assert "too large for the 5 GPUs that are there" in warning
    assert "take 539.5 GB, and these GPUs have 79.19 GB" in warning
