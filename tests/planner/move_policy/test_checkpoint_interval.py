"""Replays and the planner choose the interval of checkpoints that a running sailord chooses."""

from __future__ import annotations

import pytest

from agents.protocol.records import Saving
from planner.move_policy.checkpoint_interval import checkpoint_every_s
from sailord.core.queries.snapshot_intervals import SnapshotCosts, intervals


@pytest.mark.parametrize("losses", [0, 3])
@pytest.mark.parametrize("observed_s", [0.0, 50_000.0])
@pytest.mark.parametrize("write_s", [0.0, 5000.0])
def test_replays_choose_what_a_running_sailord_chooses(
    losses: int, observed_s: float, write_s: float
) -> None:
    """The formula stands in both: the core of the controller imports nothing of the planner."""
    step_s = 0.01
    costs = SnapshotCosts(1, stall_s=3.0)
    live = intervals(
        Saving(uri="file:///x", memory_every=1),
        step_s=step_s,
        seen=costs,
        observed_s=observed_s,
        departed=losses,
        write_s=write_s,
    )
    assert live.persist_every is not None
    ours = checkpoint_every_s(cost_s=3.0, write_s=write_s, observed_s=observed_s, losses=losses)
    assert live.persist_every * step_s == pytest.approx(ours, abs=step_s)
