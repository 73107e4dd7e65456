"""Plans that offload are tried and bounded where they are asked for, and taken where they gain."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest

from planner.api import plan_job
from planner.problem.inventory import lots_of
from planner.problem.objective import Limits
from planner.problem.question import OFFLOAD_OR_NOT, Question
from planner.replan.damage import check_replannable
from planner.search.bound import EventBound
from simulator.cluster.cluster import Cluster, Pool
from simulator.cluster.place_facts import PlaceFacts
from simulator.documents.problems import InputError
from simulator.estimate.offload import OFFLOAD_NOTE
from simulator.hardware.catalogue import Catalogue, load_catalogue
from simulator.inputs.job_file import ALLOWED
from simulator.inputs.plan_check import check_plan
from simulator.layer_costs.profile import LayerSizes, Profile, Timing
from simulator.models.families import build_model
from simulator.spec.job import Goal, Job, Objective
from simulator.spec.plan import Plan
from tests.planner.search.test_oracle import every_unplaced_plan
from tests.planner.search.tight_plans import keeps_bound, least_of, tables_of
from tests.planner.small_cases import SEQUENCE, Measured1, SmallCase
from tests.simulator.estimate.test_offload import with_offload
from tests.simulator.worlds import random_plan, random_world

TABLES = partial(tables_of, offloads=True)


def tight_case(
    catalogue: Catalogue | None = None,
    *,
    batch: int = 16,
    parameters: int = 200_000_000,
    seconds: Sequence[float] = (1.0,) * 6,
    kept: Sequence[float] = (1e9,) * 6,
    goal: Goal = "throughput",
) -> SmallCase:
    """Two T4 that cannot hold the whole model each, with GBs of activations a layer and sample.

    They travel to or from the host at 12.6 GB/s.
    """
    layers, forward = len(seconds), np.array(seconds) / 3
    profile = Profile(
        "tight",
        SEQUENCE,
        "fp32",
        tuple(f"layer-{index}" for index in range(layers)),
        {("T4", 1, b): Timing(b * forward, 2 * b * forward, 0.01) for b in (1, 2)},
        {
            1: LayerSizes(
                (parameters,) * layers, (10**6,) * layers, tuple(int(each / 4) for each in kept)
            )
        },
        {1: layers * parameters},
        {},
    )
    model = build_model("gpt2", layers=layers - 2, hidden=16, heads=4, vocab=64, sequence=SEQUENCE)
    job = Job(
        "tight", model, global_batch=batch, sequence=SEQUENCE, profile="tight", precision="fp32",
        optimizer="adam", max_tp=1, micro_batches=(1, 2), recompute="auto",
        objective=Objective(goal=goal),
    )  # fmt: skip
    pool = Pool(
        "us-central1-a", "T4", "T4x2", 2, 2, price_usd_per_gpu_hour=1.0, price_source="cluster file"
    )
    cluster = Cluster((pool,), catalogue or load_catalogue())
    return SmallCase(job, cluster, Measured1(known=profile))


def asked(case: SmallCase, *, tries: bool = True, is_bounded: bool = False) -> Question:
    return Question(
        case.job, case.cluster, case.measurements, budget=20, proves=False, is_bounded=is_bounded,
        prefer="simple", tries=("offload",) if tries else (),
    )  # fmt: skip


def with_link(gbytes_per_s: float | None) -> Catalogue:
    """The catalogue in which T4s copy to their hosts at another speed."""
    catalogue = load_catalogue()
    rate = None if gbytes_per_s is None else gbytes_per_s * 1e9
    gpu = replace(catalogue.gpus["T4"], host_bytes_per_s=rate)
    return replace(catalogue, gpus={**catalogue.gpus, "T4": gpu})


def test_offload_is_taken_only_where_it_is_asked_for() -> None:
    case = tight_case()
    plain = plan_job(asked(case, tries=False, is_bounded=True))
    found = plan_job(asked(case, is_bounded=True))
    assert plain.plan is not None
    assert found.plan is not None
    assert found.estimate is not None
    stages = [stage for pipeline in plain.plan.pipelines for stage in pipeline.stages]
    assert any(stage.recomputed for stage in stages), "memory is tight"
    assert (plain.plan.offloads, found.plan.offloads) == (False, True)
    assert plain.objective is not None
    assert found.objective is not None
    assert found.objective < 0.97 * plain.objective
    (gain,) = found.gains
    assert (gain.best, gain.without, gain.is_taken) == (found.objective, plain.objective, True)
    assert "no runtime offloads activations yet" in str(gain)
    assert OFFLOAD_NOTE in found.estimate.notes
    assert OFFLOAD_NOTE not in plan_job(asked(case, tries=False)).explain
    assert OFFLOAD_OR_NOT in found.space
    assert OFFLOAD_OR_NOT not in plain.space
    assert 0 < found.lower_bound <= found.objective
    assert plain.lower_bound <= plain.objective


def test_the_estimate_of_a_chosen_plan_is_that_of_its_file() -> None:
    case = tight_case()
    found = plan_job(asked(case))
    assert found.plan is not None
    assert found.estimate is not None
    assert check_plan(found.plan, case.job, case.cluster) == ()
    assert case.judge.estimate(found.plan).iteration_s == found.estimate.iteration_s


@pytest.mark.parametrize("gbytes_per_s", [0.2, None])
def test_a_slow_or_unknown_link_leaves_the_plan_as_it_was(gbytes_per_s: float | None) -> None:
    case = tight_case(with_link(gbytes_per_s))
    plain, found = plan_job(asked(case, tries=False)), plan_job(asked(case))
    assert found.plan == plain.plan
    (gain,) = found.gains
    assert gain.best is None
    assert "recomputes what could be offloaded" in str(gain)


def test_hosts_without_room_get_nothing() -> None:
    case = tight_case()
    with patch.object(PlaceFacts, "host_bytes_per_gpu", return_value=0.0):
        found = plan_job(asked(case))
    assert found.plan is not None
    assert not found.plan.offloads


def test_no_submitted_job_gets_such_a_plan() -> None:
    """A job cannot ask for it, and replanning refuses it; so does the runtime."""
    assert "offload" not in ALLOWED
    case = tight_case()
    found = plan_job(asked(case))
    assert found.plan is not None
    with pytest.raises(InputError, match="plan: offloads activations; replanning does not"):
        check_replannable(found.plan, case.job, {pool.place.key: 0 for pool in case.cluster.pools})


def test_a_job_that_recomputes_everything_offloads_nothing() -> None:
    case = tight_case()
    job = replace(case.job, recompute="full")
    found = plan_job(asked(replace(case, job=job)))
    assert found.plan is not None
    assert not found.plan.offloads


# The bound -----------------------------------------------------------------------------------


def test_a_bound_that_counts_recomputation_would_be_beaten() -> None:
    case = tight_case()
    found = plan_job(asked(case))
    assert found.objective is not None
    lots, batch = lots_of(case.cluster, case.judge.facts), case.job.global_batch
    bounds = {
        offloads: EventBound(
            tables_of(case.judge, lots, "auto", (1,), offloads=offloads),
            lots,
            (),
            Limits(case.job.objective),
            batch,
            [1, 2],
            gap=1e-9,
        )
        .bounds(2 * found.objective, 2 * found.objective)
        .seconds
        for offloads in (True, False)
    }
    assert bounds[True] <= found.objective < bounds[False]


@pytest.mark.slow
@pytest.mark.sim
@pytest.mark.parametrize("goal", ["throughput", "cost"])
def test_no_plan_is_below_the_bound(goal: Goal, examples: int) -> None:
    for seed in range(max(1, examples // 10)):
        rng = random.Random(f"offload bound {goal} {seed}")
        world = random_world(rng)
        plan = with_offload(rng, random_plan(rng, world, schedules=("1f1b",), splits=False))
        if rng.random() < 0.5:
            # Equal pipelines come closest to the bound.
            plan = replace(plan, pipelines=(plan.pipelines[0],) * len(plan.pipelines))
        keeps_bound(rng, world, plan, goal, TABLES, seed)


def every_offload(plan: Plan) -> Iterator[Plan]:
    """The plan with some layers of one stage of each kind of pipeline offloaded, or of none."""
    yield plan
    deepest = max(len(pipeline.stages) for pipeline in plan.pipelines)
    for s in range(deepest):
        for count in range(1, 4):
            pipelines = []
            for pipeline in plan.pipelines:
                stages = list(pipeline.stages)
                if s < len(stages):
                    stage = replace(stages[s], offload=count)
                    stages[s] = replace(stage, offload=stage.offloaded)
                pipelines.append(replace(pipeline, stages=tuple(stages)))
            yield replace(plan, pipelines=tuple(pipelines))


@pytest.mark.slow
@pytest.mark.sim
@pytest.mark.parametrize("goal", ["throughput", "cost"])
def test_no_plan_of_a_small_case_is_below_its_bound(goal: Goal, examples: int) -> None:
    """All plans of a case in which memory is tight, with offloaded layers and without."""
    gained = 0
    for seed in range(max(4, examples // 4)):
        rng = random.Random(f"offload {seed}")
        case = tight_case(
            with_link(10 ** rng.uniform(0, 1.5)),
            batch=4,
            parameters=250_000_000,
            seconds=[rng.uniform(0.5, 1.5) for _ in range(4)],
            kept=[rng.uniform(5e8, 3e9) for _ in range(4)],
            goal=goal,
        )
        plans = (
            way for plan in every_unplaced_plan(case) for way in dict.fromkeys(every_offload(plan))
        )
        judge = case.judge
        least = least_of(case, judge, plans, lambda plan: str(plan.offloads))
        if least.score == math.inf:
            continue
        gained += least.scores["True"] < least.scores["False"] * (1 - 1e-9)
        least.is_above_bound(case, TABLES(judge, lots_of(case.cluster, judge.facts)), seed)
        answer = plan_job(Question(case.job, case.cluster, case.measurements, tries=("offload",)))
        if least.scores["False"] < math.inf:
            assert answer.objective is not None, seed
            assert answer.objective <= least.scores["False"] * (1 + 1e-9), seed
            least.is_above(answer, seed)
    assert gained
