"""Intervals of snapshots and checkpoints follow from measurements."""

from __future__ import annotations

import math

import pytest

from agents.protocol.records import JobPast, Saving
from sailord.core.queries.snapshot_intervals import (
    NOTHING_SEEN,
    PRIOR_S,
    STALL_SHARE,
    SnapshotCosts,
    intervals,
    intervals_now,
)
from tests.sailord.core.states import NOW, job, proposal, state

HERE = Saving("file:///x")


def chosen(saving=HERE, *, step_s=1.0, stall_s=0.0, every=1, observed_s=0.0, departed=0, **seen):
    """``step_s`` is that of steps that nothing holds up."""
    return intervals(
        saving,
        step_s=step_s + stall_s / every,
        seen=SnapshotCosts(every, stall_s, **seen),
        observed_s=observed_s,
        departed=departed,
    )


def test_intervals_of_the_job_are_kept():
    assert chosen(Saving("file:///x", 2, 10)).memory_every == 2
    assert chosen(Saving("file:///x", 2, 10)).persist_every == 10
    assert chosen(Saving("file:///x", 4, 10)).persist_every == 12
    assert chosen(Saving(None)).persist_every is None


@pytest.mark.parametrize(("stall_s", "every"), [(0.0, 1), (0.03, 1), (0.031, 2), (0.3, 10)])
def test_snapshot_stalls_stay_below_their_share(stall_s, every):
    found = chosen(stall_s=stall_s)
    assert found.memory_every == every
    assert stall_s / found.memory_every <= STALL_SHARE


def test_checkpoint_interval_is_the_optimum():
    cost_s, hours = 0.5, 10
    each_step = Saving("file:///x", memory_every=1)
    found = chosen(
        each_step, stall_s=cost_s, step_s=1 - cost_s, observed_s=hours * 3600 - PRIOR_S, departed=9
    )
    between_s = hours * 3600 / 10
    assert found.persist_every == pytest.approx(math.sqrt(2 * cost_s * between_s), rel=0.02)

    def lost(every):
        """Each second: the cost of checkpoints, and half an interval with each departure."""
        return cost_s / every + every / 2 / between_s

    best = min(range(1, 1000), key=lost)
    assert lost(found.persist_every) <= 1.02 * lost(best)


def test_checkpoint_interval_follows_departures_and_cost():
    calm, wild = chosen(stall_s=0.02), chosen(stall_s=0.02, departed=20)
    assert wild.persist_every < calm.persist_every
    assert chosen(stall_s=0.03).persist_every > calm.persist_every


def test_every_step_has_a_snapshot_before_measurements():
    found = intervals(HERE, step_s=2.0, seen=NOTHING_SEEN, observed_s=0.0, departed=0)
    assert found.memory_every == 1
    assert found.persist_every == round(math.sqrt(2 * 2.0 * PRIOR_S) / 2.0)


def test_next_snapshot_waits_for_the_last_to_settle():
    """Sealing takes two steps and a half; the copy in itself holds nothing up."""
    throttled = chosen(stall_s=1.5, late_s=1.5, settle_s=2.5)
    assert throttled.memory_every == 3
    assert chosen(every=3, settle_s=2.5).memory_every == 3, "it swings from one to the other"
    assert chosen(every=50, settle_s=0.4).memory_every == 1, "what was rare stays so forever"


def test_replication_time_is_not_snapshot_cost():
    first = chosen(stall_s=100.3, late_s=100.0, settle_s=101.0).memory_every
    assert first == 20  # A step that is nearly all waiting tells no more.
    late_s = 101.0 - first
    found = chosen(every=first, stall_s=0.3 + late_s, late_s=late_s, settle_s=101.0)
    assert found.memory_every == 101
    assert chosen(every=101, stall_s=0.3, settle_s=101.0).memory_every == 101


def test_short_generation_keeps_the_interval():
    found = intervals(HERE, step_s=1.0, seen=SnapshotCosts(7), observed_s=0.0, departed=0)
    assert found.memory_every == 7


def test_a_checkpoint_waits_until_the_last_one_is_written():
    def every(write_s):
        return intervals(
            HERE,
            step_s=2.0,
            seen=SnapshotCosts(1, 0.02),
            observed_s=0.0,
            departed=0,
            write_s=write_s,
        ).persist_every

    assert every(1000.0) == 500
    assert every(1.0) == every(0.0) < 500


def test_losses_of_the_cluster_count_until_the_job_was_observed_for_longer():
    leader = state(job=job(saving=HERE, past=JobPast(since=NOW - 100.0)))
    often = [
        intervals_now(leader, leader.active, proposal(losses=n, observed_s=s))
        for n, s in ((0.0, 0.0), (0.0, 40_000.0), (50.0, 40_000.0), (50.0, 1.0))
    ]
    first, calm, wild, short = (each.persist_every for each in often)
    assert wild < first < calm
    assert short == first, "a second of the cluster says less than the job's own history"
