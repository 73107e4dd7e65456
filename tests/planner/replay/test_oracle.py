"""The oracle is the best of all schedules, and no policy beats it."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from planner.replay.oracle import best_possible, ideal_samples
from simulator.traces.player import (
    AvailabilitySpan,
    PlanFigures,
    Policy,
    ReconfigurationCosts,
    play,
)
from tests.simulator.traces.ticking import Greedy, Restless, Small, small_case


def best_of_all(case: Small, down_s: float) -> float:
    """Every way in every spell, and every choice of where a new stretch begins."""
    best = 0.0
    options = [
        [None, *(n for n in range(len(case.plans)) if case.fits(n, span.state))]
        for span in case.spans
    ]
    for chosen in itertools.product(*options):
        total, stretch_s = 0.0, 0.0
        for number, (way, span) in enumerate(zip(chosen, case.spans, strict=True)):
            if number and way != chosen[number - 1]:
                stretch_s = -down_s
            stretch_s += span.end_s - span.start_s
            last = number + 1 == len(chosen) or chosen[number + 1] != way
            if last and way is not None:
                total += max(0.0, stretch_s) * case.plans[way].samples / case.plans[way].iteration_s
        best = max(best, total)
    return best


def test_the_oracle_is_the_best_of_all_schedules(examples: int) -> None:
    for seed in range(examples * 2):
        case = small_case(seed, spans=6, plans=3, longest_s=40)
        down_s = min(case.costs.planned_s, case.costs.unplanned_s, case.costs.restart_s)
        outcome = best_possible(case.spans, case.plans, case.fits, case.costs)
        assert outcome.samples == pytest.approx(best_of_all(case, down_s)), seed
        parts = (outcome.useful_s, outcome.downtime_s, outcome.idle_s)
        assert sum(parts) == pytest.approx(outcome.duration_s)
        assert outcome.samples <= ideal_samples(case.spans, case.plans, case.fits) * (1 + 1e-9)


def test_no_policy_beats_the_oracle(examples: int) -> None:
    """Neither greedy ones, nor any that wish at random at random times."""
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

    # There and back again: on the fast one it trains 2/s less 10 s, on the slow one 10 s less.
    assert moves(29) == 0
    assert moves(31) == 2


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
