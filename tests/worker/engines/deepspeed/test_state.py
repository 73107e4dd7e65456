"""A run changes from one engine to the other and back without a difference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from simulator.models.families import build_model
from simulator.spec.job import Job
from simulator.spec.plan import Pipeline, Place, Plan, Stage
from tests.worker.engine_runs import state_of, train
from tests.worker.rank_processes import as_processes

pytestmark = pytest.mark.slow

MODEL = build_model("gpt2", layers=2, hidden=16, heads=4, vocab=61, sequence=8)
JOB = Job(
    "engines",
    MODEL,
    global_batch=8,
    sequence=8,
    precision="fp32",
    learning_rate=0.01,
    schedule="cosine",
    steps=6,
    clip_norm=0.5,
)
HERE = (Place("any", "this", "here"),)
PLAN = Plan(2, (Pipeline(2, (Stage((0, 2), 1, HERE), Stage((2, 4), 1, HERE))),) * 2)


def leg(folder: Path, engine: str, job: Job, steps: int, begin=None):
    results = as_processes(folder, PLAN.device_count, train, engine, job, PLAN, steps, begin)
    return results[0][0], state_of(job, results)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.at_length),
        {"zero": 1},
        pytest.param({"optimizer": "sgd"}, marks=pytest.mark.at_length),
    ],
    ids=str,
)
def test_engines_continue_from_each_others_state(tmp_path, changes):
    job = replace(JOB, **changes)
    straight, (whole, _) = leg(tmp_path, "sailor", job, 6)
    losses, state = [], None
    for engine in ("sailor", "deepspeed", "sailor"):
        more, state = leg(tmp_path, engine, job, 2, state)
        losses += more
    assert losses == pytest.approx(straight, rel=1e-5)
    assert state is not None
    logical, progress = state
    assert (progress.step, progress.updates, progress.samples) == (6, 6, 48)
    masters = [key for key in whole if key[2] != "gradient"]
    assert len(masters) == sum(key[2] == "master" for key in whole) * (
        2 if job.optimizer == "sgd" else 3
    )
    for key in masters:
        # Adam's first steps amplify differences of moments that are nearly 0.
        assert abs(logical[key] - whole[key]).max() < 1e-3, key
