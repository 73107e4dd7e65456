"""Observes which nodes live and which are lost, by pool: the data behind expected lifetimes.

What sailord gives back, or an operator drains, was not lost: it counts no more from then on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container
from dataclasses import dataclass, field

from agents.protocol.records import NodeId, NodeRecord
from planner.move_policy.node_lifetimes import LifetimeHistory
from sailord.core.model.state import State
from sailord.planning.messages import MoveContext

OBSERVE_S = 1.0
"""How often nodes are counted."""


def pool_of(record: NodeRecord) -> str:
    """The pool of a node, as the planner's history names it."""
    return pool_label(record.gpu, record.zone, is_spot=record.spot)


def pool_label(gpu: str, zone: str, *, is_spot: bool) -> str:
    """The name of a pool in the planner's history."""
    return f"{gpu}@{zone}" + (" spot" if is_spot else "")


@dataclass(eq=False)
class MachineLifetimes:
    """Losses and lifetimes of nodes, as leaders saw them; begins with the planner's priors."""

    history: LifetimeHistory = field(default_factory=LifetimeHistory)
    given_back: Callable[[], Container[str]] = frozenset
    """The names of the nodes whose instances sailord deletes."""
    _up: dict[NodeId, str] = field(default_factory=dict)
    _term: int | None = None
    _observed_at: float = 0.0

    def observe(self, after: State) -> None:
        """Count the nodes that are up, and those lost since the last count in this term."""
        is_same_term = after.term == self._term
        if after.term is None or (is_same_term and after.now < self._observed_at + OBSERVE_S):
            return
        there = {
            id_: node for id_, node in after.nodes.items() if not node.is_lost and node.record.gpus
        }
        given_back = self.given_back()
        returned = {
            id_
            for id_, node in there.items()
            if node.exclusion.is_drain_ordered or node.record.name in given_back
        }
        up = {id_: pool_of(node.record) for id_, node in there.items() if id_ not in returned}
        gone = [pool for id_, pool in self._up.items() if id_ not in there and is_same_term]
        self.history = self.history.seen(after.now, up=Counter(up.values()), lost=Counter(gone))
        self._up, self._term, self._observed_at = up, after.term, after.now

    def context(self, state: State) -> MoveContext:
        """What the planner needs to judge a reconfiguration now."""
        ages = tuple((id_, state.now - node.since) for id_, node in state.nodes.items())
        settle_s = state.options.additions_gather_s
        moved_at = None if state.active is None else state.job.past.moved_at
        return MoveContext(state.now, self.history, ages, moved_at, settle_s)
