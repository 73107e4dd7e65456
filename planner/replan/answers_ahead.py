"""Replans computed ahead of time: the next plan for the loss of each node and of each zone.

Nodes of one pool whose loss breaks equal pipelines need equal plans. One search serves them all;
only the assignment to nodes is made for each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from planner.replan.damage import RunningPlan, damage
from planner.replan.nodes import PlannerNode, nodes_used
from planner.replan.replanner import FORESEE_BUDGET, Replan, Replanner

PlanRole = tuple[object, ...]
"""A key that is equal for nodes whose losses leave equal pipelines and GPUs."""


@dataclass(eq=False)
class Precomputed:
    """Next plans for one running plan on one set of nodes, computed in the background."""

    replanner: Replanner
    running: RunningPlan
    nodes: tuple[PlannerNode, ...]
    by_loss: dict[frozenset[str], Replan] = field(default_factory=dict)
    """Next plans by the ids of the lost nodes."""
    used: frozenset[str] = field(init=False)
    """Ids of the nodes that the running plan uses."""

    def __post_init__(self) -> None:
        self.used = nodes_used(self.running.plan)

    def steps(self) -> Iterator[frozenset[str]]:
        """Compute the answer to one loss after the other; yield the lost nodes of each."""
        first_of: dict[PlanRole, Replan] = {}
        for node in sorted(self.nodes, key=lambda n: n.id):
            lost = frozenset([node.id])
            if node.id not in self.used:
                continue  # The loss of an unused node stops nothing.
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

    def _foreseen(self, live: Sequence[PlannerNode]) -> Replan:
        return self.replanner.replan(self.running, live, budget=FORESEE_BUDGET)

    def all(self) -> Precomputed:
        """Compute all answers at once."""
        for _ in self.steps():
            pass
        return self

    def role(self, node: PlannerNode) -> PlanRole:
        """Two nodes with equal roles leave equal mixes and equal lots behind."""
        left = damage(self.running, self.without(frozenset([node.id])))
        broken = sorted(repr(one) for one in left.broken)
        return (node.key, node.gpus, node.spot, tuple(broken))

    def without(self, lost: frozenset[str]) -> tuple[PlannerNode, ...]:
        """The nodes that stay."""
        return tuple(node for node in self.nodes if node.id not in lost)

    def after(self, live: Sequence[PlannerNode]) -> Replan:
        """The next plan on the nodes that are up: precomputed if possible, or else computed now.

        A precomputed plan ignores nodes that were added since; a later replan may use them. Where
        no plan was found ahead and nodes were added, it is computed anew.
        """
        there = {node.id for node in live}
        has_joined = not there <= {node.id for node in self.nodes}
        lost = frozenset(node.id for node in self.nodes if node.id not in there)
        # Ignore lost nodes that the plan did not use.
        for known in (lost, lost & self.used):
            found = self.by_loss.get(known)
            if found is None or (found.plan is None and has_joined):
                continue
            if found.nodes <= there:
                return found
        return self.replanner.replan(self.running, live)

    @property
    def roles(self) -> Mapping[PlanRole, int]:
        """Number of nodes of each role."""
        return Counter(self.role(node) for node in self.nodes if node.id in self.used)
