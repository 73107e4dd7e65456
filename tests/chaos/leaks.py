"""Finds leaks of a job while its cluster still runs, before the final cleanup hides them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from agents.daemon.process_cleanup import cluster_pids
from agents.protocol.records import JobId, Point
from sailord.checkpoints.catalog import complete_at, folders_at
from sailord.checkpoints.manifest import Manifest
from sailord.checkpoints.object_storage import Storage
from sailord.checkpoints.verify import faults_of
from sailord.local.paths import MEMORY, LocalFolders
from tests.chaos.sockets import listening, sockets_of
from worker.checkpoint.manifest import PREFIX

LONE_SERVERS = ("agents.main", "sailord.main")
"""Modules whose processes listen at exactly one port."""


def in_memory(memory: Path) -> Iterator[str]:
    """Yield snapshots, complete or not, in any node's memory."""
    for path in sorted(memory.rglob("*")):
        if path.is_file() and path.name != ".filler":
            yield f"slot {path}"


def in_shared_memory(place: LocalFolders) -> Iterator[str]:
    """Yield semaphores and segments that no living process of the cluster maps.

    ``/dev/shm`` must be the cluster's own.
    """
    had = "".join(_maps(pid) for pid in cluster_pids(place.folder))
    for path in sorted(MEMORY.iterdir()):
        if path != place.memory and f"{path}\n" not in had:
            yield f"shared memory {path}"


def _maps(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def ports(folder: Path, others: Iterable[int] = ()) -> Iterator[str]:
    """Yield processes of the cluster that listen at more ports than their kind may."""
    at = listening()
    for pid in cluster_pids(folder):
        held = sorted(at[inode] for inode in sockets_of(pid) if inode in at)
        words = _command_line(pid)
        allowed = 1 if any(module in words for module in LONE_SERVERS) else 0
        if len(held) > allowed and pid not in others:
            yield f"ports {held} of process {pid} ({' '.join(words[1:4])})"


def _command_line(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def in_durable(
    storage: Storage, job: JobId, *, durable: Point, keep: int, begun: Point | None
) -> Iterator[str]:
    """Yield objects that no kept or unfinished checkpoint needs."""
    complete = [manifest for manifest, _ in complete_at(storage, job)]
    kept = _line(complete, durable)[:keep]
    named = {each.point: {o.name for o in each.objects} for each in kept}
    for folder in folders_at(storage, job):
        if folder.point.step > durable.step or folder.point == begun:
            continue  # Unfinished, or the current generation's restore point.
        for entry in folder.entries:
            is_kept = entry.name in named.get(folder.point, ())
            if not is_kept and not (folder.point in named and entry.name.startswith(PREFIX)):
                point = folder.point
                yield f"object {point.generation}-{point.step}/{entry.name}, {entry.bytes} bytes"


def _line(complete: Iterable[Manifest], newest: Point) -> list[Manifest]:
    """Return a checkpoint and its ancestors, newest first, as far as they exist."""
    by_point = {manifest.point: manifest for manifest in complete}
    found: list[Manifest] = []
    following: Point | None = newest
    while following is not None and following in by_point:
        found.append(by_point[following])
        parent = found[-1].parent
        following = None if parent is None else parent.point
    return found


def readable(storage: Storage, job: JobId) -> Iterator[tuple[Point, list[str]]]:
    """Yield each complete checkpoint, and its faults after reading every byte."""
    for manifest, _ in complete_at(storage, job):
        yield manifest.point, faults_of(storage, manifest, job=job, is_thorough=True)
