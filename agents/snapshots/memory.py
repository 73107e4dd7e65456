"""The snapshots in this node's memory: found by their sealed headers, given out, let go.

Each is a file ``JOB/GENERATION-STEP/RANK.snap`` in a folder in memory. Workers write them under
another name and seal them by renaming; copies for others arrive over HTTP and are sealed the same
way. Only the agent deletes any. A file outlives the worker that wrote it, and the agent.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from agents.protocol.records import Holding, JobId, Point, Sealed
from worker.checkpoint import snapshot_file

KEPT = 2
"""Of the generation that runs, so many of the last points stay whatever is released."""
COPIES_KEPT = 4
"""Of one rank of another node, so many of the last points: a rank that has sealed one more proves
that the last but two is sealed and copied everywhere, and one may have been sealed as all broke."""
JOB = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
FILE_NAME = re.compile(r"([0-9]{1,6})\.snap\Z", re.ASCII)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One sealed file."""

    path: Path
    header: snapshot_file.Header

    @property
    def job(self) -> JobId:
        return JobId(self.header.job)

    @property
    def point(self) -> Point:
        return Point(self.header.step, self.header.generation)


@dataclass(eq=False)
class Memory:
    """What stands sealed here, of every job."""

    folder: Path
    changed: Callable[[JobId], None] = lambda _: None
    """Told when a job has more or fewer snapshots here."""
    _files: dict[tuple[JobId, Point], dict[str, Snapshot]] = field(default_factory=dict)

    def open(self) -> None:
        """Take over what stands here from before; what was not sealed is of no use."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._holds.mkdir(exist_ok=True)
        self.tidy()
        for *_, folder in snapshot_file.point_folders(self.folder):
            for path in sorted(folder.glob(f"*{snapshot_file.SUFFIX}")):
                self.look(path)

    def tidy(self) -> None:
        """Delete what a process that is gone was still writing."""
        with contextlib.suppress(FileNotFoundError):  # A folder may go while we look.
            for pid, path in snapshot_file.unfinished_files(self.folder):
                if not Path("/proc", str(pid)).exists():
                    path.unlink(missing_ok=True)

    def look(self, path: Path) -> Snapshot | None:
        """Know what a file holds that was sealed, or sealed anew; ``None``: it is not sealed."""
        try:
            snapshot = Snapshot(path, snapshot_file.read_header(path))
        except (OSError, snapshot_file.SnapshotError):
            return None
        if path != self.path(snapshot.job, snapshot.point, snapshot.header.file_name):
            return None  # It says of itself that it is another one.
        self._drop_missing(snapshot.job)
        self._files.setdefault((snapshot.job, snapshot.point), {})[path.name] = snapshot
        self.changed(snapshot.job)
        return snapshot

    def _drop_missing(self, job: JobId) -> None:
        """A worker may take the file of an older point of its own for a new one."""
        for point in self._points(job):
            files = self._files[job, point]
            for name in [name for name, snapshot in files.items() if not snapshot.path.exists()]:
                del files[name]
            if not files:
                del self._files[job, point]

    def path(self, job: JobId, point: Point, name: str) -> Path:
        """Where a file stands, or would."""
        at = snapshot_file.point_folder(
            self.folder, job, generation=point.generation, step=point.step
        )
        return at / name

    # ---- what there is --------------------------------------------------------------------------

    def snapshots(self, job: JobId, point: Point) -> tuple[Snapshot, ...]:
        """All files of a point."""
        return tuple(self._files.get((job, point), {}).values())

    def all(self) -> Iterator[Snapshot]:
        """All files, oldest points first."""
        for _, files in sorted(self._files.items(), key=lambda item: item[0]):
            yield from files.values()

    def jobs(self) -> set[JobId]:
        """Those of which anything stands here."""
        return {job for job, _ in self._files}

    def sealed(self, job: JobId) -> tuple[Sealed, ...]:
        """What this node holds of a job, point by point."""
        return tuple(
            Sealed(point, holdings(self.snapshots(job, point))) for point in self._points(job)
        )

    # ---- holding on -----------------------------------------------------------------------------

    def hold(self, snapshot: Snapshot) -> Snapshot | None:
        """Keep a file as it is, under a name of our own, whatever its worker or we do with it.

        ``None``: it is gone already. What is held ends with ``drop``.
        """
        point = snapshot.point
        name = f"{snapshot.job}.{point.generation}.{point.step}.{snapshot.header.rank}"
        held = self._holds / name
        with contextlib.suppress(FileExistsError):
            try:
                held.hardlink_to(snapshot.path)
            except FileNotFoundError:
                return None
        return Snapshot(held, snapshot.header)

    def held(self) -> Iterator[Snapshot]:
        """What an agent before us held."""
        for path in sorted(self._holds.iterdir()):
            try:
                yield Snapshot(path, snapshot_file.read_header(path))
            except (OSError, snapshot_file.SnapshotError):
                path.unlink(missing_ok=True)  # Its worker had it before we did.

    @property
    def _holds(self) -> Path:
        return self.folder / ".held"

    # ---- letting go -----------------------------------------------------------------------------

    def release(self, job: JobId, safe: Point, running: int) -> list[Path]:
        """Forget all of a job that a safe point makes needless; return what is to be deleted.

        ``running`` is the generation that runs here: of it the last few stay.
        """
        points = self._points(job)
        kept = [point for point in points if point.generation == running][-KEPT:]
        needless = (point for point in points if _is_before(point, safe) and point not in kept)
        return self._forget(job, needless)

    def outrun(self, last: Snapshot) -> list[Path]:
        """Forget copies of one rank that its later ones make needless, whoever leads or does not.

        Without that a leader that is away would let the memory fill up, and training stop.
        """
        job, generation, name = last.job, last.point.generation, last.path.name
        points = [
            point
            for point in self._points(job)
            if point.generation == generation and name in self._files[job, point]
        ]
        gone = [self._files[job, point].pop(name).path for point in points[:-COPIES_KEPT]]
        if gone:
            self._drop_missing(job)
            self.changed(job)
        return gone

    def sweep(self, job: JobId) -> list[Path]:
        """Forget all of a job that has ended; return what is to be deleted."""
        return self._forget(job, self._points(job))

    def _points(self, job: JobId) -> list[Point]:
        return sorted(point for of, point in self._files if of == job)

    def _forget(self, job: JobId, points: Iterable[Point]) -> list[Path]:
        gone = []
        for point in points:
            gone += [snapshot.path for snapshot in self._files.pop((job, point)).values()]
        if gone:
            self.changed(job)
        return gone


def head_checksum(header: snapshot_file.Header) -> str:
    """Name a file by its header, which names all that follows."""
    return snapshot_file.head_checksum(snapshot_file.head_bytes(header))


def delete(paths: Iterable[Path]) -> None:
    """Give the memory back; it takes its time, and belongs into a thread."""
    for path in paths:
        path.unlink(missing_ok=True)
        for folder in path.parents[:2]:
            with contextlib.suppress(OSError):  # It still holds something.
                folder.rmdir()


def _is_before(point: Point, safe: Point) -> bool:
    """Whatever an older generation did beyond the point at which it was left is void too."""
    return (point.generation, point.step) < (safe.generation, safe.step)


def holdings(
    snapshots: Iterable[Snapshot], counts: Callable[[snapshot_file.Piece], bool] = lambda _: True
) -> tuple[Holding, ...]:
    """The pieces of all files that count, in ranges."""
    held = sorted(
        {piece.key for each in snapshots for piece in each.header.pieces if counts(piece)}
    )
    found = []
    for (layer, _), run in groupby(enumerate(held), key=lambda at: (at[1][0], at[1][1] - at[0])):
        pieces = [piece for _, (_, piece) in run]
        found.append(Holding(layer, pieces[0], pieces[-1] + 1))
    return tuple(found)
