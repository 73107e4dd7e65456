"""The snapshots in this node's memory: which there are, and which may be deleted.

Each is a file ``JOB/GENERATION-STEP/RANK.snap`` in a folder in memory. A worker writes it under
another name and seals it by renaming; other nodes' replicas arrive over HTTP and are sealed in the
same way. Only the agent deletes files, but a worker may reuse or withdraw its own. A file outlives
the worker that wrote it, and the agent.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from glob import glob
from itertools import groupby
from pathlib import Path

from agents.daemon.process_cleanup import has_ended
from agents.protocol.records import GenerationRecord, Holding, JobId, Point, Sealed
from worker.checkpoint import snapshot_file

POINTS_KEPT = 2
"""The last points of the running generation are kept whatever is released."""
REPLICAS_KEPT = 4
"""The last points of each rank of another node are kept. When a rank seals point n, point n - 2 is
complete everywhere, so the last three may be needed; a fourth may be sealed during a failure."""
FILE_NAME = re.compile(r"([0-9]{1,6})\.snap\Z", re.ASCII)


class SnapshotFile(snapshot_file.SealedFile):
    """One sealed file."""

    @property
    def job(self) -> JobId:
        return JobId(self.header.job)

    @property
    def point(self) -> Point:
        return Point(self.header.step, self.header.generation)

    @property
    def key(self) -> tuple[JobId, Point, int]:
        """The job, the point and the rank, which identify it on this node."""
        return self.job, self.point, self.header.rank


@dataclass(eq=False)
class SnapshotMemory:
    """The sealed files of all jobs."""

    folder: Path
    changed: Callable[[JobId], None] = lambda _: None
    """Called when a job has more or fewer snapshots here."""
    has_worker_user: bool = False
    """Whether workers have a user of their own, with the group of this process."""
    _files: dict[tuple[JobId, Point], dict[str, SnapshotFile]] = field(default_factory=dict)
    _forgotten: set[Path] = field(default_factory=set)
    """Files that are being deleted: not to be found again before they are gone."""

    def open(self) -> None:
        """Read the sealed files of a previous agent process, and delete unsealed ones."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self.has_worker_user:
            self.folder.chmod(0o770)
        self._links.mkdir(exist_ok=True)
        self.delete_unfinished(before=True)
        self.look_again()

    def look_again(self) -> None:
        """Look at sealed files that nobody told us of: their worker was killed before it could."""
        for job, generation, step, folder in snapshot_file.point_folders(self.folder):
            known = self._files.get((JobId(job), Point(step, generation)), {})
            for name in sorted(glob(f"*{snapshot_file.SUFFIX}", root_dir=folder)):
                if name not in known and folder / name not in self._forgotten:
                    self.look(folder / name)

    def worker_ended(self) -> None:
        """Look at what a worker that has ended left."""
        self.delete_unfinished()
        self.look_again()

    def delete_unfinished(self, *, before: bool = False) -> None:
        """Delete the unsealed files of processes that have ended.

        ``before``: this process has written none yet, so those under its id are a predecessor's; in
        a container every agent has the same id.
        """
        with contextlib.suppress(FileNotFoundError):  # A folder may be deleted meanwhile.
            for pid, path in snapshot_file.unfinished_files(self.folder):
                if has_ended(pid) or (before and pid == os.getpid()):
                    with contextlib.suppress(OSError):  # A job may have made a folder of that name.
                        path.unlink()

    def look(self, path: Path) -> SnapshotFile | None:
        """Read the header of a file that was just sealed; ``None``: it is not sealed."""
        try:
            snapshot = SnapshotFile(path, snapshot_file.read_header(path))
        except (OSError, snapshot_file.SnapshotError):
            return None
        if path != self.path(snapshot.job, snapshot.point, snapshot.header.file_name):
            return None  # Its header is of another snapshot.
        self._drop_missing(snapshot.job)
        self._files.setdefault((snapshot.job, snapshot.point), {})[path.name] = snapshot
        self.changed(snapshot.job)
        return snapshot

    def forget_missing(self, job: JobId) -> None:
        """Forget files that a worker has removed, and tell that they are gone."""
        before = self.sealed(job)
        self._drop_missing(job)
        if self.sealed(job) != before:
            self.changed(job)

    def _drop_missing(self, job: JobId) -> None:
        """Forget files that were removed: a worker may reuse the file of an older point."""
        for point in self._points(job):
            files = self._files[job, point]
            for name in [name for name, snapshot in files.items() if not snapshot.path.exists()]:
                del files[name]
            if not files:
                del self._files[job, point]

    def path(self, job: JobId, point: Point, name: str) -> Path:
        """Return the path of a file."""
        at = snapshot_file.point_folder(
            self.folder, job, generation=point.generation, step=point.step
        )
        return at / name

    # ---- queries --------------------------------------------------------------------------------

    def snapshots(self, job: JobId, point: Point) -> tuple[SnapshotFile, ...]:
        """Return all files of a point."""
        return tuple(self._files.get((job, point), {}).values())

    def head_checksums(self, job: JobId, point: Point) -> set[str]:
        """Return what identifies the files of a point: their headers' checksums, as stored.

        To encode a header again would give that of another version another checksum.
        """
        found = set()
        for each in self.snapshots(job, point):
            with contextlib.suppress(OSError, snapshot_file.SnapshotError):
                found.add(snapshot_file.head_checksum(snapshot_file.read_head(each.path)))
        return found

    def all(self) -> Iterator[SnapshotFile]:
        """Yield all files, oldest points first."""
        for _, files in sorted(self._files.items(), key=lambda item: item[0]):
            yield from files.values()

    def jobs(self) -> set[JobId]:
        """Return the jobs that have snapshots here."""
        return {job for job, _ in self._files}

    def sealed(self, job: JobId) -> tuple[Sealed, ...]:
        """Return which pieces of a job this node holds, point by point."""
        return tuple(
            Sealed(point, holdings(self.snapshots(job, point))) for point in self._points(job)
        )

    # ---- links for uploads ----------------------------------------------------------------------

    def link(self, snapshot: SnapshotFile) -> SnapshotFile | None:
        """Hard-link a file, so that it stays as it is whatever its worker does with its own name.

        ``None``: the file no longer exists. The caller deletes the link.
        """
        point = snapshot.point
        name = f"{snapshot.job}.{point.generation}.{point.step}.{snapshot.header.rank}"
        linked = self._links / name
        with contextlib.suppress(FileExistsError):
            try:
                linked.hardlink_to(snapshot.path)
            except FileNotFoundError:
                return None
        return SnapshotFile(linked, snapshot.header)

    def linked(self) -> Iterator[SnapshotFile]:
        """Yield the links of a previous agent process."""
        for path in sorted(self._links.iterdir()):
            try:
                yield SnapshotFile(path, snapshot_file.read_header(path))
            except (OSError, snapshot_file.SnapshotError):
                path.unlink(missing_ok=True)  # Its worker reused it before we linked it.

    @property
    def _links(self) -> Path:
        return self.folder / snapshot_file.LINKS

    # ---- deletion -------------------------------------------------------------------------------

    def release(self, job: JobId, safe: Point, running: int) -> list[Path]:
        """Forget the points that a safe point has superseded; return the files to delete.

        ``running`` is the generation that runs here: its last points are kept.
        """
        points = self._points(job)
        kept = [point for point in points if point.generation == running][-POINTS_KEPT:]
        # By generation first: steps of an older generation beyond its end are void.
        end = (safe.generation, safe.step)
        old = (point for point in points if (point.generation, point.step) < end)
        return self._forget(job, (point for point in old if point not in kept))

    def release_spare(self, record: GenerationRecord) -> list[Path]:
        """Forget the points that a generation can spare; return the files to delete."""
        points = self._points(record.job)
        return self._forget(record.job, [each for each in points if not may_need(record, each)])

    def release_replicas(self, last: SnapshotFile) -> list[Path]:
        """Forget replicas of a rank that its later ones supersede; return the files to delete.

        This needs no leader: without one, the memory would fill up and training would stop.
        """
        job, generation, name = last.job, last.point.generation, last.path.name
        points = [
            point
            for point in self._points(job)
            if point.generation == generation and name in self._files[job, point]
        ]
        gone = [self._files[job, point].pop(name).path for point in points[:-REPLICAS_KEPT]]
        if gone:
            self._drop_missing(job)
            self._note_forgotten(gone, job)
        return gone

    def delete_job(self, job: JobId) -> list[Path]:
        """Forget all points of a job; return the files to delete."""
        return self._forget(job, self._points(job))

    def _points(self, job: JobId) -> list[Point]:
        return sorted(point for of, point in self._files if of == job)

    def _forget(self, job: JobId, points: Iterable[Point]) -> list[Path]:
        gone = []
        for point in points:
            gone += [snapshot.path for snapshot in self._files.pop((job, point)).values()]
        if gone:
            self._note_forgotten(gone, job)
        return gone

    def _note_forgotten(self, gone: list[Path], job: JobId) -> None:
        self._forgotten = {*filter(Path.exists, self._forgotten), *gone}
        self.changed(job)


