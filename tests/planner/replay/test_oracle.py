"""The oracle is the best of all schedules, and no policy beats it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from planner.replay.oracle import best_possible, ideal_samples
from simulator.traces.play_types import (
    AvailabilitySpan,
    PlanFigures,
    Policy,
    ReconfigurationCosts,
)
from simulator.traces.player import play
from tests.simulator.traces.ticking import Greedy, Restless, Small, small_case


def best_of_all(case: Small) -> float:
    """Every plan in every span, and every choice of where a new stretch begins."""
    best = 0.0
    options = [
        [None, *(n for n in range(len(case.plans)) if case.fits(n, span.state))]
        for span in case.spans
    ]
    for chosen in itertools.product(*options):
        for cuts in itertools.product((False, True), repeat=len(chosen) - 1):
            best = max(best, value_of(case, chosen, cuts))
    return best


def hits(case: Small, way: int, number: int) -> int:
    """GPUs of a plan that the change at the start of a span takes."""
    pools = zip(case.spans[number].lost, case.plans[way].gpus, strict=True)
    return sum(slot < count for slots, count in pools for slot in slots)


def value_of(case: Small, chosen: Sequence[int | None], cuts: Sequence[bool]) -> float:
    """The samples of one schedule; a stretch that never trains counts against it."""
    planned_s = min(case.costs.planned_s, case.costs.unplanned_s, case.costs.restart_s)
    warm_s = min(case.costs.unplanned_s, case.costs.restart_s)
    total, is_warm, begin = 0.0, False, 0
    """Samples; whether the state is in memory while no plan runs; first span of the stretch."""
    down_s, is_fresh = 0.0, True
    for number, way in enumerate(chosen):
        span = case.spans[number]
        follows = number + 1 < len(chosen)
        lost = (
            follows
            and way is not None
            and (
                hits(case, way, number + 1) > 0 or not case.fits(way, case.spans[number + 1].state)
            )
        )
        if follows and not lost and chosen[number + 1] == way and not cuts[number]:
            if way is None:
                gone = sum(map(len, case.spans[number + 1].lost))
                is_warm = is_warm and gone < sum(span.up)
            continue
        if way is not None:
            plan = case.plans[way]
            trains_s = span.end_s - case.spans[begin].start_s - down_s
            if lost and is_fresh and trains_s >= 0:
                trains_s = trains_s // plan.iteration_s * plan.iteration_s
            total += trains_s * plan.rate
        if not follows:
            continue
        survives = way is None or (
            sum(case.plans[way].gpus) - hits(case, way, number + 1)
            >= case.costs.survive_share * sum(case.plans[way].gpus)
        )
        if way is None:
            gone = sum(map(len, case.spans[number + 1].lost))
            is_warm = is_warm and gone < sum(span.up)
        else:
            is_warm = not lost or survives
        then = chosen[number + 1]
        begin = number + 1
        if then is None:
            continue
        was_up = case.fits(then, span.state) and not hits(case, then, number + 1)
        is_fresh = not was_up
        if way is not None and (was_up or not lost):
            down_s = planned_s
        else:
            down_s = warm_s if is_warm else case.costs.restart_s
    return total


def test_the_oracle_is_the_best_of_all_schedules(examples: int) -> None:
    for seed in range(examples * 2):
        case = small_case(seed, spans=5, plans=3, longest_s=40)
        outcome = best_possible(case.spans, case.plans, case.fits, case.costs)
        assert outcome.samples == pytest.approx(best_of_all(case)), seed
        parts = (outcome.useful_s, outcome.lost_s, outcome.downtime_s, outcome.idle_s)
        assert sum(parts) == pytest.approx(outcome.duration_s)
        assert outcome.samples <= ideal_samples(case.spans, case.plans, case.fits) * (1 + 1e-9)


def test_no_policy_beats_the_oracle(examples: int) -> None:
    """Neither greedy policies, nor any that choose random plans at random times."""
    passed = 0
    for seed in range(examples * 4):
        case = small_case(seed, longest_s=300)
        oracle = best_possible(case.spans, case.plans, case.fits, case.costs)
        policies: list[Policy] = [
            kind
            for is_live in (True, False)
            for kind in (
                Greedy(case.plans, case.fits, is_live),
                Restless(random.Random(seed), case.plans, case.fits, is_live),
            )
        ]
        for policy in policies:
            outcome = play(case.spans, case.plans, case.fits, policy, case.costs)
            assert outcome.samples <= oracle.samples * (1 + 1e-9), (seed, policy.name)
            passed += outcome.samples > 0.9 * oracle.samples > 0
    assert passed > examples, "nearly all were far below it: this proves nothing"


def test_the_oracle_ignores_capacity_that_is_soon_lost() -> None:
    slow, fast = PlanFigures(10, 10, (1,), 1.0), PlanFigures(5, 10, (2,), 2.0)

    def moves(lasts_s: float) -> int:
        edges = [0, 100, 100 + lasts_s, 1000]
        spans = [
            AvailabilitySpan(start, end, up, (up,), ((),))
            for start, end, up in zip(edges, edges[1:], (1, 2, 1), strict=False)
        ]
        fits = [{0}, {0}, {0, 1}]
        return best_possible(
            spans,
            (slow, fast),
            lambda way, state: way in fits[state],
            ReconfigurationCosts(planned_s=10),
        ).reconfigurations

    # There and back again: on the fast one it trains whole iterations of 5 s, two a second, after
    # 10 s; on the slow one it trains 10 s less.
    assert moves(34) == 0
    assert moves(36) == 2


def test_the_oracle_pays_for_the_plans_that_it_runs() -> None:
    way = PlanFigures(10, 10, (4,), 2.0, egress_usd=1.0)
    spans = (AvailabilitySpan(0, 100, 0, (4,), ((),)), AvailabilitySpan(100, 150, 1, (0,), ((),)))
    outcome = best_possible(spans, (way,), lambda _, state: state == 0, ReconfigurationCosts())
    assert (outcome.usd, outcome.gpu_seconds, outcome.idle_s) == (210, (400,), 50)
    unknown = best_possible(
        spans, (replace(way, usd_per_s=None),), lambda _, state: state == 0, ReconfigurationCosts()
    )
    assert unknown.usd is None


def test_without_plans_the_oracle_trains_nothing() -> None:
    outcome = best_possible(
        (AvailabilitySpan(0, 9, 0, (1,), ((),)),), (), lambda *_: False, ReconfigurationCosts()
    )
    assert (outcome.samples, outcome.idle_s, outcome.usd) == (0, 9, 0)
