"""The move policy: flapping capacity causes no storm of moves, stable capacity is used soon."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest

from planner.move_policy.decide_move import (
    DEFAULT_RULES,
    Offer,
    expected_life_s,
    judge_move,
    settling_s,
)
from planner.move_policy.node_lifetimes import PRIOR_LIFE_S, History, PoolRecord

POOL = "A100-40@us-central1-a"
LOOK_S = 5.0


def offer(**changes: object) -> Offer:
    """One node more of eight for 12 s of downtime."""
    usual = Offer(
        gain_per_s=12.0,
        unit="samples",
        cost=12.0 * 100.0,
        downtime_s=12.0,
        newcomers={POOL: 1},
        newcomer_age_s=3600.0,
    )
    return replace(usual, **changes)  # type: ignore[arg-type]  # fields by name


@dataclass
class World:
    """A job on eight nodes and a ninth that comes and goes; the job takes it if that pays."""

    history: History = History()  # noqa: RUF009 - it is frozen
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


@pytest.mark.parametrize("period_s", [20.0, 30.0, 60.0, 90.0, 120.0, 240.0])
@pytest.mark.parametrize("up_share", [0.3, 0.5, 0.9])
def test_a_flapping_node_moves_the_job_only_a_few_times(period_s: float, up_share: float) -> None:
    world = played(period_s, up_share=up_share, until_s=6 * 3600, stays_from_s=math.inf)
    assert world.voluntary <= 10, f"{world.voluntary} moves in 6 hours"
    assert world.forced <= world.voluntary


@pytest.mark.parametrize("flaps_for_s", [0.0, 600.0, 3600.0])
def test_a_stable_new_node_is_used_within_minutes(flaps_for_s: float) -> None:
    world = played(60.0, up_share=0.5, until_s=flaps_for_s + 1800, stays_from_s=flaps_for_s)
    assert world.has_ninth
    limit_s = 60.0 if flaps_for_s == 0 else 660.0
    assert world.taken_at_s - flaps_for_s <= limit_s


def test_a_necessary_move_ignores_its_cost() -> None:
    verdict = judge_move(
        offer(gain_per_s=-5.0, cost=1e9, needed="pipeline 3 lost a node", newcomer_age_s=0.0),
        History(),
        now_s=0.0,
        last_move_s=0.0,
    )
    assert verdict.moves
    assert "lost a node" in verdict.reason


def test_a_plan_that_is_no_better_is_not_moved_to() -> None:
    assert not judge_move(offer(gain_per_s=0.0), History(), now_s=0.0).moves


def test_the_gain_must_exceed_the_cost_by_the_margin() -> None:
    life_s = expected_life_s(offer(), History(), now_s=0.0)
    gain = 12.0 * (life_s - 12.0)
    just_enough = gain / DEFAULT_RULES.margin
    assert judge_move(offer(cost=just_enough * 0.999), History(), now_s=0.0).moves
    verdict = judge_move(offer(cost=just_enough * 1.001), History(), now_s=0.0)
    assert not verdict.moves
    assert verdict.ask_again_s is None
    assert f"{DEFAULT_RULES.margin:g} times" in verdict.reason


def test_a_job_that_is_nearly_done_stays() -> None:
    assert judge_move(offer(seconds_left=3600.0), History(), now_s=0.0).moves
    assert not judge_move(offer(seconds_left=60.0), History(), now_s=0.0).moves


def test_a_verdict_that_is_too_early_says_when_to_ask_again() -> None:
    verdict = judge_move(offer(newcomer_age_s=10.0), History(), now_s=0.0)
    assert not verdict.moves
    assert verdict.ask_again_s == pytest.approx(DEFAULT_RULES.settle_s - 10)
    later = judge_move(
        offer(newcomer_age_s=10.0 + verdict.ask_again_s), History(), now_s=verdict.ask_again_s
    )
    assert later.moves
    rested = judge_move(offer(), History(), now_s=100.0, last_move_s=90.0)
    assert not rested.moves
    assert rested.ask_again_s == pytest.approx(90 + 12 / DEFAULT_RULES.share_max - 100)


def test_lifetimes_follow_observations_and_old_ones_fade() -> None:
    history = History().seen(0.0, up={POOL: 10}, lost={})
    assert history.record(POOL, 0.0).node_life_s == PRIOR_LIFE_S
    calm = history.record(POOL, 6 * 3600.0).node_life_s
    assert calm > 5 * PRIOR_LIFE_S
    for minute in range(60):
        history = history.seen(60.0 * minute, up={POOL: 10}, lost={POOL: 2})
    busy = history.record(POOL, 3600.0)
    # 120 losses in ten node-hours, and one believed life of two hours.
    assert busy.node_life_s == pytest.approx(12 * 3600 / 121, rel=0.15)
    later = busy.at(3600.0 * 72)
    assert later.node_life_s > 100 * busy.node_life_s
    assert later.flaps < 1e-6


def test_more_new_nodes_have_a_shorter_expected_life() -> None:
    one = History().life_s({POOL: 1}, 0.0)
    many = History().life_s({POOL: 4, "T4@us-west1-b": 4}, 0.0)
    assert one == pytest.approx(8 * many)


def test_each_recent_loss_doubles_the_wait_and_a_mass_loss_counts_once() -> None:
    waits = []
    history = History()
    for _ in range(4):
        waits.append(settling_s(history, POOL, now_s=0.0))
        history = history.seen(0.0, up={POOL: 1}, lost={POOL: 8})
    assert waits == [30.0, 60.0, 120.0, 240.0]


def test_updating_a_record_in_steps_equals_updating_it_once() -> None:
    record = PoolRecord(0.0, nodes_up=0, lived_s=100.0, losses=3.0, flaps=2.0)
    in_steps = record
    for now_s in range(0, 1000, 10):
        in_steps = in_steps.at(float(now_s))
    at_once = record.at(990.0)
    assert in_steps.losses == pytest.approx(at_once.losses)
    assert in_steps.flaps == pytest.approx(at_once.flaps)
    assert in_steps.lived_s == pytest.approx(at_once.lived_s)