def may_need(record: GenerationRecord, point: Point) -> bool:
    """Return whether the job may need that point, of those of generations before this one."""
    is_past = point.generation < record.number
    needed = {record.restore.point, record.fallback}
    return not is_past or record.fallback is None or point in needed


def head_checksum(header: snapshot_file.Header) -> str:
    """Return the checksum of a header, which identifies the whole file."""
    return snapshot_file.head_checksum(snapshot_file.head_bytes(header))


def delete(paths: Iterable[Path]) -> None:
    """Delete files and empty folders; slow, so call it in a thread."""
    for path in paths:
        path.unlink(missing_ok=True)
        for folder in path.parents[:2]:
            with contextlib.suppress(OSError):  # It is not empty.
                folder.rmdir()


def holdings(
    snapshots: Iterable[SnapshotFile],
    counts: Callable[[snapshot_file.Piece], bool] = lambda _: True,
) -> tuple[Holding, ...]:
    """Return the pieces of all files that satisfy ``counts``, as ranges."""
    held = sorted(
        {piece.key for each in snapshots for piece in each.header.pieces if counts(piece)}
    )
    found = []
    for (layer, _), run in groupby(enumerate(held), key=lambda at: (at[1][0], at[1][1] - at[0])):
        pieces = [piece for _, (_, piece) in run]
        found.append(Holding(layer, pieces[0], pieces[-1] + 1))
    return tuple(found)
