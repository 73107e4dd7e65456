"""Retention: chooses the objects that may be deleted from the checkpoint storage.

Deleted are checkpoints older than the durable one, except the last ``keep`` committed ones, pinned
ones, and objects that a kept manifest references; and uploads of past generations that never
became a checkpoint, except the restore point. After a rollback, newer checkpoints stay until
training has passed their steps again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from agents.protocol.records import Durable, JobId, Point
from sailord.checkpoints.manifest import folder_of
from sailord.checkpoints.object_storage import ListedObject
from worker.checkpoint.manifest import PREFIX
from worker.checkpoint.snapshot_file import point_of

PIN = "pin"
"""An object of this name in a checkpoint's folder pins the checkpoint."""


@dataclass(frozen=True, slots=True)
class Folder:
    """All objects of one point."""

    point: Point
    entries: tuple[ListedObject, ...]
    """Names relative to the folder."""

    @property
    def manifests(self) -> tuple[str, ...]:
        return tuple(e.name for e in self.entries if e.name.startswith(PREFIX))

    @property
    def is_pinned(self) -> bool:
        return any(entry.name == PIN for entry in self.entries)

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.entries)


def folders_of(entries: Iterable[ListedObject]) -> list[Folder]:
    """Group a job's objects by point; other files are ignored."""
    found: dict[Point, list[ListedObject]] = {}
    for entry in entries:
        name, slash, rest = entry.name.partition("/")
        place = point_of(name)
        if slash and place is not None:
            point = Point(place[1], place[0])
            found.setdefault(point, []).append(ListedObject(rest, entry.bytes))
    return [Folder(point, tuple(found[point])) for point in sorted(found)]


def names_to_delete(
    job: JobId,
    folders: Iterable[Folder],
    chain: Iterable[Durable],
    *,
    generation: int,
    restore: Point,
    keep: int,
    referenced: Mapping[Point, frozenset[str]],
) -> tuple[str, ...]:
    """Names to delete, in order: manifests first.

    ``chain`` is the newest checkpoint and its parents; ``generation`` the present one, ``restore``
    its restore point; ``referenced`` the objects of a folder that kept manifests reference.
    """
    chain = tuple(chain)
    if not chain:
        return ()
    kept = {durable.point for durable in chain[: max(keep, 1)]} | {restore}
    manifests: list[str] = []
    objects: list[str] = []
    for folder in folders:
        point = folder.point
        if point in kept or folder.is_pinned or not _is_over(folder, chain[0], generation):
            continue
        named = referenced.get(point, frozenset())
        for entry in folder.entries:
            if entry.name not in named:
                into = manifests if entry.name.startswith(PREFIX) else objects
                into.append(f"{folder_of(job, point)}/{entry.name}")
    return (*manifests, *objects)


def _is_over(folder: Folder, durable: Durable, generation: int) -> bool:
    """Whether no running generation can complete the checkpoint or needs it."""
    if folder.point.step < durable.point.step:
        return True
    return folder.point.generation < generation and not folder.manifests


def discarded(parents: Mapping[Point, Point | None], newest: Point) -> frozenset[Point]:
    """Return the checkpoints that are no part of the job's past: a rollback left their steps.

    ``parents`` has all checkpoints. What is older than the last known part of the past is not
    judged: retention may have deleted what led to it.
    """
    past = [newest]
    while (parent := parents.get(past[-1])) is not None and parent not in past:
        past.append(parent)
    return frozenset(p for p in parents if p not in past and p.step >= past[-1].step)
