"""The oracle is the best of all schedules, and no policy beats it."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from planner.replay.oracle import best_possible, ideal_samples, least_usd
from simulator.traces.play_types import (
    AvailabilitySpan,
    Decision,
    PlanFigures,
    Policy,
    PolicyInput,
    ReconfigurationCosts,
    RunLimits,
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
        then = chosen[number + 1] if follows else None
        was_up = then is not None and case.fits(then, span.state)
        was_up = was_up and then is not None and not hits(case, then, number + 1)
        if way is not None:
            plan = case.plans[way]
            trains_s = span.end_s - case.spans[begin].start_s - down_s
            # Where the next plan could begin before the loss, parts of iterations count.
            if lost and is_fresh and trains_s >= 0 and not was_up:
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
        begin = number + 1
        if then is None:
            continue
        # A plan that runs on could be left later than at the arrival of the next one.
        is_fresh = not was_up and (way is None or lost)
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


@pytest.mark.parametrize("notices_s", [(0.0,), (0.0, 20.0, 90.0)], ids=["sudden", "announced"])
def test_no_policy_beats_the_oracle(notices_s: tuple[float, ...], examples: int) -> None:
    """Neither greedy policies, nor any that choose random plans at random times."""
    passed = 0
    for seed in range(examples * 4):
        case = small_case(seed, longest_s=300)
        rng = random.Random(seed)
        spans = [replace(span, notice_s=rng.choice(notices_s)) for span in case.spans]
        case = replace(case, spans=tuple(spans))
        oracle = best_possible(case.spans, case.plans, case.fits, case.costs)
        ideal = ideal_samples(case.spans, case.plans, case.fits) * (1 + 1e-9)
        assert oracle.samples <= ideal, seed
        parts = (oracle.useful_s, oracle.lost_s, oracle.downtime_s, oracle.idle_s)
        assert sum(parts) == pytest.approx(oracle.duration_s), seed
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
            until_s = outcome.duration_s
            assert outcome.samples <= ideal_samples(case.spans, case.plans, case.fits, until_s) * (
                1 + 1e-9
            ), (seed, policy.name)
            passed += outcome.samples > 0.9 * oracle.samples > 0
            if seed < examples // 4 and outcome.samples:
                spent = least_usd(case.spans, case.plans, case.fits, case.costs, [outcome.samples])
                assert spent[0] is not None
                assert outcome.usd is not None
                assert spent[0] <= outcome.usd * (1 + 1e-9), (seed, policy.name)
    assert passed > examples, "nearly all were far below it: this proves nothing"


class Planned:
    """Moves at given times."""

    name = "planned"
    is_live = True

    def __init__(self, *moves: tuple[float, int | None]) -> None:
        self.moves = moves

    def decide(self, view: PolicyInput) -> Decision:
        plan = [plan for at_s, plan in self.moves if at_s <= view.now_s][-1]
        return Decision(
            plan, min((at_s for at_s, _ in self.moves if at_s > view.now_s), default=math.inf)
        )


NONE = ((), (), ())
QUICK = PlanFigures(1.0, 1, (4, 0, 0), 1.0)
LONG = PlanFigures(60.0, 600, (0, 4, 0), 1.0)
HARD: list[Any] = [
    pytest.param(
        [
            PlanFigures(5.0, 10, (4, 0, 0), 1.0),
            PlanFigures(10 / 1.9, 10, (0, 4, 0), 1.0),
            PlanFigures(10.0, 30, (0, 0, 4), 1.0),
        ],
        [
            (100.5, (4, 4, 0), NONE),
            (204.5, (3, 4, 4), ((0,), (), ())),
            (204.6, (3, 4, 3), ((), (), (0,))),
        ],
        Planned((0, 0), (100.5, 2), (204.5, 1)),
        200 + 270,
        id="whole iterations fit after one way to begin, and not after a better one",
    ),
    pytest.param(
        [QUICK, LONG],
        [(100, (4, 0, 0), NONE), (205, (4, 4, 0), NONE), (300, (4, 3, 0), ((), (0,), ()))],
        Planned((0, 0), (140, 1), (205, 0)),
        140 + 600 + 85,
        id="a plan goes on until the next one has time for a last whole iteration",
    ),
    pytest.param(
        [LONG, PlanFigures(1.0, 5, (4, 0, 0), 1.0)],
        [
            (100, (0, 0, 0), NONE),
            (150, (0, 4, 0), NONE),
            (404, (4, 4, 0), NONE),
            (600, (4, 3, 0), ((), (0,), ())),
        ],
        Planned((0, None), (100, 0), (400, 1)),
        1800 + 195 * 5,
        id="a plan is left after its last whole iteration before the loss",
    ),
    pytest.param(
        [PlanFigures(1.0, 1, (4, 0, 0), 1.0)],
        [
            (1000, (4, 0, 0), NONE),
            (1010, (0, 0, 0), ((0, 1, 2, 3), (), ())),
            (1020, (1, 0, 0), NONE),
            (3000, (4, 0, 0), NONE),
        ],
        Planned((0, 0), (1000, 0)),
        1020 + 1975,
        id="others come while a plan trains on machines that leave",
    ),
]


@pytest.mark.parametrize(("plans", "ends", "policy", "samples"), HARD)
def test_the_oracle_is_no_less_than_a_schedule_that_makes_use_of(
    plans: Sequence[PlanFigures],
    ends: Sequence[tuple[float, tuple[int, ...], tuple[tuple[int, ...], ...]]],
    policy: Planned,
    samples: float,
) -> None:
    starts = [0.0, *(end_s for end_s, _, _ in ends)]
    spans = [
        AvailabilitySpan(start_s, end_s, number, up, lost, 30.0 if len(lost[0]) == 4 else 0.0)
        for number, (start_s, (end_s, up, lost)) in enumerate(zip(starts, ends, strict=False))
    ]
    case = Small(tuple(spans), tuple(plans), ReconfigurationCosts(5, 10, 120, checkpoint_share=0.0))
    outcome = play(case.spans, case.plans, case.fits, policy, case.costs)
    assert outcome.samples == samples
    given = case.spans, case.plans, case.fits, case.costs
    assert best_possible(*given).samples >= samples * (1 - 1e-9)
    (least,) = least_usd(*given, [samples])
    assert least is not None
    assert outcome.usd is not None
    assert least <= outcome.usd * (1 + 1e-9)


def test_a_second_of_a_notice_is_trained_on_one_plan_only() -> None:
    """On all machines until two of four are lost, then on two after a planned move."""
    spans = (
        AvailabilitySpan(0, 880, 0, (4,), ((),)),
        AvailabilitySpan(880, 2000, 1, (2,), ((2, 3),), 120.0),
    )
    plans = (PlanFigures(1.0, 2, (4,), 4.0), PlanFigures(1.0, 1, (2,), 2.0))
    costs = ReconfigurationCosts(planned_s=5)

    def fits(plan: int, state: int) -> bool:
        return plan == 1 or state == 0

    found = best_possible(spans, plans, fits, costs)
    assert (found.samples, found.steps, found.usd) == (2995, 1995, 6000)
    assert ideal_samples(spans, plans, fits) == 3000
    assert ideal_samples(spans, plans, fits, 950) == 1900
    (least,) = least_usd(spans, plans, fits, costs, [2995])
    assert least == pytest.approx(6000, rel=0.01)


def test_steps_and_samples_of_the_oracle_agree_where_a_plan_is_left_before_it_trains() -> None:
    """The restart begins on one machine, and another one comes before it has ended."""
    edges = ((0, 100, 0), (100, 130, 1), (130, 1000, 2))
    spans = [AvailabilitySpan(start, end, up, (up,), ((),)) for start, end, up in edges]
    plans = (PlanFigures(10.0, 10, (1,), 1.0), PlanFigures(1.0, 10, (2,), 2.0))
    costs = ReconfigurationCosts(planned_s=5, unplanned_s=10, restart_s=120)
    found = best_possible(spans, plans, lambda plan, state: plan < state, costs)
    assert found.steps * 10 == pytest.approx(found.samples)
    parts = (found.useful_s, found.lost_s, found.downtime_s, found.idle_s)
    assert sum(parts) == pytest.approx(1000)


@pytest.mark.parametrize(("steps", "at_s"), [(990, 990), (1010, 1010), (1040, None)])
def test_steps_that_end_within_a_notice_are_reached(steps: int, at_s: float | None) -> None:
    spans = (
        AvailabilitySpan(0, 1000, 0, (4,), ((),)),
        AvailabilitySpan(1000, 2000, 1, (0,), ((0, 1, 2, 3),), 30.0),
    )
    plan = PlanFigures(1.0, 1, (4,), 1.0)
    limits = RunLimits(steps)
    found = best_possible(
        spans, (plan,), lambda _, state: state == 0, ReconfigurationCosts(), limits
    )
    assert (found.ended, found.duration_s) == (("trace", 2000) if at_s is None else ("steps", at_s))
    assert found.samples == min(steps, 1030)


def test_the_last_step_within_a_notice_ends_the_job_before_another_plan_begins() -> None:
    spans = (
        AvailabilitySpan(0, 1000, 0, (4,), ((),)),
        AvailabilitySpan(1000, 3000, 1, (1,), ((1, 2, 3),), 500.0),
    )
    plans = (PlanFigures(1.0, 4, (4,), 4.0), PlanFigures(4.0, 4, (1,), 1.0))
    costs, limits = ReconfigurationCosts(planned_s=5), RunLimits(1200)
    found = best_possible(spans, plans, lambda plan, state: plan == 1 or state == 0, costs, limits)
    assert (found.ended, found.duration_s, found.steps) == ("steps", 1200, 1200)


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

    # There and back again: on the fast one it trains twice as much after 10 s; on the slow one it
    # trains 10 s less.
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
