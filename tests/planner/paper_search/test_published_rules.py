"""Our search within the published space: even layers, TP by rule, one region per stage."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.planners import question_of
from planner.api import plan_job
from planner.problem.question import Question
from simulator.api import load_measurements
from simulator.documents.problems import InputError
from simulator.estimate.paper_formula import STATE_BYTES_PER_PARAMETER
from simulator.hardware.catalogue import load_catalogue
from simulator.spec.plan import Plan
from tests.planner.small_cases import SmallCase, every_common_plan, is_possible, random_case


def is_published(case: SmallCase, plan: Plan) -> bool:
    """The published rules, written down a second time."""
    ranges = [stage.layers for stage in plan.pipelines[0].stages]
    sizes = [end - first for first, end in ranges]
    if sizes != sorted(sizes) or sizes[-1] - sizes[0] > 1:
        return False
    kinds = sorted({pool.gpu for pool in case.cluster.pools})
    regions = case.cluster.catalogue.zones
    for s, column in enumerate(zip(*(p.stages for p in plan.pipelines), strict=True)):
        if len({regions[stage.place.zone] for stage in column}) > 1:
            return False
        for stage in column:
            every = [
                rule(case, plan, ranges, k, stage.place.gpu, kinds) for k in range(len(ranges))
            ]
            if None in every or stage.tp != every[s]:
                return False
    return True


def rule(
    case: SmallCase, plan: Plan, ranges: list[tuple[int, int]], s: int, gpu: str, kinds: list[str]
) -> int | None:
    (first, end), b = ranges[s], plan.micro_batch_size
    capacity = case.cluster.catalogue.gpu(gpu).memory_bytes

    def needed(tp: int) -> float:
        sizes = case.profile.sizes[tp]
        states = STATE_BYTES_PER_PARAMETER * sum(sizes.parameters[first:end])
        kept = 4 * b * sum(sizes.kept_elements[first:end]) * (len(ranges) - s)
        return states + kept + (2e9 if tp == 1 else 3e9)

    def seconds(tp: int) -> float:
        timing = case.profile.timings[gpu, tp, b]
        return float((timing.forward_s + timing.backward_s)[first:end].sum())

    degrees = [tp for tp in (1, 2, 4) if (gpu, tp, b) in case.profile.timings]
    fitting = [tp for tp in degrees if needed(tp) <= capacity]
    if not fitting or (gpu == kinds[0] and len(kinds) > 1):
        return min(fitting, default=None)
    best = degrees[0]
    for tp in degrees[1:]:
        if seconds(best) / seconds(tp) < 1.5:
            break
        best = tp
    return max(best, min(fitting))


@pytest.mark.sim
def test_no_plan_of_the_published_space_is_better(examples: int) -> None:
    found = 0
    for seed in range(max(20, examples // 2)):
        rng = random.Random(f"published {seed}")
        goal = rng.choice(["throughput", "cost"])
        case = random_case(rng, gpus_max=4, layers_max=4, batch=rng.choice([2, 4]), goal=goal)
        question = Question(case.job, case.cluster, case.measurements, "paper", "paper")
        answer = plan_job(question)
        estimates = [
            estimate
            for plan in every_common_plan(case)
            if is_published(case, plan) and is_possible(case, plan)
            if (estimate := case.paper(plan)) is not None and estimate.fits
        ]
        scores = [e.money.total_usd if goal == "cost" else e.iteration_s for e in estimates]
        assert (answer.plan is None) == (not scores), seed
        if answer.plan is None:
            continue
        found += 1
        assert answer.objective is not None
        assert is_published(case, answer.plan) or not answer.batch_exact, seed
        least = min(score for score in scores if score is not None)
        if answer.batch_exact:
            assert answer.objective == pytest.approx(least, rel=1e-9), seed
        else:
            assert answer.objective < least, seed
        assert answer.lower_bound <= answer.objective * (1 + 1e-9), seed
        full = plan_job(replace(question, space="full"))
        assert full.objective is not None
        if answer.batch_exact:
            assert full.objective <= answer.objective * (1 + 1e-9), seed
    assert found > 5


def test_the_batch_is_rounded_up_only_where_that_is_better() -> None:
    """A batch of 3 is done as one micro batch of 4 where that is quicker than three of 1."""
    rounded = 0
    for seed in range(30):
        case = random_case(random.Random(f"rounded {seed}"), gpus_max=4, layers_max=3, batch=3)
        full = Question(case.job, case.cluster, case.measurements, "paper")
        exact = plan_job(full)
        assert exact.plan is None or exact.batch_exact
        answer = plan_job(replace(full, space="paper"))
        if answer.plan is None or answer.batch_exact:
            continue
        rounded += 1
        assert answer.plan.samples_per_iteration == 4
        assert answer.plan.micro_batch_size in (2, 4)
        assert answer.to_json(seconds=0.0)["batch_exact"] is False
    assert rounded


def test_the_event_estimator_refuses_the_paper_space() -> None:
    case = random_case(random.Random(1))
    with pytest.raises(InputError, match="use --estimator paper"):
        plan_job(Question(case.job, case.cluster, case.measurements, "event", "paper"))


QUICK = ("fig7-opt-128", "fig8b-opt-32+96", "fig10-opt-5x32", "neo-v100", "opt-gh-64")


@pytest.mark.sim
def test_search_is_never_worse_than_the_published_answers(reference: Path, examples: int) -> None:
    document = json.loads((reference / "planner_cases.json").read_text(encoding="utf-8"))
    measurements = load_measurements(reference, catalogue=load_catalogue())
    for case in document["cases"]:
        if case["sailor_plan"] is None or (examples <= 50 and case["name"] not in QUICK):
            continue
        question = question_of(case, document, measurements, estimator="paper", space="paper")
        answer = plan_job(question)
        costs = case["objective"] == "iteration_cost"
        published = case["sailor_cost_per_iter"] if costs else case["sailor_iter_time_s"]
        assert answer.objective is not None, case["name"]
        assert answer.objective <= published * (1 + 1e-9), case["name"]
        assert answer.batch_exact
