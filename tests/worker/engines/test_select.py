"""The engine of a plan follows from the job and the plan alone, with a reason."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simulator.documents.files import parse_document
from simulator.documents.problems import InputError
from simulator.inputs.job_file import job_from_document
from simulator.models.families import build_model
from simulator.spec.job import Job
from simulator.spec.plan import Pipeline, Place, Plan, Stage
from worker.engines.select import engine_for, snapshot_job

MODEL = build_model("gpt2", layers=2, hidden=16, heads=4, vocab=61, sequence=8)
JOB = Job("engines", MODEL, global_batch=8, sequence=8, max_tp=2, zero=1, engine="deepspeed")
HERE = (Place("any", "this", "here"),)
ALIKE = Plan(2, (Pipeline(2, (Stage((0, 2), 1, HERE), Stage((2, 4), 1, HERE))),) * 2)


def one(stage: Stage, **changes) -> Plan:
    return Plan(2, (Pipeline(4, (stage,)),), **changes)


def test_deepspeed_trains_what_it_supports_and_each_rank_snapshots_all_it_holds():
    assert engine_for(JOB, ALIKE) == ("deepspeed", "")
    assert snapshot_job(JOB, ALIKE) == replace(JOB, zero=0)


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (one(Stage((0, 4), 2, HERE)), "has TP degrees above 1"),
        (one(Stage((0, 4), 1, HERE, "full")), "recomputes activations"),
        (one(Stage((0, 4), 1, HERE), schedule="gpipe"), "has the schedule gpipe"),
        (
            Plan(
                2, (Pipeline(3, ALIKE.pipelines[0].stages), Pipeline(1, (Stage((0, 4), 1, HERE),)))
            ),
            "its pipelines differ: pipeline 1 has 1 micro batches and pipeline 0 has 3",
        ),
        (
            Plan(2, (ALIKE.pipelines[0], replace(ALIKE.pipelines[0], micro_batch_size=1))),
            "has micro batches of 1 and 2 samples",
        ),
    ],
    ids=["tp", "recompute", "schedule", "uneven", "sizes"],
)
def test_sailor_engine_trains_other_plans_and_gives_the_reason(plan, why):
    told = f"the sailor engine trains this plan, which DeepSpeed cannot: {why}"
    assert engine_for(JOB, plan) == ("sailor", told)
    assert snapshot_job(JOB, plan) is JOB
    assert engine_for(replace(JOB, engine="sailor"), plan) == ("sailor", "")


def test_exact_model_is_refused_with_deepspeed():
    text = """
[model]
family = "exact"
layers = 2
hidden = 16
heads = 4
ffn = 24
vocab = 30
sequence = 6

[training]
global_batch = 8
sequence = 6
engine = "deepspeed"
"""
    with pytest.raises(InputError, match=r'engine.*is "deepspeed", which cannot compute'):
        job_from_document(parse_document(text.encode(), name="job.toml"))
