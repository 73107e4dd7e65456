"""Nodes that were lost and not replaced: an operator must see them after their records are gone."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field

from agents.protocol.records import NodeId
from sailord.core.model.nodes import LostNode, Node
from sailord.core.model.standing import Lost
from sailord.core.model.state import State

LISTED_S = 24 * 3600.0
"""How long a lost node is listed; after that an operator has seen it."""
LISTED_MAX = 100
"""Most nodes that are listed, the last ones."""
UNUSED = "its lease expired while no job used it"


@dataclass(eq=False)
class LostNodes:
    """The nodes that this leader saw being lost, until they or others of their kind join.

    Spot nodes and rented instances are none: they are expected to go, or sailord replaces them.
    """

    rented: Callable[[], Container[str]] = frozenset
    """The names of the nodes that are rented instances."""
    _found: dict[NodeId, LostNode] = field(default_factory=dict)
    _before: State = field(default_factory=State)

    def observe(self, state: State) -> None:
        """Take in the state after a decision."""
        before, self._before = self._before, state
        if state.term is None or state.term != before.term:
            self._found.clear()
            return
        if state.nodes is before.nodes:
            return
        lost: list[tuple[Node, float, str]] = []
        for id_ in sorted(state.nodes.notable):
            node, known = state.nodes[id_], before.nodes.get(id_)
            if isinstance(node.standing, Lost) and not (known is not None and known.is_lost):
                lost.append((node, node.standing.at, node.why_lost))
        has_come_or_gone = state.nodes.keys() != before.nodes.keys()
        for id_ in sorted(before.nodes.keys() - state.nodes.keys()) if has_come_or_gone else ():
            if not before.nodes[id_].is_lost:
                lost.append((before.nodes[id_], state.now, UNUSED))
        if lost:
            self._note(lost)
        for id_ in [id_ for id_ in self._found if id_ in state.nodes]:
            if not state.nodes[id_].is_lost:  # It was given up by mistake.
                del self._found[id_]
        if self._found and has_come_or_gone:
            self._forget_replaced(before, state)

    def of(self, now: float) -> tuple[LostNode, ...]:
        """Return those that are listed now, the oldest first."""
        found = [each for each in self._found.values() if now < each.at + LISTED_S]
        self._found = {each.id: each for each in found[-LISTED_MAX:]}
        return tuple(self._found.values())

    def _note(self, lost: Iterable[tuple[Node, float, str]]) -> None:
        """List those that were not expected to go, each with when and why it was lost."""
        rented = self.rented()
        for node, at, why in lost:
            record = node.record
            was_ordered = (
                node.exclusion.draining_since is not None
            )  # A drain only to go to another job is no such order.
            if not (record.spot or was_ordered or not record.machine or record.name in rented):
                kind = record.zone, record.machine
                known = LostNode(record.id, record.name, at, why, kind, record.address)
                self._found.setdefault(record.id, known)
                self.of(at)

    def _forget_replaced(self, before: State, state: State) -> None:
        """Forget nodes that are back; another one that joins replaces one of its kind."""
        known = {node.record.name for node in before.nodes.values()}
        known |= {each.name for each in self._found.values()}
        up = [node.record for node in state.nodes.values() if not node.is_lost]
        there = {record.name for record in up} | {record.address for record in up}
        self._found = {  # At its address it has another name now.
            id_: each for id_, each in self._found.items() if not {each.name, each.address} & there
        }
        for id_ in sorted(state.nodes.keys() - before.nodes.keys()):
            record = state.nodes[id_].record
            kind = record.zone, record.machine
            like = [each.id for each in self._found.values() if each.kind == kind]
            if like and record.name not in known:
                del self._found[like[0]]
