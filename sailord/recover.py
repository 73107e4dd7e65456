"""From where a job goes on: the newest point of which every atom has a live, sealed copy."""

from __future__ import annotations

from collections.abc import Iterable

from agents.protocol import FIRST, Durable, GenerationRecord, Point, Restore, Sealed


def restore_point(
    snapshots: Iterable[Sealed],
    *,
    layers: int,
    atoms: int,
    last: GenerationRecord | None,
    durable: Durable | None,
) -> Restore:
    """Choose where the next generation begins.

    ``snapshots`` are those of nodes that live. A point counts only if it lies on the line of
    generations that led to the last one: what a generation did after it was left is void.
    """
    by_point: dict[Point, set[tuple[int, int]]] = {}
    for sealed in snapshots:
        held = by_point.setdefault(sealed.point, set())
        for part in sealed.holds:
            held.update((part.layer, atom) for atom in range(part.first, part.end))
    whole = {(layer, atom) for layer in range(layers) for atom in range(atoms)}
    complete = [
        point
        for point, held in by_point.items()
        if held >= whole and last is not None and is_on_line(point, last)
    ]
    newest = max(complete, default=None)
    if newest is not None and (durable is None or newest.step >= durable.point.step):
        return Restore(newest, "memory")
    if durable is not None:
        return Restore(durable.point, "durable")
    return FIRST


def is_on_line(point: Point, last: GenerationRecord) -> bool:
    """Say whether the point's state is one that the last generation's state came from, or its own.

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


def lineage_of(last: GenerationRecord, *, length: int = 8) -> tuple[Point, ...]:
    """The restore points on the way back from a generation that follows ``last``."""
    return (last.restore.point, *last.lineage)[:length]
