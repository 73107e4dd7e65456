"""A profile is corrected by the running job's steps when the planner has time, and only then."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from sailord.planning.job_spec import read_job
from sailord.planning.live_cluster import planner_node
from sailord.planning.messages import FoundPlan, PlanRequest
from sailord.planning.plan_search import answer, replanner_for
from tests.sailord.planning.requests import NODES, QUESTION, SPEC


@pytest.fixture
def profiled(tmp_path: Path) -> PlanRequest:
    """The question, with a profile of its model in which computing takes nearly all time."""
    model = read_job(SPEC).model
    count = len(model.layers)
    profile = {
        "sailor_profile": 1,
        "model": model.name,
        "sequence": read_job(SPEC).sequence,
        "precision": read_job(SPEC).precision,
        "flash_attention": True,
        "fingerprint": model.fingerprint,
        "layers": [layer.name for layer in model.layers],
        "sizes": [
            {
                "tp": 1,
                "parameters": [layer.parameters() for layer in model.layers],
                "output_elements": [layer.output_elements(64) for layer in model.layers],
                "kept_elements": [1] * count,
            }
        ],
        "timings": [
            {
                "gpu": "A100-40",
                "tp": 1,
                "micro_batch": size,
                "forward_s": [0.1 * size] * count,
                "backward_s": [0.2 * size] * count,
                "optimizer_s": 1e-9,
                "measured": {"spread": 0.01},
            }
            for size in (1, 2, 4, 8, 16)
        ],
    }
    (tmp_path / f"profiles_{model.name}.json").write_text(json.dumps(profile))
    return replace(QUESTION, profiles=tmp_path)


def found(request: PlanRequest) -> FoundPlan:
    told = answer(request)
    assert isinstance(told, FoundPlan), told
    return told


def running(request: PlanRequest, ratio: float) -> PlanRequest:
    """The same question while a plan runs whose ranks all take this many times as long."""
    first = found(request)
    busy = first.proposal.busy
    assert busy is not None
    ratios = tuple((rank, ratio) for rank in range(len(busy.seconds)))
    return replace(
        request,
        running=first.plan,
        ran_on=NODES,
        ratios=ratios,
        predicted=busy.seconds,
        relative_error=busy.relative_error,
    )


@pytest.mark.slow
def test_measured_ratios_scale_the_prediction_and_not_what_is_compared_with(
    profiled: PlanRequest,
) -> None:
    plain = found(running(profiled, 1.0))
    slower = found(running(profiled, 3.0))
    assert slower.proposal.plan == plain.proposal.plan
    assert slower.proposal.iteration_s == pytest.approx(3 * plain.proposal.iteration_s, rel=0.05)
    assert slower.proposal.busy == plain.proposal.busy
    assert slower.proposal.plain_s == pytest.approx(plain.proposal.iteration_s)
    assert any("A100-40: layers" in line for line in slower.about["why"])
    assert not any("A100-40: layers" in line for line in plain.about["why"])


def test_an_urgent_question_is_answered_from_the_plain_tables(profiled: PlanRequest) -> None:
    plain, slower = (
        found(replace(running(profiled, ratio), is_urgent=True)) for ratio in (1.0, 3.0)
    )
    assert slower.proposal == plain.proposal


@pytest.mark.slow
def test_computed_predictions_are_not_corrected() -> None:
    plain, slower = (found(running(QUESTION, ratio)) for ratio in (1.0, 9.0))
    assert slower.proposal == plain.proposal


def make_slower(request: PlanRequest, times: float) -> None:
    """Write a profile anew whose passes take this many times as long."""
    assert request.profiles is not None
    (file,) = request.profiles.iterdir()
    profile = json.loads(file.read_text())
    for timing in profile["timings"]:
        for key in ("forward_s", "backward_s"):
            timing[key] = [times * seconds for seconds in timing[key]]
    before_ns = file.stat().st_mtime_ns
    file.write_text(json.dumps(profile))
    os.utime(file, ns=(0, before_ns + 1_000_000_000))


def test_a_profile_is_read_again_once_it_has_changed(profiled: PlanRequest) -> None:
    def block_s() -> float:
        nodes = [planner_node(record) for record in profiled.nodes]
        times = replanner_for(profiled, nodes).judge.costs.times("A100-40", tp=1, samples=1)
        return float(times.forward[1])

    assert block_s() == 0.1
    make_slower(profiled, 2.0)
    assert block_s() == 0.2
    assert profiled.profiles is not None
    profiled.profiles.rename(profiled.profiles.with_name("away"))
    assert block_s() == 0.2, "a folder that cannot be read is as it was last seen"


@pytest.mark.slow
def test_steps_do_not_correct_a_profile_that_knows_of_them(profiled: PlanRequest) -> None:
    question = running(profiled, 3.0)
    assert any("A100-40: layers" in line for line in found(question).about["why"])
    make_slower(profiled, 3.0)
    assert not any("A100-40: layers" in line for line in found(question).about["why"])
