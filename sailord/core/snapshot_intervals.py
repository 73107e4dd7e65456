"""How often state is kept, from what keeping it costs and how often machines go away.

A snapshot in memory is taken as often as the time for which it holds up training stays below a
small share of it, and not before the last one is out of the way. A checkpoint is made every
sqrt(2 · cost · time between departures) seconds, which loses least: half an interval with each
departure, against the cost of each checkpoint.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from agents.protocol.records import Saving
from sailord.core.state import Active, State

STALL_SHARE = 0.03
"""Of a step's time, on average, may be spent waiting for snapshots in memory."""
COST_SHARE_MIN = 0.01
"""Of a step: what a checkpoint costs at least, as uploads share the machine with training."""
_BARE_SHARE_MIN = 0.05
"""Of a step as it was observed, so much at least is no waiting for snapshots."""
PRIOR_S = 6 * 3600.0
"""A cluster that we know nothing of is taken to lose a machine in so many seconds."""


@dataclass(frozen=True, slots=True)
class Intervals:
    """In steps."""

    memory_every: int
    persist_every: int | None
    """A multiple of the other; ``None``: nothing is made durable."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a generation's snapshots were seen to cost."""

    memory_every: int
    """So often they were taken."""
    stall_s: float | None = None
    """How long one held training up, whatever it waited for."""
    late_s: float = 0.0
    """How much of that was since the one before was not out of the way."""
    settle_s: float | None = None
    """How long after one was begun the next might be taken without waiting."""


NOTHING_SEEN = Seen(1)


def intervals(
    saving: Saving, *, step_s: float, seen: Seen, observed_s: float, departed: int
) -> Intervals:
    """Choose what the job leaves open.

    ``step_s`` is as it was observed, what snapshots held it up included. Before anything is
    measured, each step has its snapshot, so that it soon is, and one is taken to cost a whole step.
    """
    memory = saving.memory_every or _memory_every(step_s, seen)
    if saving.uri is None:
        return Intervals(memory, None)
    persist = saving.persist_every
    if persist is None:
        stall_s = seen.stall_s
        cost_s = step_s if stall_s is None else max(stall_s, COST_SHARE_MIN * step_s)
        between_s = (observed_s + PRIOR_S) / (departed + 1)
        persist = max(1, round(math.sqrt(2 * cost_s * between_s) / step_s))
    return Intervals(memory, -(-persist // memory) * memory)


def _memory_every(step_s: float, seen: Seen) -> int:
    """As often as the limits allow; as before where the last generation was too short to tell."""
    if seen.stall_s is None:
        return seen.memory_every
    bare_s = max(step_s - seen.stall_s / seen.memory_every, _BARE_SHARE_MIN * step_s)
    copying_s = seen.stall_s - seen.late_s
    settled = math.ceil((seen.settle_s or 0.0) / bare_s)
    return max(1, settled, math.ceil(copying_s / (STALL_SHARE * bare_s)))


def intervals_now(state: State, active: Active, predicted_s: float) -> Intervals:
    """Choose for the next generation, from what was heard of the last."""
    past = state.job.past
    return intervals(
        state.job.saving,
        step_s=active.progress.step_s or predicted_s,
        seen=_seen(state, active),
        observed_s=0.0 if past.since is None else max(0.0, state.now - past.since),
        departed=departures(state, active),
    )


def _seen(state: State, active: Active) -> Seen:
    """The slowest node is what counts, since the others wait for it."""
    record = active.generation
    if record is None:
        return NOTHING_SEEN
    nodes = (state.nodes.get(id_) for id_ in record.members)
    reports = [n.report for n in nodes if n is not None and n.report is not None]
    ours = [report for report in reports if report.speaks_of(record)]
    stalls = ((each.stall_s, each.late_s or 0.0) for each in ours if each.stall_s is not None)
    stall_s, late_s = max(stalls, default=(None, 0.0))
    settled = (each.settle_s for each in ours if each.settle_s is not None)
    return Seen(record.memory_every, stall_s, late_s, max(settled, default=None))


def departures(state: State, active: Active) -> int:
    """How many members were lost, or left, those of the last generation included."""
    members = () if active.generation is None else active.generation.members
    nodes = (state.nodes.get(id_) for id_ in members)
    leaving = sum(n is None or n.is_lost or n.draining_since is not None for n in nodes)
    return state.job.past.departures + leaving
