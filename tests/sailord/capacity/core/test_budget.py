"""Limits that the budgets set."""

from __future__ import annotations

import pytest

from sailord.capacity.core.budget import spent_usd, usd_left, usd_per_hour_limit
from sailord.capacity.core.model import (
    Agent,
    AgentsCounted,
    CapacityPolicy,
    CapacityState,
    JobProgress,
    PauseJob,
    ProgressSeen,
    RequestAnswered,
    TargetSet,
)
from sailord.capacity.core.rented_instance import RentedInstance
from sailord.providers.interface import InDoubt, Instance, Pool
from tests.sailord.capacity.core.story import FIRST, SECOND, A, B, Story, instance


def state(policy: CapacityPolicy, *, hours: float) -> CapacityState:
    pool = Pool("a", "m", "gpu", 1, True)
    rented = RentedInstance(Instance("1", "n", pool, "running", 0.0, "r"), 3.6, 0.0, 0.0)
    return CapacityState(policy, hours * 3600.0, "t1", instances={"1": rented})


def test_the_rest_of_a_total_budget_limits_the_hourly_cost():
    # $3.60 have to last for the 180 s of parting and two looks of 10 s.
    later = state(CapacityPolicy(usd_max=7.2), hours=1.0)
    assert usd_left(later) == pytest.approx(3.6)
    assert usd_per_hour_limit(later) == pytest.approx(3.6 * 3600 / 200)
    assert usd_left(state(CapacityPolicy(usd_max=1.0), hours=1.0)) == 0.0
    assert (
        usd_per_hour_limit(state(CapacityPolicy(usd_max=7.2, usd_per_hour_max=9.0), hours=1.0))
        == 9.0
    )
    assert usd_per_hour_limit(state(CapacityPolicy(), hours=1.0)) is None


def test_a_request_in_an_unseen_zone_pauses_the_job_once_it_may_have_spent_the_budget():
    in_use, hidden = instance(pool=B, request=SECOND, at=0.0), (A.zone,)
    story = Story(CapacityPolicy(usd_max=10.0)).hear(TargetSet(1.0, {B: 1}))
    story.see(1.0, in_use).hear(TargetSet(2.0, {A: 2, B: 1}))
    story.hear(RequestAnswered(5.0, InDoubt(FIRST)))
    story.hear(ProgressSeen(6.0, JobProgress("j", 0.0, 5, 100, None, is_running=True)))
    paused_at = []
    for at in range(10, 2400, 10):
        story.see(float(at), in_use, unseen_zones=hidden)
        paused_at += [at] if story.of(PauseJob) else []
        story.hear(AgentsCounted(at + 1.0, {"n1": Agent(4)}, frozenset({"n1"})))
        paused_at += [at] if story.of(PauseJob) else []
    # $14.40 an hour, of which the last 190 s are kept.
    (paused,) = paused_at
    assert paused == pytest.approx(10.0 / 14.4 * 3600 - 190, abs=20)
    assert usd_left(story.state) == pytest.approx(10.0 - 14.4 * 2390 / 3600, abs=0.1)
    story.hear(TargetSet(2400.0, {B: 1}))  # Nothing more is wanted.
    for at in range(2400, 2700, 10):
        story.see(float(at), in_use)
    assert not story.state.asks, "it made nothing"
    assert story.state.stop == ""
    assert spent_usd(story.state) == pytest.approx(7.2 * 2690 / 3600, abs=0.1)
    assert usd_left(story.state) == pytest.approx(10.0 - spent_usd(story.state))
