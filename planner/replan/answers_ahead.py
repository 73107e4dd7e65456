"""Answers made before the questions: the next plan if this node goes, or this zone.

Nodes of one pool place that break the same kinds of pipelines leave the same behind, so one
search serves them all; only the assignment to nodes is made for each of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from planner.replan.damage import Running, damage
from planner.replan.nodes import Node, nodes_used
from planner.replan.replanner import FORESEE_BUDGET, Replan, Replanner

Role = tuple[object, ...]
"""What tells whether two nodes leave the same behind."""


@dataclass(eq=False)
class Precomputed:
    """Next plans for one running plan on one set of nodes, made in the background step by step."""

    replanner: Replanner
    running: Running
    nodes: tuple[Node, ...]
    by_loss: dict[frozenset[str], Replan] = field(default_factory=dict)
    """By the ids of the nodes that are lost."""
    used: frozenset[str] = field(init=False)
    """Nodes on which the running plan stands."""

    def __post_init__(self) -> None:
        self.used = nodes_used(self.running.plan)

    def steps(self) -> Iterator[frozenset[str]]:
        """Work out one loss after the other, and say which; the caller decides when to go on."""
        first_of: dict[Role, Replan] = {}
        for node in sorted(self.nodes, key=lambda n: n.id):
            lost = frozenset([node.id])
            if node.id not in self.used:
                continue  # A spare one: nothing stops when it goes.
            role = self.role(node)
            live = self.without(lost)
            known = first_of.get(role)
            again = None
            if known is not None and known.plan is not None:
                again = self.replanner.replan_as(self.running, live, known.plan)
            self.by_loss[lost] = again or self._foreseen(live)
            first_of.setdefault(role, self.by_loss[lost])
            yield lost
        for zone in sorted({node.zone for node in self.nodes if node.id in self.used}):
            lost = frozenset(node.id for node in self.nodes if node.zone == zone)
            self.by_loss[lost] = self._foreseen(self.without(lost))
            yield lost

    def _foreseen(self, live: Sequence[Node]) -> Replan:
        return self.replanner.replan(self.running, live, budget=FORESEE_BUDGET)

    def all(self) -> Precomputed:
        """Everything at once."""
        for _ in self.steps():
            pass
        return self

    def role(self, node: Node) -> Role:
        """Two nodes with equal roles leave equal fleets and equal lots behind."""
        left = damage(self.running, self.without(frozenset([node.id])))
        broken = sorted(repr(one) for one in left.broken)
        return (node.key, node.gpus, node.spot, tuple(broken))

    def without(self, lost: frozenset[str]) -> tuple[Node, ...]:
        """The nodes that stay."""
        return tuple(node for node in self.nodes if node.id not in lost)

    def after(self, live: Sequence[Node]) -> Replan:
        """The next plan on the nodes that are there now; at once where it was made before.

        What came new since is left for later. Where more was lost than one node or zone, the
        answer is worked out now.
        """
        there = {node.id for node in live}
        lost = frozenset(node.id for node in self.nodes if node.id not in there)
        # Of a zone that went, or a node beside spare ones, what mattered may have been foreseen.
        for known in (lost, lost & self.used):
            found = self.by_loss.get(known)
            if found is not None and found.nodes <= there:
                return found
        return self.replanner.replan(self.running, live)

    @property
    def roles(self) -> Mapping[Role, int]:
        """How many nodes there are of each role."""
        return Counter(self.role(node) for node in self.nodes if node.id in self.used)
