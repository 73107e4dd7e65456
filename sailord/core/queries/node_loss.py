"""What the loss of each node would cost now, derived from who keeps which snapshot pieces."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cache
from typing import Literal

from agents.protocol.records import NodeId, Point, Restore
from sailord.core.model.phases import Running
from sailord.core.model.state import State
from sailord.core.queries.restore_choice import holders_reported, in_memory
from sailord.core.queries.restore_point import (
    Holders,
    PieceNumber,
    newest_restore,
    piece_holders,
    whole_points,
)


@dataclass(frozen=True, slots=True)
class NodeLoss:
    """What the job would lose with one node, by the last reports."""

    steps: int | None
    """To be repeated, at most: survivors may still save a later step; ``None``: not known."""
    step: int | None = None
    """The step that the job would go on from."""
    source: Literal["start", "memory", "durable"] | None = None
    """Where that step is; ``None``: not known, or the job would not be interrupted."""
    kept_on: tuple[NodeId, ...] = ()
    """Other nodes that have something of what the node has of that step, if it is in memory: at
    most ``NAMED_MAX``, since with wide data parallelism there are hundreds for each node."""
    keepers: int = 0
    """How many such nodes there are."""
    is_only_keeper: bool = False
    """Without its loss the job could go on from a later step."""


NAMED_MAX = 8
NOT_KNOWN = NodeLoss(None)


def node_losses(state: State) -> dict[NodeId, NodeLoss]:
    """Return for each node what the active job would lose with it; nothing without a job."""
    active = state.active
    if active is None or active.generation is None:
        return {}
    last, reached = active.generation, active.progress.step
    durable = state.durables.get(active.job)
    nodes = [id_ for id_, node in state.nodes.items() if not node.is_lost]
    if not holders_reported(state, active):
        return dict.fromkeys(nodes, NOT_KNOWN)
    holders = piece_holders(in_memory(state, active.job))
    complete = whole_points(holders, state.job.layers, state.job.atoms)
    alone = _alone_at({point: holders[point] for point in complete})

    @cache
    def restore_without(lost: frozenset[Point]) -> Restore:
        return newest_restore(complete - lost, last=last, durable=durable)

    @cache
    def keepers(point: Point) -> dict[str, tuple[str, ...]]:
        return _keepers(holders[point])

    found = {}
    for id_ in nodes:
        restore = restore_without(alone.get(id_, frozenset()))
        is_only_keeper = restore != restore_without(frozenset())
        if id_ not in last.members and (isinstance(active.phase, Running) or not is_only_keeper):
            found[id_] = NodeLoss(0, reached)
            continue
        point, source = restore.point, restore.source
        together = keepers(point).get(id_, ()) if source == "memory" else ()
        others = tuple(NodeId(each) for each in together[: NAMED_MAX + 1] if each != id_)
        found[id_] = NodeLoss(
            max(reached - point.step, 0), point.step, source, others[:NAMED_MAX],
            max(len(together) - 1, 0), is_only_keeper,
        )  # fmt: skip
    return found


def _alone_at(holders: Holders) -> dict[str, frozenset[Point]]:
    """Return by node the points of which it has the only copy of a piece."""
    found: dict[str, set[Point]] = {}
    for point, pieces in holders.items():
        for nodes in pieces.values():
            if len(nodes) == 1:
                found.setdefault(next(iter(nodes)), set()).add(point)
    return {node: frozenset(points) for node, points in found.items()}


def _keepers(pieces: Mapping[PieceNumber, AbstractSet[str]]) -> dict[str, tuple[str, ...]]:
    """Return by node, in order, all nodes that have a piece that it has, itself among them."""
    groups = list({frozenset(nodes) for nodes in pieces.values()})
    numbers: dict[str, list[int]] = {}
    for number, together in enumerate(groups):
        for node in together:
            numbers.setdefault(node, []).append(number)

    @cache
    def joined(of: tuple[int, ...]) -> tuple[str, ...]:
        return tuple(sorted(frozenset[str]().union(*(groups[number] for number in of))))

    return {node: joined(tuple(of)) for node, of in numbers.items()}
