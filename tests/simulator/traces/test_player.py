"""The trace player agrees with one that runs second by second, and its totals add up."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.replay.oracle import best_possible
from simulator.traces.play_types import (
    AvailabilitySpan,
    Decision,
    PlanFigures,
    Policy,
    PolicyInput,
    PolicyResult,
    ReconfigurationCosts,
    RunLimits,
)
from simulator.traces.player import play
from tests.simulator.traces.ticking import Greedy, Restless, Small, Ticking, small_case

CASES = 3
"""Random cases per example; each takes a millisecond."""


def adds_up(case: Small, result: PolicyResult) -> None:
    """Every second is counted once, and every dollar follows from GPU-seconds."""
    parts = (result.useful_s, result.lost_s, result.downtime_s, result.idle_s)
    assert sum(parts) == pytest.approx(result.duration_s)
    assert min(parts) > -1e-4
    assert sum(segment.end_s - segment.start_s for segment in result.segments) == pytest.approx(
        result.duration_s
    )
    edges = [(one.end_s, two.start_s) for one, two in itertools.pairwise(result.segments)]
    assert all(end == start for end, start in edges)
    held = [0.0] * len(case.plans[0].gpus)
    usd = 0.0
    for segment in result.segments:
        if segment.plan is None:
            continue
        plan, seconds = case.plans[segment.plan], segment.end_s - segment.start_s
        held = [sum_ + count * seconds for sum_, count in zip(held, plan.gpus, strict=True)]
        assert plan.usd_per_s is not None
        usd += plan.usd_per_s * seconds
        if segment.kind == "training":
            usd += plan.egress_usd * seconds / plan.iteration_s
    assert list(result.gpu_seconds) == pytest.approx(held)
    assert result.usd == pytest.approx(usd)


@pytest.mark.parametrize("is_live", [True, False], ids=["live", "cold"])
def test_player_agrees_with_a_second_by_second_player(is_live: bool, examples: int) -> None:
    for seed in range(examples * CASES):
        case = small_case(seed)
        result = play(
            case.spans, case.plans, case.fits, Greedy(case.plans, case.fits, is_live), case.costs
        )
        other = Ticking(case.plans, case.fits, case.costs, is_live)
        other.run(case.spans)
        told = (
            *(result.steps, result.samples, result.steps_lost, result.reconfigurations),
            *(result.lost_s, result.downtime_s, result.idle_s, result.usd, *result.gpu_seconds),
        )
        ticked = (
            *(len(other.log), sum(n for _, n in other.log), other.steps_lost, other.moves),
            *(other.lost_s, other.downtime_s, other.idle_s, other.usd, *other.gpu_seconds),
        )
        assert told == pytest.approx(ticked), seed
        adds_up(case, result)


@pytest.mark.parametrize("is_live", [True, False], ids=["live", "cold"])
def test_seconds_and_dollars_add_up_under_any_policy(is_live: bool, examples: int) -> None:
    for seed in range(examples * 2):
        case = small_case(seed, longest_s=400)
        policy = Restless(random.Random(seed), case.plans, case.fits, is_live)
        adds_up(case, play(case.spans, case.plans, case.fits, policy, case.costs))


counts = st.just((0, 0)) | st.tuples(st.integers(0, 6), st.integers(0, 4))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Small, RunLimits]:
    """A random trace with notices, random plans with prices, and a job that may end early."""
    found: list[AvailabilitySpan] = []
    before = draw(counts)
    states: dict[tuple[int, ...], int] = {}
    now_s = 0.0
    for number in range(draw(st.integers(1, 8))):
        up = before if number == 0 else draw(counts)
        lost = tuple(
            tuple(sorted(draw(st.permutations(range(was)))[: max(0, was - now)]))
            for was, now in zip(before, up, strict=True)
        )
        end_s = now_s + draw(st.floats(0.5, 300))
        notice_s = draw(st.sampled_from((0.0, 5.0, 120.0)))
        found.append(
            AvailabilitySpan(now_s, end_s, states.setdefault(up, len(states)), up, lost, notice_s)
        )
        now_s, before = end_s, up
    plan = st.builds(
        PlanFigures,
        st.floats(0.3, 20),
        st.just(8),
        st.tuples(st.integers(1, 5), st.integers(0, 3)),
        st.floats(0, 3),
        st.sampled_from((0.0, 0.25)),
        st.floats(0, 60),
    )
    costs = st.builds(
        ReconfigurationCosts,
        st.floats(0, 20),
        st.floats(0, 30),
        st.floats(0, 60),
        st.floats(1, 100),
        st.integers(1, 4),
        st.just(0.5),
        st.sampled_from((0.0, 0.01, 0.5)),
    )
    limits = RunLimits(
        draw(st.none() | st.integers(1, 100)), draw(st.none() | st.floats(0.1, 1000))
    )
    plans = tuple(draw(st.lists(plan, min_size=1, max_size=4)))
    return Small(tuple(found), plans, draw(costs)), limits


def starts_cold_where_no_gpu_was_up(case: Small, result: PolicyResult) -> None:
    """Lost machines hold no state: what begins after a time without any GPU is a restart."""
    empty = [
        (span.start_s + span.notice_s, span.end_s)
        for span in case.spans
        if not sum(span.up) and span.start_s + span.notice_s < span.end_s
    ]
    idle, down_s = None, 0.0
    for segment in result.segments:
        if segment.kind == "idle":
            idle, down_s = segment, 0.0
        elif segment.kind == "reconfiguring":
            down_s += segment.end_s - segment.start_s
        elif idle is not None:
            if any(begin < idle.end_s and idle.start_s < end for begin, end in empty):
                assert down_s >= case.costs.restart_s - 1e-6
            idle = None


@given(cases(), st.integers(0, 2**16))
def test_seconds_gpu_seconds_and_dollars_are_conserved(
    given_case: tuple[Small, RunLimits], seed: int
) -> None:
    case, limits = given_case
    policies: list[Policy] = []
    for is_live in (True, False):
        policies.append(Greedy(case.plans, case.fits, is_live))
        policies.append(Restless(random.Random(seed), case.plans, case.fits, is_live))
    oracle = best_possible(case.spans, case.plans, case.fits, case.costs)
    for policy in policies:
        result = play(case.spans, case.plans, case.fits, policy, case.costs, limits)
        adds_up(case, result)
        starts_cold_where_no_gpu_was_up(case, result)
        assert result.samples == 8 * result.steps
        # No more is trained than runs, and no GPU is held that is not there.
        assert result.useful_s <= result.duration_s * (1 + 1e-9)
        for pool, held in enumerate(result.gpu_seconds):
            most = sum(
                (span.end_s - span.start_s) * max(span.up[pool], before.up[pool] * span.notice_s)
                for before, span in zip((case.spans[0], *case.spans), case.spans, strict=False)
            )
            assert held <= most + 1e-6
        if limits.steps is not None:
            assert result.steps <= limits.steps
            assert (result.ended == "steps") == (result.steps == limits.steps)
        if limits.max_usd is not None:
            assert result.usd is not None
            assert result.usd <= limits.max_usd * (1 + 1e-9) + 1e-9
        assert result.samples <= oracle.samples * (1 + 1e-9) + 1e-6


@given(
    st.lists(st.floats(20, 500), min_size=3, max_size=3),
    st.floats(0.1, 60),
    st.floats(0.3, 5),
    st.integers(0, 2**16),
)
def test_no_state_outlives_an_announced_loss_of_all_gpus(
    lasts_s: list[float], notice_s: float, iteration_s: float, seed: int
) -> None:
    edges = [0.0, *itertools.accumulate(lasts_s)]
    ups = ((6, 0), (), ()), ((0, 0), tuple(range(6)), ()), ((6, 0), (), ())
    spans = tuple(
        AvailabilitySpan(begin_s, end_s, number, up, lost, notice_s)
        for number, (begin_s, end_s, (up, *lost)) in enumerate(
            zip(edges, edges[1:], ups, strict=False)
        )
    )
    costs = ReconfigurationCosts(5, 10, 40, 100)
    case = Small(spans, (PlanFigures(iteration_s, 8, (6, 0), 1.0),), costs)
    oracle = best_possible(case.spans, case.plans, case.fits, case.costs)
    for policy in (
        Greedy(case.plans, case.fits, True),
        Restless(random.Random(seed), case.plans, case.fits, True),
    ):
        result = play(case.spans, case.plans, case.fits, policy, case.costs)
        starts_cold_where_no_gpu_was_up(case, result)
        assert result.samples <= oracle.samples * (1 + 1e-9)


ONE = PlanFigures(10.0, 100, (4,), 2.0)
FAST = PlanFigures(4.0, 100, (8,), 4.0)
COSTS = ReconfigurationCosts(5, 10, 120, 60, 1, 0.5, checkpoint_share=0.0)


class Script:
    """Chooses a given plan for each state."""

    name = "script"

    def __init__(self, *plans: int | None, is_live: bool = True) -> None:
        self.plans, self.is_live = plans, is_live

    def decide(self, view: PolicyInput) -> Decision:
        return Decision(self.plans[view.state])


class TrainsOn(Script):
    """Keeps the plan that runs while its GPUs leave."""

    def decide(self, view: PolicyInput) -> Decision:
        return Decision(view.plan) if view.leaves_s < math.inf else super().decide(view)


def played(
    policy: Script, *spans: tuple[float, int, tuple[int, ...]], notice_s: float = 0.0
) -> PolicyResult:
    """Play spans given as (end, GPUs up, GPUs lost)."""
    found, start_s = [], 0.0
    for number, (end_s, up, lost) in enumerate(spans):
        found.append(AvailabilitySpan(start_s, end_s, number, (up,), (lost,), notice_s))
        start_s = end_s
    plans = (ONE, FAST)
    return play(found, plans, lambda n, state: plans[n].gpus[0] <= spans[state][1], policy, COSTS)


def test_planned_reconfiguration_waits_for_the_iteration_and_loses_no_work() -> None:
    result = played(Script(0, 1), (33, 4, ()), (101, 8, ()))
    # Four iterations until 40 s, 5 s of moving, and 14 of 4 s until 101 s.
    assert (result.steps, result.reconfigurations, result.downtime_s, result.lost_s) == (
        18,
        1,
        5,
        0,
    )
    assert result.usd == 40 * 2.0 + 61 * 4.0


def test_loss_of_used_gpus_loses_the_iteration_in_flight() -> None:
    result = played(Script(1, 0), (42, 8, ()), (102, 6, (0, 1)))
    assert (result.steps, result.losses, result.steps_lost) == (10 + 5, 1, 0)
    assert (result.downtime_s, result.lost_s) == (10, 2)


def test_loss_of_unused_gpus_does_not_stop_the_plan() -> None:
    result = played(Script(0, 0), (42, 8, ()), (100, 6, (4, 7)))
    assert (result.steps, result.losses, result.reconfigurations) == (10, 0, 0)


def test_loss_of_most_gpus_rolls_back_to_the_durable_checkpoint() -> None:
    result = played(Script(1, 0), (100, 8, ()), (300, 4, (0, 1, 2, 3, 4)))
    # A checkpoint every 60 s: 15 steps are safe of 25; then 120 s down, and 8 steps of 10 s.
    assert (result.steps, result.steps_lost, result.downtime_s) == (15 + 8, 10, 120)


@pytest.mark.parametrize("notice_s", [0.0, 1.0, 300.0])
def test_announced_losses_take_the_state_from_a_job_that_stops_before_them(notice_s: float) -> None:
    """All GPUs go at 1000 s and are back at 2000 s; the job stops at the notice."""
    every = tuple(range(8))
    spans = (1000, 8, ()), (2000, 0, every), (3000, 8, ())
    result = played(Script(1, None, 1), *spans, notice_s=notice_s)
    # The last checkpoint is at 960 s; 880 s are left after a restart.
    assert (result.steps, result.steps_lost, result.downtime_s) == (240 + 220, 10, 120)


def test_gpus_that_remain_after_a_stop_at_a_notice_keep_the_state() -> None:
    spans = (1000, 8, ()), (2000, 4, (4, 5, 6, 7)), (3000, 8, ())
    result = played(Script(1, None, 1), *spans, notice_s=10.0)
    assert (result.steps, result.steps_lost, result.downtime_s) == (250 + 247, 0, 10)
    spans = (1000, 8, ()), (1500, 6, (6, 7)), (2000, 4, (4, 5)), (3000, 8, ())
    result = played(Script(1, None, None, 1), *spans, notice_s=10.0)
    assert (result.steps, result.steps_lost, result.downtime_s) == (250 + 247, 0, 10)


@pytest.mark.parametrize("notice_s", [0.0, 10.0])
def test_gpus_lost_one_after_another_are_compared_with_the_plan_that_stopped(
    notice_s: float,
) -> None:
    """Half of eight keep the state, three do not, however few each loss takes."""
    spans = (1000, 8, ()), (1500, 4, (4, 5, 6, 7)), (2000, 3, (0,)), (3000, 8, ())
    result = played(Script(1, None, None, 1), *spans, notice_s=notice_s)
    # The last checkpoint is at 960 s; 880 s are left after a restart.
    assert (result.steps, result.steps_lost, result.downtime_s) == (240 + 220, 10, 120)


def test_a_plan_moves_from_gpus_that_leave_to_spare_ones() -> None:
    spans = (1000, 16, ()), (2000, 8, tuple(range(8)))
    result = played(Script(1, 1), *spans, notice_s=30)
    assert (result.losses, result.steps_lost, result.downtime_s) == (0, 0, 5)
    assert (result.reconfigurations, result.steps) == (1, 250 + 248)


class LeavesAt(Script):
    """Stays on GPUs that leave until a moment."""

    def decide(self, view: PolicyInput) -> Decision:
        decision = super().decide(view)
        is_early = view.leaves_s < math.inf and view.now_s < 1016
        return replace(decision, wake_s=1016, trains_on=True) if is_early else decision


def test_a_plan_may_train_on_gpus_that_leave_although_it_would_fit_on_others() -> None:
    spans = (1000, 16, ()), (2000, 8, tuple(range(8)))
    result = played(LeavesAt(1, 1), *spans, notice_s=30)
    began = next(each.start_s for each in result.segments if each.kind == "reconfiguring")
    assert (began, result.losses, result.reconfigurations) == (1016, 0, 1)


def test_a_plan_that_fits_nowhere_else_trains_until_its_gpus_are_lost() -> None:
    spans = (1000, 8, ()), (2000, 4, (4, 5, 6, 7)), (3000, 8, ())
    result = played(TrainsOn(1, None, 1), *spans, notice_s=10.0)
    # Two more steps, then four GPUs keep the state.
    assert result.losses == 1
    assert (result.steps, result.steps_lost, result.downtime_s) == (252 + 247, 0, 10)


def test_gpus_that_were_given_to_another_job_keep_no_state() -> None:
    spans = (1000, 8, ()), (2000, 0, ()), (3000, 8, ())
    result = played(Script(1, None, 1), *spans, notice_s=9.0)
    # The last checkpoint is at 960 s; 880 s are left after a restart.
    assert (result.steps, result.steps_lost, result.downtime_s) == (240 + 220, 10, 120)
    spans = (1000, 8, ()), (1500, 4, (4, 5, 6, 7)), (2000, 1, ()), (3000, 8, ())
    result = played(Script(1, None, None, 1), *spans)
    assert (result.steps, result.steps_lost, result.downtime_s) == (240 + 220, 10, 120)


def test_planned_restart_waits_for_the_next_checkpoint() -> None:
    result = played(Script(0, 1, is_live=False), (33, 4, ()), (200, 8, ()))
    # At 60 s six steps are durable; 120 s down; 5 steps of 4 s until 200 s.
    assert (result.steps, result.steps_lost, result.downtime_s) == (6 + 5, 0, 120)


def test_idle_time_costs_nothing() -> None:
    result = played(Script(None, 0), (50, 3, ()), (300, 4, ()))
    # A job that begins late begins from nothing: a cold start.
    assert (result.idle_s, result.downtime_s, result.steps) == (50, 120, 13)
    assert result.usd == 250 * 2.0


def test_unknown_price_makes_the_total_unknown() -> None:
    plan = PlanFigures(10.0, 100, (4,), None)
    span = AvailabilitySpan(0, 100, 0, (4,), ((),))
    result = play((span,), (plan,), lambda *_: True, Greedy((plan,), lambda *_: True, True), COSTS)
    assert result.usd is None
    assert result.steps == 10
