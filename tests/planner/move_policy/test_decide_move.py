"""The move policy: flapping capacity causes no storm of moves, stable capacity is used soon."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, replace

import pytest

from planner.move_policy.decide_move import (
    DEFAULT_THRESHOLDS,
    MoveVerdict,
    PossibleMove,
    judge_move,
)
from planner.move_policy.node_lifetimes import PRIOR_LIFE_S, LifetimeHistory, PoolRecord

POOL = "A100-40@us-central1-a"
LOOK_S = 5.0


def offer(**changes: object) -> PossibleMove:
    """One node more of eight for 12 s of downtime, and as much if it is lost."""
    usual = PossibleMove(
        gain_per_s=12.0,
        unit="samples",
        cost=12.0 * 100.0,
        downtime_s=12.0,
        newcomers={POOL: 1},
        newcomer_age_s=0.0,
        before={POOL: 8},
        after={POOL: 9},
        loss_cost=12.0 * 112.0,
    )
    return replace(usual, **changes)  # type: ignore[arg-type]  # fields by name


@dataclass
class World:
    """A job on eight nodes and a ninth that comes and goes; the job takes it if that pays."""

    history: LifetimeHistory = LifetimeHistory()  # noqa: RUF009 - it is frozen
    has_ninth: bool = False
    up_since_s: float | None = None
    voluntary: int = 0
    forced: int = 0
    last_move_s: float | None = None
    taken_at_s: float = math.inf

    def look(self, now_s: float, *, is_up: bool) -> None:
        lost = self.up_since_s is not None and not is_up
        if is_up and self.up_since_s is None:
            self.up_since_s = now_s
        elif not is_up:
            self.up_since_s = None
        self.history = self.history.seen(
            now_s, up={POOL: 8 + is_up}, lost={POOL: 1} if lost else {}
        )
        if self.has_ninth and not is_up:
            self.has_ninth, self.forced = False, self.forced + 1
        if is_up and not self.has_ninth:
            assert self.up_since_s is not None
            verdict = judge_move(
                offer(newcomer_age_s=now_s - self.up_since_s),
                self.history,
                now_s=now_s,
                last_move_s=self.last_move_s,
            )
            if verdict.moves:
                self.has_ninth, self.voluntary = True, self.voluntary + 1
                self.last_move_s = self.taken_at_s = now_s


def played(period_s: float, *, up_share: float, until_s: float, stays_from_s: float) -> World:
    world = World()
    now_s = 0.0
    while now_s < until_s:
        is_up = now_s >= stays_from_s or now_s % period_s < up_share * period_s
        world.look(now_s, is_up=is_up)
        now_s += LOOK_S
    return world


@pytest.mark.slow
@pytest.mark.parametrize("period_s", [20.0, 30.0, 60.0, 90.0, 120.0])
@pytest.mark.parametrize("up_share", [0.3, 0.5, 0.9])
def test_a_flapping_node_is_left_alone_after_an_hour(period_s: float, up_share: float) -> None:
    world = played(period_s, up_share=up_share, until_s=6 * 3600, stays_from_s=math.inf)
    assert (world.last_move_s or 0.0) <= 3600, f"{world.voluntary} moves in 6 hours"
    assert world.voluntary <= 30
    assert world.forced <= world.voluntary


@pytest.mark.parametrize("flaps_for_s", [0.0, 600.0, 3600.0])
def test_a_stable_new_node_is_used_within_minutes(flaps_for_s: float) -> None:
    world = played(60.0, up_share=0.5, until_s=flaps_for_s + 1800, stays_from_s=flaps_for_s)
    assert world.has_ninth
    # The gain forgone reaches twice the cost of the move and of the next loss within 4 minutes.
    assert world.taken_at_s - flaps_for_s <= 240.0


def test_a_necessary_move_ignores_its_cost() -> None:
    verdict = judge_move(
        offer(gain_per_s=-5.0, cost=1e9, needed="pipeline 3 lost a node"),
        LifetimeHistory(),
        now_s=0.0,
        last_move_s=0.0,
    )
    assert verdict.moves
    assert "lost a node" in verdict.reason


def test_a_plan_that_is_no_better_is_not_moved_to() -> None:
    assert not judge_move(offer(gain_per_s=0.0), LifetimeHistory(), now_s=0.0).moves


def after_calm(hours: float) -> LifetimeHistory:
    return (
        LifetimeHistory().seen(0.0, up={POOL: 9}, lost={}).seen(3600 * hours, up={POOL: 9}, lost={})
    )


def in_a_storm(now_s: float = 3600.0) -> LifetimeHistory:
    """A loss and an addition each minute for an hour."""
    history = LifetimeHistory()
    for second in range(0, int(now_s), 60):
        history = history.seen(float(second), up={POOL: 8}, lost={})
        history = history.seen(second + 30.0, up={POOL: 9}, lost={})
        history = history.seen(second + 59.0, up={POOL: 8}, lost={POOL: 1})
    return history


def test_an_expected_gain_above_the_cost_moves_at_once() -> None:
    assert judge_move(offer(), after_calm(5.0), now_s=5 * 3600.0).moves
    verdict = judge_move(offer(), in_a_storm(), now_s=3600.0)
    assert not verdict.moves
    assert verdict.ask_again_s is not None


def test_the_gain_forgone_is_limited_however_bad_the_outlook() -> None:
    storm = in_a_storm()
    first = judge_move(offer(), storm, now_s=3600.0)
    assert first.ask_again_s == pytest.approx(DEFAULT_THRESHOLDS.wait_max * first.cost / 12.0)
    waited_s = first.ask_again_s
    assert waited_s is not None
    early, late = (
        judge_move(offer(newcomer_age_s=waited_s * share), storm, now_s=3600.0)
        for share in (0.99, 1.0)
    )
    assert not early.moves
    assert early.ask_again_s == pytest.approx(0.01 * waited_s)
    assert late.moves
    assert "waiting for" in late.reason


def test_the_wait_grows_as_the_expected_gain_shrinks() -> None:
    def waits_s(events: int) -> float:
        history = LifetimeHistory().seen(0.0, up={POOL: 9}, lost={})
        for number in range(events):
            history = history.seen(60.0 * number, up={POOL: 9}, lost={POOL: 1})
        verdict: MoveVerdict = judge_move(offer(), history, now_s=3600.0)
        return 0.0 if verdict.moves else verdict.ask_again_s or 0.0

    found = [waits_s(events) for events in (0, 10, 20, 40, 60)]
    assert found == sorted(found)
    assert found[0] == 0.0 < found[-1]


def test_the_loss_of_a_newcomer_counts_as_a_cost() -> None:
    calm = after_calm(1.0)
    elsewhere = {"newcomers": {"T4@b": 1}, "after": {POOL: 8, "T4@b": 1}}
    dear = judge_move(offer(loss_cost=1e6, **elsewhere), calm, now_s=3600.0)
    assert dear.cost > 1200.0 + 1e5
    assert not dear.moves
    assert judge_move(offer(loss_cost=0.0, **elsewhere), calm, now_s=3600.0).moves
    # Nodes of the old plan are lost with either.
    same = {POOL: 9}
    swap = offer(loss_cost=1e7, before=same, after=same)
    assert judge_move(swap, calm, now_s=3600.0).cost == 1200.0


def test_without_newcomers_the_next_move_waits_until_the_gain_forgone_equals_its_cost() -> None:
    """Prices and links that swing back and forth do not move the job each time."""
    swing = offer(newcomers={}, newcomer_age_s=math.inf)
    assert judge_move(swing, LifetimeHistory(), now_s=100.0).moves
    soon = judge_move(swing, LifetimeHistory(), now_s=100.0, last_move_s=90.0)
    assert not soon.moves
    assert soon.ask_again_s == pytest.approx(1200 / 12 - 10)


def test_a_job_that_is_nearly_done_stays() -> None:
    assert judge_move(offer(seconds_left=3600.0), after_calm(5.0), now_s=18000.0).moves
    verdict = judge_move(offer(seconds_left=60.0), after_calm(5.0), now_s=18000.0)
    assert not verdict.moves
    assert verdict.ask_again_s is None


def test_an_event_counts_once_however_many_nodes_it_takes() -> None:
    few, many = (
        LifetimeHistory()
        .seen(0.0, up={POOL: 16}, lost={})
        .seen(600.0, up={POOL: 0}, lost={POOL: lost})
        for lost in (1, 16)
    )
    assert few.record(POOL, 700.0).losses_per_s == many.record(POOL, 700.0).losses_per_s
    few, many = (
        LifetimeHistory()
        .seen(0.0, up={POOL: 16}, lost={})
        .seen(600.0, up={POOL: 16}, lost={POOL: lost})
        for lost in (1, 16)
    )
    # What it takes at a time says how likely it is to take a node of a small plan.
    assert few.hits_per_s({POOL: 1}, 700.0) < many.hits_per_s({POOL: 1}, 700.0)
    assert few.hits_per_s({POOL: 16}, 700.0) == many.hits_per_s({POOL: 16}, 700.0)


def test_lifetimes_follow_observations_and_old_ones_fade() -> None:
    history = LifetimeHistory().seen(0.0, up={POOL: 10}, lost={})
    assert history.record(POOL, 0.0).node_life_s == PRIOR_LIFE_S
    calm = history.record(POOL, 6 * 3600.0)
    assert calm.node_life_s > 5 * PRIOR_LIFE_S
    assert 1 / calm.losses_per_s > 2 * PRIOR_LIFE_S
    for minute in range(60):
        history = history.seen(60.0 * minute, up={POOL: 10}, lost={POOL: 2})
    busy = history.record(POOL, 3600.0)
    # 120 losses in ten node-hours, and one believed life of two hours.
    assert busy.node_life_s == pytest.approx(12 * 3600 / 121, rel=0.15)
    assert 1 / busy.losses_per_s == pytest.approx(60.0, rel=0.6)
    later = busy.at(3600.0 * 72)
    assert later.node_life_s > 100 * busy.node_life_s
    assert later.losses_per_s < busy.losses_per_s / 50
    assert later.flaps < 1e-6


def test_the_gain_of_nodes_in_more_pools_ends_sooner() -> None:
    def life_s(**nodes: int) -> float:
        found = offer(newcomers=nodes, before={}, after=nodes)
        return judge_move(found, LifetimeHistory(), now_s=0.0).expected_life_s

    assert life_s(a=1) == pytest.approx(2 * life_s(a=1, b=1), rel=0.5)
    assert life_s(a=1) > life_s(a=1, b=1)


def test_updating_a_record_in_steps_equals_updating_it_once() -> None:
    record = PoolRecord(
        0.0, lived_s=100.0, losses=3.0, flaps=2.0, seen_s=50.0, seen_lately_s=40.0, events=2.0,
        shares=1.0, additions=2.0, additions_lately=1.0,
    )  # fmt: skip
    in_steps = record
    for now_s in range(0, 1000, 10):
        in_steps = in_steps.at(float(now_s))
    at_once = record.at(990.0)
    assert astuple(in_steps) == pytest.approx(astuple(at_once))
