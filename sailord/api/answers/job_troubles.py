"""What troubles the job that runs: ranks that wait, nodes, and the storage of its checkpoints."""

from __future__ import annotations

from collections.abc import Sequence

from agents.protocol.records import NodeId
from sailord.core.model.state import Active, State
from sailord.core.queries.timeouts import stall_s
from sailord.text.causes import first_names
from sailord.text.units import duration

CHECK_LONG_S = 60.0
"""A check before a restore that takes longer is reported: its storage may hang."""


def hang(state: State, active: Active, members: Sequence[NodeId], now: float) -> tuple[str, ...]:
    """Return for whom the ranks wait, if they wait longer than steps take."""
    nodes = [state.nodes[id_] for id_ in members if id_ in state.nodes]
    told = [n.report.hang for n in nodes if n.report is not None and n.report.hang is not None]
    if not told:
        return ()
    names = [state.nodes[id_].record.name for id_ in told[0].nodes if id_ in state.nodes]
    where = f" on {first_names(names)}" if names else ""
    since = duration(now - active.progress.advanced_at)
    limit = duration(stall_s(state.options, active))
    return (f"no step for {since}: {told[0].text}{where}; given up after {limit}",)


def troubles(state: State, members: Sequence[NodeId]) -> tuple[str, ...]:
    """Return what nodes report about their snapshots."""
    nodes = [state.nodes[id_] for id_ in members if id_ in state.nodes]
    said = [(n.record.name, n.report.trouble) for n in nodes if n.report is not None]
    return tuple(f"{name}: {trouble}" for name, trouble in said if trouble)


def storage_trouble(active: Active, now: float) -> str:
    """Return what is wrong with checkpoints; a check before a restore may hang with its storage."""
    known, check = active.checkpointing, active.checkpointing.check
    is_open = check is not None and check.found is None and not check.why_none
    if check is None or not is_open or now - check.since < CHECK_LONG_S:
        return known.trouble
    step = check.of.point.step if check.step_max is None else f"{check.step_max} or before"
    took = f"{duration(now - check.since)} for the checkpoint of step {step}"
    return f"training has waited {took} to be read; does its storage answer?"
