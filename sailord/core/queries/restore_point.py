"""The restore point: the newest point whose pieces all have sealed copies on live nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet

from agents.protocol.records import FIRST, Durable, GenerationRecord, NodeId, Point, Restore, Sealed

SealedByNode = Iterable[tuple[NodeId, Sealed]]
"""Snapshots in memory, each with its node."""
PieceNumber = tuple[int, int]
"""A layer, and the number of one of its pieces."""
Holders = Mapping[Point, Mapping[PieceNumber, AbstractSet[str]]]
"""By point and piece: who has it."""


def restore_point(
    held: SealedByNode,
    *,
    layers: int,
    atoms: int,
    last: GenerationRecord | None,
    durable: Durable | None,
) -> Restore:
    """Return where the next generation begins.

    ``held`` is of live nodes. A point counts only if it is an ancestor of the last generation's
    state: what a generation did after it was abandoned is void.
    """
    return newest_restore(complete_points(held, layers, atoms), last=last, durable=durable)


def newest_restore(
    complete: Iterable[Point], *, last: GenerationRecord | None, durable: Durable | None
) -> Restore:
    """Return where to begin, of points of which all pieces are in memory and the checkpoint."""
    on_line = [point for point in complete if last is not None and is_in_lineage(point, last)]
    newest = max(on_line, default=None)
    if newest is not None and (durable is None or newest.step >= durable.point.step):
        return Restore(newest, "memory")
    if durable is not None:
        return Restore(durable.point, "durable")
    return FIRST


def complete_points(
    held: SealedByNode,
    layers: int,
    atoms: int,
    *,
    copies: int = 1,
    domains: Mapping[NodeId, str] | None = None,
) -> set[Point]:
    """Return the points whose pieces all have copies in this many failure domains.

    Nodes without a domain do not count; without ``domains`` each node is one of its own.
    """
    return whole_points(piece_holders(held, domains), layers, atoms, copies=copies)


def piece_holders(held: SealedByNode, domains: Mapping[NodeId, str] | None = None) -> Holders:
    """Return which failure domains (without ``domains``: nodes) have each piece of each point."""
    holders: dict[Point, dict[PieceNumber, set[str]]] = {}
    for node, sealed in held:
        domain = node if domains is None else domains.get(node)
        if domain is None:
            continue
        pieces = holders.setdefault(sealed.point, {})
        for part in sealed.holds:
            for piece in range(part.first, part.end):
                pieces.setdefault((part.layer, piece), set()).add(domain)
    return holders


def whole_points(holders: Holders, layers: int, atoms: int, *, copies: int = 1) -> set[Point]:
    """Return the points whose pieces all have this many holders."""
    whole = {(layer, piece) for layer in range(layers) for piece in range(atoms)}
    return {
        point
        for point, pieces in holders.items()
        if pieces.keys() >= whole and all(len(pieces[piece]) >= copies for piece in whole)
    }


def single_holders(holders: Holders, layers: int, atoms: int) -> dict[Point, frozenset[str]]:
    """Return by complete point: who alone has a piece of it, so that their loss takes the point."""
    return {
        point: frozenset(
            name for names in holders[point].values() if len(names) == 1 for name in names
        )
        for point in whole_points(holders, layers, atoms)
    }


def safe_points(
    held: SealedByNode,
    layers: int,
    atoms: int,
    *,
    durable: Durable | None,
    domains: Mapping[NodeId, str],
) -> set[Point]:
    """Return the points that survive the loss of one failure domain.

    ``domains`` has exactly the nodes that can hold copies, members or not.
    """
    copies = min(2, len(set(domains.values())))
    safe = complete_points(held, layers, atoms, copies=copies, domains=domains)
    return safe if durable is None else safe | {durable.point}


def release_point(safe: Iterable[Point], record: GenerationRecord) -> Point | None:
    """Return the newest safe point of a generation, or the one in memory from which it began.

    Snapshots before the point are no longer needed. ``None``: keep everything, since the only safe
    copy may be an older one.
    """
    begun_from = record.restore.point if record.restore.source == "memory" else None
    own = (p for p in safe if p.generation == record.number or p == begun_from)
    return max(own, default=None)


def fallback_point(
    safe: AbstractSet[Point],
    complete: Mapping[Point, AbstractSet[str]],
    restore: Restore,
    last: GenerationRecord | None,
) -> Point | None:
    """Return the newest safe point from which a job can go on if a loss takes its restore point.

    It is the restore point itself if that is safe. ``complete`` has the points of which all pieces
    are in memory, each with its ``single_holders``. If no point is safe, it is the newest that
    survives each loss which the restore point does not, else the last generation's, or if that is
    not complete, the newest other: nodes that are away may have copies of it. ``None``: that is
    not known, so all may be needed.
    """
    if last is None or restore.source == "start":
        return restore.point
    line = {p for p in {*safe, *complete} if is_in_lineage(p, last) and p <= restore.point}
    if line & safe:
        return max(line & safe)
    if last.fallback is None:
        return None if line or restore.source == "memory" else restore.point
    alone = complete.get(restore.point, frozenset())
    others = line - {restore.point}
    outlives = {point for point in others if alone.isdisjoint(complete[point])}
    if not outlives and last.fallback not in line:
        outlives = others  # A node that is away may have more copies of them.
    return max(outlives, default=last.fallback)


def failure_domains(zones: Mapping[NodeId, str], survive: str) -> dict[NodeId, str]:
    """Return each node's failure domain: its zone, if the job must survive the loss of one and
    there is more than one; else the node itself."""
    by_zone = survive == "zone" and len(set(zones.values())) > 1
    return {id_: zone if by_zone else id_ for id_, zone in zones.items()}


def is_in_lineage(point: Point, last: GenerationRecord) -> bool:
    """Return whether the point is an ancestor of the last generation's state, or its own.

    The line is the last generation, then each restore point on the way back: of the generation
    it names only the steps up to it count.
    """
    if point.generation == last.number:
        return point.step >= last.restore.point.step
    end = float("inf")
    for left in (last.restore.point, *last.lineage):
        end = min(end, left.step)
        if point.generation == left.generation:
            return point.step <= end
    return False


def lineage_of(last: GenerationRecord) -> tuple[Point, ...]:
    """Return the last eight restore points that lead back from a generation after ``last``."""
    return (last.restore.point, *last.lineage)[:8]
