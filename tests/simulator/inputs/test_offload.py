"""Plans that offload activations: in files, and against a job and a cluster."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.inputs.plan_check import check_plan_for_job
from simulator.inputs.plan_file import plan_text, plan_to_json, read_plan
from simulator.models.layers import Recompute
from simulator.spec.plan import Pipeline, Plan, Schedule, Stage
from tests.simulator.inputs.test_plan_file import (
    VALIDATOR,
    A,
    cluster,
    faults,
    job,
    mistakes,
    with_stage,
)

PLAN = Plan(8, (Pipeline(128, (Stage((0, 26), 4, (A,), offload=3),)),))


@given(st.data())
def test_written_plan_is_read_back_and_fits_the_schema(data: st.DataObject) -> None:
    layers = data.draw(st.integers(1, 9))
    words: list[Recompute | int] = ["none", "full"]
    again = data.draw(st.sampled_from([*words, *range(1, layers)]))
    stage = Stage((0, layers), 1, (A,), again)
    stage = replace(stage, offload=data.draw(st.integers(0, layers - stage.recomputed)))
    plan = Plan(1, (Pipeline(1, (stage,)),))
    raw = plan_to_json(plan)
    VALIDATOR.validate(raw)
    assert ("offload" in raw["pipelines"][0]["stages"][0]) is plan.offloads
    assert read_plan(raw) == plan
    assert f'"offload": {stage.offload}' in plan_text(plan) or not stage.offload


@pytest.mark.parametrize(
    ("recompute", "offload", "said"),
    [
        ("none", 0, "is 0; give a whole number from 1"),
        ("none", "all", 'is "all"; '),
        ("none", 99, "is 99, but 26 of the stage's layers are not recomputed"),
        (2, 25, "is 25, but 24 of the stage's layers are not recomputed; give a smaller"),
        ("full", 1, "is 1, but 0 of the stage's layers"),
    ],
)
def test_offload_that_cannot_be_is_refused(recompute: object, offload: object, said: str) -> None:
    (mistake,) = mistakes(with_stage(recompute=recompute, offload=offload))
    assert mistake.startswith("pipelines[0].stages[0].offload: ")
    assert said in mistake


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero-bubble"])
def test_schedules_with_which_offload_is_not_estimated_are_refused(schedule: Schedule) -> None:
    plan = replace(PLAN, schedule=schedule)
    said = "plan.json: schedule: is zero-bubble, with which offload is not estimated; "
    for found in (faults(plan), check_plan_for_job(plan, job(), place="plan.json")):
        assert [str(each).startswith(said) for each in found] == [True] * (
            schedule == "zero-bubble"
        )


def test_gpus_whose_link_to_the_host_is_unknown_offload_nothing() -> None:
    assert faults(PLAN) == []
    catalogue = cluster().catalogue
    unknown = {A.gpu: replace(catalogue.gpus[A.gpu], host_bytes_per_s=None)}
    on = replace(cluster(), catalogue=replace(catalogue, gpus={**catalogue.gpus, **unknown}))
    (fault,) = faults(PLAN, on=on)
    assert fault == (
        "plan.json: pipelines[0].stages[0].offload: is given, but it is not known how fast A100-40"
        " copies to its host's memory; give host_gbytes_per_s of [gpu.A100-40] in a catalogue"
    )
    kept = replace(PLAN.pipelines[0].stages[0], offload=0)
    assert faults(replace(PLAN, pipelines=(Pipeline(128, (kept,)),)), on=on) == []
