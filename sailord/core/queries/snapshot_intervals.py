"""Intervals of snapshots and checkpoints, from their measured cost and the rate of departures.

A snapshot in memory is taken as often as its stalls stay below ``STALL_SHARE`` of training time,
and not before the last one is settled. A checkpoint is made every
sqrt(2 · cost · time between departures) seconds, the optimum between its own cost and the half
interval that each departure loses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from agents.protocol.records import Saving
from sailord.core.model.proposal import Proposal
from sailord.core.model.state import Active, State

STALL_SHARE = 0.03
"""At most this share of a step, on average, is spent waiting for snapshots."""
COST_SHARE_MIN = 0.01
"""A checkpoint costs at least this share of a step: uploads compete with training."""
_BARE_SHARE_MIN = 0.05
"""At least this share of a measured step is not waiting for snapshots."""
PRIOR_S = 6 * 3600.0
"""Prior: seconds between departures in a cluster without history."""


@dataclass(frozen=True, slots=True)
class Intervals:
    """Intervals in steps."""

    memory_every: int
    persist_every: int | None
    """A multiple of ``memory_every``; ``None``: no checkpoints."""


@dataclass(frozen=True, slots=True)
class SnapshotCosts:
    """The measured cost of a generation's snapshots."""

    memory_every: int
    """Their interval in steps."""
    stall_s: float | None = None
    """Seconds for which one stalled training."""
    late_s: float = 0.0
    """The part of ``stall_s`` spent waiting until the previous snapshot had settled."""
    settle_s: float | None = None
    """Seconds from a snapshot's start until the next one can start without waiting."""


NOTHING_SEEN = SnapshotCosts(1)


def intervals(
    saving: Saving,
    *,
    step_s: float,
    seen: SnapshotCosts,
    observed_s: float,
    departed: float,
    write_s: float = 0.0,
) -> Intervals:
    """Return the intervals; what the job sets itself is kept.

    A checkpoint begins after the last one was written, which takes ``write_s``.

    ``step_s`` is as observed, with stalls. Before anything is measured, every step takes a
    snapshot, and a checkpoint is assumed to cost a whole step.
    """
    memory = saving.memory_every or _memory_every(step_s, seen)
    if saving.uri is None:
        return Intervals(memory, None)
    persist = saving.persist_every
    if persist is None:
        stall_s = seen.stall_s
        cost_s = step_s if stall_s is None else max(stall_s, COST_SHARE_MIN * step_s)
        between_s = (observed_s + PRIOR_S) / (departed + 1)
        every_s = max(write_s, math.sqrt(2 * cost_s * between_s))
        persist = max(1, round(every_s / step_s))
    return Intervals(memory, -(-persist // memory) * memory)


def _memory_every(step_s: float, seen: SnapshotCosts) -> int:
    """Return the shortest interval within the limits; the last one if nothing was measured."""
    if seen.stall_s is None:
        return seen.memory_every
    bare_s = max(step_s - seen.stall_s / seen.memory_every, _BARE_SHARE_MIN * step_s)
    copying_s = seen.stall_s - seen.late_s
    settled = math.ceil((seen.settle_s or 0.0) / bare_s)
    return max(1, settled, math.ceil(copying_s / (STALL_SHARE * bare_s)))


def intervals_now(state: State, active: Active, proposal: Proposal) -> Intervals:
    """Return the intervals of the next generation, from the reports of the last.

    The cluster's losses count before the job itself was observed for as long.
    """
    past = state.job.past
    observed_s = 0.0 if past.since is None else max(0.0, state.now - past.since)
    departed: float = departures(state, active)
    if proposal.observed_s > observed_s:
        observed_s, departed = proposal.observed_s, max(proposal.losses, departed)
    return intervals(
        state.job.saving,
        step_s=active.progress.step_s or proposal.iteration_s,
        seen=_measure_costs(state, active),
        observed_s=observed_s,
        departed=departed,
        write_s=proposal.write_s,
    )


def _measure_costs(state: State, active: Active) -> SnapshotCosts:
    """Return the slowest node's measurements, since the others wait for it."""
    record = active.generation
    if record is None:
        return NOTHING_SEEN
    reports = [report for _, report in state.reports_of(record)]
    stalls = ((each.stall_s, each.late_s or 0.0) for each in reports if each.stall_s is not None)
    stall_s, late_s = max(stalls, default=(None, 0.0))
    settled = (each.settle_s for each in reports if each.settle_s is not None)
    return SnapshotCosts(record.memory_every, stall_s, late_s, max(settled, default=None))


def departures(state: State, active: Active) -> int:
    """Return how many members were lost or drained so far, the last generation included."""
    members = () if active.generation is None else active.generation.members
    nodes = (state.nodes.get(id_) for id_ in members)
    leaving = sum(n is None or n.is_lost or n.exclusion.draining_since is not None for n in nodes)
    return state.job.past.departures + leaving
