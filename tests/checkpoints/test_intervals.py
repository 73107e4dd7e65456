"""How often state is kept follows from what was measured."""

from __future__ import annotations

import math

import pytest

from agents.protocol import Saving
from sailord.intervals import PRIOR_S, STALL_SHARE, intervals

HERE = Saving("file:///x")


def chosen(saving=HERE, *, step_s=1.0, stall_s=0.0, observed_s=0.0, departed=0):
    return intervals(
        saving, step_s=step_s, stall_s=stall_s, observed_s=observed_s, departed=departed
    )


def test_what_the_job_says_is_done():
    assert chosen(Saving("file:///x", 2, 10)).memory_every == 2
    assert chosen(Saving("file:///x", 2, 10)).persist_every == 10
    assert chosen(Saving("file:///x", 4, 10)).persist_every == 12
    assert chosen(Saving(None)).persist_every is None


@pytest.mark.parametrize(("stall_s", "every"), [(0.0, 1), (0.03, 1), (0.031, 2), (0.3, 10)])
def test_snapshots_hold_training_up_for_a_small_share_of_its_time(stall_s, every):
    found = chosen(stall_s=stall_s)
    assert found.memory_every == every
    assert stall_s / found.memory_every <= STALL_SHARE


def test_checkpoints_are_as_far_apart_as_loses_least():
    cost_s, hours = 0.5, 10
    each_step = Saving("file:///x", memory_every=1)
    found = chosen(each_step, stall_s=cost_s, observed_s=hours * 3600 - PRIOR_S, departed=9)
    between_s = hours * 3600 / 10
    assert found.persist_every == pytest.approx(math.sqrt(2 * cost_s * between_s), rel=0.02)

    def lost(every):
        """Each second: the cost of checkpoints, and half an interval with each departure."""
        return cost_s / every + every / 2 / between_s

    best = min(range(1, 1000), key=lost)
    assert lost(found.persist_every) <= 1.02 * lost(best)


def test_more_departures_mean_more_checkpoints_and_a_costlier_one_means_fewer():
    calm, wild = chosen(stall_s=0.02), chosen(stall_s=0.02, departed=20)
    assert wild.persist_every < calm.persist_every
    assert chosen(stall_s=0.03).persist_every > calm.persist_every


def test_before_anything_is_measured_each_step_has_a_snapshot():
    found = chosen(stall_s=None, step_s=2.0)
    assert found.memory_every == 1
    assert found.persist_every == round(math.sqrt(2 * 2.0 * PRIOR_S) / 2.0)
