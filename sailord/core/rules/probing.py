"""Probes: asks suspect agents for a report, a few at a time."""

from __future__ import annotations

from dataclasses import replace

from agents.protocol.records import GenerationRecord, NodeId
from sailord.core.model.commands import ProbeAgent
from sailord.core.model.nodes import Node
from sailord.core.model.rule import PASS, RuleAnswer, Step
from sailord.core.model.standing import Unreachable
from sailord.core.model.state import Active, State

PROBES_AT_ONCE = 32
"""More at a time would time out waiting for connections."""


def probe_suspects(state: State, active: Active) -> RuleAnswer:
    """Probe the agents that may be dead or cut off."""
    if active.generation is None:
        return PASS
    suspects = suspects_to_probe(state, active.generation)
    if not suspects:
        return PASS
    asked = {id_: replace(state.nodes[id_], probed_at=state.now) for id_ in suspects}
    after = replace(state, nodes=state.nodes.with_(asked))
    return Step(after, tuple(map(ProbeAgent, suspects)))


def suspects_to_probe(state: State, generation: GenerationRecord) -> tuple[NodeId, ...]:
    """Return the nodes to probe, the one that was probed longest ago first.

    Suspects: nodes to which a peer lost its connection, members with neither a lease nor a fresh
    report, and nodes with a lease that never reported.
    """
    members = frozenset(generation.members)
    named: set[NodeId] = set()
    for id_ in state.nodes.notable:
        node = state.nodes[id_]
        if node.report is not None and node.report.speaks_of(generation):
            named.update(node.report.broken_peers)
        if (id_ in members and _is_silent(state, node)) or _never_reported(state, node):
            named.add(id_)
    suspects = [state.nodes[id_] for id_ in named if id_ in state.nodes]
    asked = sum(_was_just_probed(state, suspect) for suspect in suspects)
    due = sorted(
        (suspect.probed_at or 0.0, suspect.record.id)
        for suspect in suspects
        if _is_to_probe(state, suspect)
    )
    return tuple(id_ for _, id_ in due[: max(PROBES_AT_ONCE - asked, 0)])


def _is_silent(state: State, node: Node) -> bool:
    """Return whether it has neither lease nor fresh report, when that may soon count against it."""
    if node.absent_since is None or not node.record.address:
        return False
    options = state.options
    quiet_since = node.heard_at + options.suspect_s / 3
    return state.now >= max(quiet_since, state.trusted_since(node) - options.suspect_s)


def _never_reported(state: State, node: Node) -> bool:
    """Return whether it has a lease and never reported, though it had time to."""
    since = max(state.leases_since, node.since) + state.options.suspect_s
    is_there = node.absent_since is None and bool(node.record.address)
    return node.report is None and is_there and state.now >= since


def _is_to_probe(state: State, suspect: Node) -> bool:
    if suspect.is_lost:
        return False
    if isinstance(suspect.standing, Unreachable):
        return False  # It has a lease; if its agent recovers, it will report.
    return not _was_just_probed(state, suspect)


def _was_just_probed(state: State, node: Node) -> bool:
    return node.probed_at is not None and state.now < node.probed_at + state.options.probe_s
