"""What may be removed from the durable store: whatever nobody can ever ask for again.

A checkpoint goes if its step is below the durable one, it is none of the last few that were
committed, nobody pinned it and no manifest that is kept names it. What a generation uploaded that
is over, and that never became a checkpoint, goes unless somebody begins from it. A checkpoint that
an operator went back beyond stays until training is past it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from agents.protocol.records import Durable, JobId, Point
from sailord.checkpoints.manifest import PREFIX, folder_of
from sailord.checkpoints.object_storage import Entry

PIN = "pin"
"""An object of this name in a checkpoint's folder keeps it."""


@dataclass(frozen=True, slots=True)
class Folder:
    """What stands in the durable store of one point."""

    point: Point
    entries: tuple[Entry, ...]
    """By their names within the folder."""

    @property
    def manifests(self) -> tuple[str, ...]:
        return tuple(e.name for e in self.entries if e.name.startswith(PREFIX))

    @property
    def is_pinned(self) -> bool:
        return any(entry.name == PIN for entry in self.entries)

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.entries)


def folders_of(entries: Iterable[Entry]) -> list[Folder]:
    """Sort what stands below a job's place by points; what is none of ours is left out."""
    found: dict[Point, list[Entry]] = {}
    for entry in entries:
        name, slash, rest = entry.name.partition("/")
        generation, dash, step = name.partition("-")
        if slash and dash and generation.isdecimal() and step.isdecimal():
            point = Point(int(step), int(generation))
            found.setdefault(point, []).append(Entry(rest, entry.bytes))
    return [Folder(point, tuple(found[point])) for point in sorted(found)]


def garbage(
    job: JobId,
    folders: Iterable[Folder],
    chain: Iterable[Durable],
    *,
    generation: int,
    restore: Point,
    keep: int,
    referenced: Mapping[Point, frozenset[str]],
) -> tuple[str, ...]:
    """Names to delete below the place for checkpoints, in this order: manifests first.

    ``chain`` is the newest checkpoint, then its parents; ``generation`` the present one and
    ``restore`` where it began; ``referenced`` what the manifests that are kept name of a folder.
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
    """Nothing that is still under way can make a checkpoint of it, or needs it as one."""
    if folder.point.step < durable.point.step:
        return True
    return folder.point.generation < generation and not folder.manifests
