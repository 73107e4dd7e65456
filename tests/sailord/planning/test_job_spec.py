"""Submitted jobs are read, and may not name files."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.problem.objective import Limits
from sailord.planning.job_spec import job_shape, read_job
from simulator.documents.problems import InputError
from simulator.models.families import build_model
from simulator.spec.job import Job
from tests.sailord.planning.requests import SPEC
from worker.script.job_text import job_text


def test_submitted_job_may_not_name_files_of_sailords_host():
    spec = '[model]\nconfig = "/etc/passwd"\n[training]\nglobal_batch = 4\n'
    with pytest.raises(InputError, match="names a file"):
        read_job(spec)


def test_submitted_job_may_bring_a_script_with_its_models_description():
    job = Job("small", build_model("gpt2", layers=2, hidden=8, heads=2), 8, 8)
    spec = job_text(job, Path("/shared/train.py"))
    read = read_job(spec)
    assert (read.script, read.model) == ("/shared/train.py", job.model)


def test_job_shape_counts_shared_tensors_as_one_more_layer_and_piece():
    assert job_shape(read_job(SPEC)) == (7, 3)


def test_a_budget_that_was_given_since_replaces_that_of_the_file():
    spec = SPEC + "\n[objective]\nmax_usd_total = 10.0\n"
    assert read_job(spec, usd_max=25.0).objective.max_usd_total == 25.0
    assert read_job(spec).objective.max_usd_total == 10.0


def test_the_limits_of_a_job_that_continues_are_for_the_steps_left():
    spec = SPEC + "\n[objective]\nmax_usd_total = 10.0\n"
    steps = read_job(spec).steps
    assert steps == 20
    for begun, usd in ((0, 0.5), (10, 1.0), (20, 10.0)):
        read = read_job(spec, begun=begun)
        assert Limits(read.objective, read.steps).usd_max == usd
