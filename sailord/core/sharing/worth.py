"""What nodes are worth to the jobs that share them, and which of them should change hands.

The aim is that of ``planner.share.split_machines``: the largest sum of weight · log(worth). There
jobs name plans that were searched; here a part is worth the sum of its nodes, so that a decision
needs no search.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from agents.protocol.records import JobId, NodeId

GpusOfNode = tuple[str, int]
"""The GPU kind of a node, and how many it has: nodes alike in both are worth the same."""
Kinds = Mapping[NodeId, GpusOfNode]
Wanted = tuple[JobId, tuple[NodeId, ...]]
"""A job, and the nodes to give to it."""

GAIN_MIN = 0.02
"""Handovers that gain less, by the weight of the jobs that give nodes, are left: each of these jobs
moves, and 72 s of that are 2 % of an hour."""
NOISE = 1e-9
"""Gains below are errors of floating point."""


@dataclass(frozen=True, slots=True)
class Stake:
    """What a job has, and what a node more or less would be worth to it."""

    nodes: tuple[NodeId, ...]
    """First those that it would give."""
    weight: float
    """0: no job has these nodes."""
    worths: Mapping[str, float]
    """Of one GPU by kind, relative to the fastest kind; 1 if not known."""
    gives: bool
    gets: bool
    stays: tuple[NodeId, ...] = ()
    """Nodes that it has, and that cannot change hands now: no plan can use them yet, or for now."""

    @property
    def kept(self) -> int:
        """How many nodes it keeps at least, besides those that stay: it trains on them."""
        return 1 if self.weight else 0

    def worth(self, kinds: Iterable[GpusOfNode]) -> float:
        """Return what nodes of these kinds are worth to it."""
        return sum(self.worths.get(gpu, 1.0) * count for gpu, count in kinds)

    def gain(self, before: float, after: float) -> float:
        """Return by how much the sum rises; for a job that has nothing, by how much from 1 on."""
        return self.weight * math.log(after / (before or 1.0)) if self.weight else 0.0


@dataclass(frozen=True, slots=True)
class _Exchange:
    """A node that changes hands, and what that gains; a job's first node comes before all else."""

    gain: tuple[bool, float]
    giver: JobId
    receiver: JobId
    node: NodeId


def best_handover(stakes: Mapping[JobId, Stake], kinds: Kinds) -> Wanted | None:
    """Return the job that gains most from other nodes, and which; ``None``: a move costs more."""
    gains: dict[Wanted, tuple[bool, float]] = {}
    for receiver, all_nodes in exchanges(stakes, kinds).items():
        nodes = _select_spare(stakes, all_nodes)
        gain = _gain_of(stakes, kinds, receiver, frozenset(nodes))
        if nodes and gain is not None:
            gains[receiver, nodes] = gain
    return max(gains, key=gains.__getitem__, default=None)


def exchanges(stakes: Mapping[JobId, Stake], kinds: Kinds) -> Mapping[JobId, tuple[NodeId, ...]]:
    """Return what each job should get: the best exchange of one node, until none gains."""
    hands = {id_: [*stake.nodes] for id_, stake in stakes.items()}
    while found := [*_list_single_exchanges(stakes, kinds, hands)]:
        best = max(found, key=lambda each: each.gain)
        if best.gain < (False, NOISE):
            break
        hands[best.giver].remove(best.node)
        hands[best.receiver].append(best.node)
    got = {
        id_: tuple(node for node in hands[id_] if node not in stake.nodes)
        for id_, stake in stakes.items()
    }
    return {id_: nodes for id_, nodes in got.items() if nodes}


def _list_single_exchanges(
    stakes: Mapping[JobId, Stake], kinds: Kinds, hands: Mapping[JobId, list[NodeId]]
) -> Iterator[_Exchange]:
    has = {
        id_: stake.worth(kinds[node] for node in (*hands[id_], *stake.stays))
        for id_, stake in stakes.items()
    }
    for giver, stake in stakes.items():
        if not stake.gives or len(hands[giver]) <= stake.kept:
            continue
        # Of each kind this keeps the first node that the job would give.
        for kind, node in {kinds[node]: node for node in reversed(hands[giver])}.items():
            loss = stake.gain(has[giver], has[giver] - stake.worth([kind]))
            for receiver, other in stakes.items():
                if other.gets and receiver != giver:
                    gain = other.gain(has[receiver], has[receiver] + other.worth([kind]))
                    is_first = not (hands[receiver] or other.stays)
                    yield _Exchange((is_first, gain + loss), giver, receiver, node)


def _select_spare(stakes: Mapping[JobId, Stake], nodes: tuple[NodeId, ...]) -> tuple[NodeId, ...]:
    """Leave out what a job can give only once others have given to it."""
    for stake in stakes.values():
        given = [node for node in nodes if node in stake.nodes]
        too_many = given[len(stake.nodes) - stake.kept :]
        nodes = tuple(node for node in nodes if node not in too_many)
    return nodes


def _gain_of(
    stakes: Mapping[JobId, Stake], kinds: Kinds, receiver: JobId, nodes: frozenset[NodeId]
) -> tuple[bool, float] | None:
    """Return what it gains if this job alone gets what it should; ``None``: too little."""
    gain = weight = 0.0
    for id_, stake in stakes.items():
        after = nodes.union(stake.nodes) if id_ == receiver else set(stake.nodes) - nodes
        if after != set(stake.nodes):
            before = stake.worth(kinds[node] for node in (*stake.nodes, *stake.stays))
            gain += stake.gain(before, stake.worth(kinds[n] for n in (*after, *stake.stays)))
            weight += 0.0 if id_ == receiver else stake.weight
    is_first = not (stakes[receiver].nodes or stakes[receiver].stays)
    return (is_first, gain) if is_first or gain >= GAIN_MIN * weight else None
