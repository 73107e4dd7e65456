"""The trace player against one that ticks second by second, and what must add up."""

from __future__ import annotations

import itertools
import random

import pytest

from simulator.traces.player import (
    AvailabilitySpan,
    Decision,
    PlanFigures,
    PolicyInput,
    PolicyResult,
    ReconfigurationCosts,
    play,
)
from tests.simulator.traces.ticking import Greedy, Restless, Small, Ticking, small_case

CASES = 3
"""Random cases for each of the examples asked for: they take a millisecond each."""


def adds_up(case: Small, tale: PolicyResult) -> None:
    """Every second is counted once, and every dollar follows from GPU-seconds."""
    parts = (tale.useful_s, tale.lost_s, tale.downtime_s, tale.idle_s)
    assert sum(parts) == pytest.approx(tale.duration_s)
    assert min(parts) > -1e-4
    assert sum(stint.end_s - stint.start_s for stint in tale.segments) == pytest.approx(
        tale.duration_s
    )
    edges = [(one.end_s, two.start_s) for one, two in itertools.pairwise(tale.segments)]
    assert all(end == start for end, start in edges)
    held = [0.0] * len(case.ways[0].gpus)
    usd = 0.0
    for stint in tale.segments:
        if stint.plan is None:
            continue
        way, seconds = case.ways[stint.plan], stint.end_s - stint.start_s
        held = [sum_ + count * seconds for sum_, count in zip(held, way.gpus, strict=True)]
        assert way.usd_per_s is not None
        usd += way.usd_per_s * seconds
        if stint.kind == "training":
            usd += way.egress_usd * seconds / way.iteration_s
    assert list(tale.gpu_seconds) == pytest.approx(held)
    assert tale.usd == pytest.approx(usd)


@pytest.mark.parametrize("is_live", [True, False], ids=["live", "cold"])
def test_it_tells_what_ticking_tells(is_live: bool, examples: int) -> None:
    for seed in range(examples * CASES):
        case = small_case(seed)
        tale = play(
            case.spells, case.ways, case.fits, Greedy(case.ways, case.fits, is_live), case.costs
        )
        other = Ticking(case.ways, case.fits, case.costs, is_live)
        other.run(case.spells)
        told = (
            *(tale.steps, tale.samples, tale.steps_lost, tale.reconfigurations),
            *(tale.lost_s, tale.downtime_s, tale.idle_s, tale.usd, *tale.gpu_seconds),
        )
        ticked = (
            *(len(other.log), sum(n for _, n in other.log), other.steps_lost, other.moves),
            *(other.lost_s, other.downtime_s, other.idle_s, other.usd, *other.gpu_seconds),
        )
        assert told == pytest.approx(ticked), seed
        adds_up(case, tale)


@pytest.mark.parametrize("is_live", [True, False], ids=["live", "cold"])
def test_all_adds_up_whatever_a_policy_wishes(is_live: bool, examples: int) -> None:
    for seed in range(examples * 2):
        case = small_case(seed, longest_s=400)
        policy = Restless(random.Random(seed), case.ways, case.fits, is_live)
        adds_up(case, play(case.spells, case.ways, case.fits, policy, case.costs))


ONE = PlanFigures(10.0, 100, (4,), 2.0)
FAST = PlanFigures(4.0, 100, (8,), 4.0)
COSTS = ReconfigurationCosts(5, 10, 120, 60, 1, 0.5)


class Script:
    """Wishes what is written for each state."""

    name = "script"

    def __init__(self, *ways: int | None, is_live: bool = True) -> None:
        self.ways, self.is_live = ways, is_live

    def decide(self, view: PolicyInput) -> Decision:
        return Decision(self.ways[view.state])


def played(policy: Script, *spells: tuple[float, int, tuple[int, ...]]) -> PolicyResult:
    """Spells as (end, GPUs up, those taken)."""
    found, start_s = [], 0.0
    for number, (end_s, up, taken) in enumerate(spells):
        found.append(AvailabilitySpan(start_s, end_s, number, (up,), (taken,)))
        start_s = end_s
    return play(found, (ONE, FAST), lambda way, state: (ONE, FAST)[way].gpus[0] <= spells[state][1],
                policy, COSTS)  # fmt: skip


def test_a_planned_move_waits_for_the_iteration_and_loses_nothing() -> None:
    tale = played(Script(0, 1), (33, 4, ()), (101, 8, ()))
    # Four iterations until 40 s, 5 s of moving, and 14 of 4 s until 101 s.
    assert (tale.steps, tale.reconfigurations, tale.downtime_s, tale.lost_s) == (18, 1, 5, 0)
    assert tale.usd == 40 * 2.0 + 61 * 4.0


def test_a_loss_in_use_takes_the_iteration_in_flight() -> None:
    tale = played(Script(1, 0), (42, 8, ()), (102, 6, (0, 1)))
    assert (tale.steps, tale.losses, tale.steps_lost) == (10 + 5, 1, 0)
    assert (tale.downtime_s, tale.lost_s) == (10, 2)


def test_a_loss_of_idle_gpus_is_no_loss() -> None:
    tale = played(Script(0, 0), (42, 8, ()), (100, 6, (4, 7)))
    assert (tale.steps, tale.losses, tale.reconfigurations) == (10, 0, 0)


def test_when_most_memory_is_gone_the_durable_checkpoint_counts() -> None:
    tale = played(Script(1, 0), (100, 8, ()), (300, 4, (0, 1, 2, 3, 4)))
    # A checkpoint every 60 s: 15 steps are safe of 25; then 120 s down, and 8 steps of 10 s.
    assert (tale.steps, tale.steps_lost, tale.downtime_s) == (15 + 8, 10, 120)


def test_a_restart_for_more_waits_for_its_checkpoint() -> None:
    tale = played(Script(0, 1, is_live=False), (33, 4, ()), (200, 8, ()))
    # At 60 s six steps are durable; 120 s down; 5 steps of 4 s until 200 s.
    assert (tale.steps, tale.steps_lost, tale.downtime_s) == (6 + 5, 0, 120)


def test_nothing_to_run_costs_nothing() -> None:
    tale = played(Script(None, 0), (50, 3, ()), (300, 4, ()))
    # A job that begins late begins from nothing: a cold start.
    assert (tale.idle_s, tale.downtime_s, tale.steps) == (50, 120, 13)
    assert tale.usd == 250 * 2.0


def test_an_unknown_price_makes_the_sum_unknown() -> None:
    way = PlanFigures(10.0, 100, (4,), None)
    spell = AvailabilitySpan(0, 100, 0, (4,), ((),))
    tale = play((spell,), (way,), lambda *_: True, Greedy((way,), lambda *_: True, True), COSTS)
    assert tale.usd is None
    assert tale.steps == 10
