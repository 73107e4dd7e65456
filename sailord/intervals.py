"""How often state is kept, from what keeping it costs and how often machines go away.

A snapshot in memory is taken as often as the time for which it holds up training stays below a
small share of it. A checkpoint is made every sqrt(2 · cost · time between departures) seconds,
which loses least: half an interval with each departure, against the cost of each checkpoint.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from agents.protocol import Saving
from sailord.model import Active, State

STALL_SHARE = 0.03
"""Of a step's time, on average, may be spent waiting for snapshots in memory."""
COST_SHARE_MIN = 0.01
"""Of a step: what a checkpoint costs at least, as uploads share the machine with training."""
PRIOR_S = 6 * 3600.0
"""A cluster that we know nothing of is taken to lose a machine in so many seconds."""


@dataclass(frozen=True, slots=True)
class Intervals:
    """In steps."""

    memory_every: int
    persist_every: int | None
    """A multiple of the other; ``None``: nothing is made durable."""


def intervals(
    saving: Saving, *, step_s: float, stall_s: float | None, observed_s: float, departed: int
) -> Intervals:
    """Choose what the job leaves open.

    ``stall_s`` is what one snapshot held training up for. Before that is measured, each step has
    its snapshot, so that it soon is, and one is taken to cost a whole step.
    """
    memory = saving.memory_every
    if memory is None:
        memory = max(1, math.ceil((stall_s or 0.0) / (STALL_SHARE * step_s)))
    if saving.uri is None:
        return Intervals(memory, None)
    persist = saving.persist_every
    if persist is None:
        cost_s = step_s if stall_s is None else max(stall_s, COST_SHARE_MIN * step_s)
        between_s = (observed_s + PRIOR_S) / (departed + 1)
        persist = max(1, round(math.sqrt(2 * cost_s * between_s) / step_s))
    return Intervals(memory, -(-persist // memory) * memory)


def intervals_now(state: State, active: Active, predicted_s: float) -> Intervals:
    """Choose for the next generation, from what was heard of the last."""
    past = active.job.past
    members = () if active.generation is None else active.generation.members
    reports = [n.report for id_ in members if (n := state.nodes.get(id_)) is not None]
    stalls = [r.stall_s for r in reports if r is not None and r.stall_s is not None]
    return intervals(
        active.job.saving,
        step_s=active.step_s or predicted_s,
        stall_s=max(stalls, default=None),
        observed_s=0.0 if past.since is None else max(0.0, state.now - past.since),
        departed=departures(state, active),
    )


def departures(state: State, active: Active) -> int:
    """How many members were lost, or left, those of the last generation included."""
    members = () if active.generation is None else active.generation.members
    nodes = (state.nodes.get(id_) for id_ in members)
    leaving = sum(n is None or n.is_lost or n.leaving_since is not None for n in nodes)
    return active.job.past.departures + leaving
