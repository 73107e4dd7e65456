"""The life of this node's snapshots: sealed by a worker, replicated, uploaded, deleted.

``agents.core.decide`` and the leader decide what is deleted, and when.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from agents.core.model import Event, SnapshotsChanged, State, TroubleChanged, UploadDone
from agents.daemon.clock import Clock
from agents.daemon.failpoints import failpoint
from agents.daemon.tasks import Tasks
from agents.protocol.parts import takes_replicas
from agents.protocol.records import JobId, JobRecord, NodeId, NodeRecord, Point, Saving, Uploaded
from agents.rpc.client import SignedClient
from agents.snapshots.memory import SnapshotFile, SnapshotMemory, delete
from agents.snapshots.replication import Replicator
from agents.snapshots.upload import Uploader
from simulator.documents.problems import InputError, Problem
from worker.checkpoint import free_space, snapshot_file

POINTS_LINKED = 2
"""Points whose files may wait for the durable store; more would fill the memory in an outage. A
node without room for a fourth snapshot keeps one. A point is useful only with the files of all
ranks, so if one is linked, all are."""
LEAVES_SOON_S = 120.0
"""A node that ends within this time leaves uploads to those that stay."""


class Workers(Protocol):
    """The worker processes of this node, as far as snapshots are concerned."""

    job: JobId | None
    generation: int
    """The present one."""

    def order(self, generation: int, order: dict[str, Any], *, rank: int | None = None) -> None:
        """Send an order to the workers of a generation, or to one rank."""

    def dismiss_all(self) -> None:
        """Kill all processes."""


class ClusterRecords(Protocol):
    """The cluster's records, as this node last read them."""

    @property
    def known(self) -> Mapping[NodeId, NodeRecord]: ...

    @property
    def jobs(self) -> Mapping[JobId, JobRecord]: ...

    async def nodes(self) -> tuple[NodeRecord, ...]:
        """Read all registered nodes from the store."""
        ...


@dataclass(eq=False, kw_only=True)
class SnapshotLifecycle:
    """Takes each snapshot that a worker seals through replication and upload."""

    memory: SnapshotMemory
    workers: Workers
    cluster: ClusterRecords
    client: SignedClient
    clock: Clock
    feed: Callable[[Event], None]
    state: Callable[[], State]
    rate_bytes_s: float
    """The highest rate of replication."""
    replicator: Replicator = field(init=False)
    uploader: Uploader = field(init=False)
    _taken: dict[tuple[JobId, int], Point] = field(default_factory=dict)
    """By job and rank: the last file of our own workers that was taken up."""
    _linked: dict[tuple[JobId, Point, int], SnapshotFile] = field(default_factory=dict)
    """Files that wait for their upload, as hard links that no worker reuses."""
    _troubles: dict[tuple[JobId, str], str] = field(default_factory=dict)
    """By job and kind."""
    _tasks: Tasks = field(default_factory=Tasks)
    _makes_room: bool = False
    """Whether room is being made: until then what other ranks ask is passed over, since it may not
    be so any more by then. Workers ask again."""

    def __post_init__(self) -> None:
        self.memory.changed = self.report
        self.replicator = Replicator(
            client=self.client,
            node=lambda: self.state().node,
            find=self.cluster.known.get,
            others=self.cluster.nodes,
            rate_bytes_s=self.rate_bytes_s,
            is_present=self.is_present,
            done=self.replicated,
            outlives_zone=lambda job: self._saving(job).survive == "zone",
            takes_replicas=lambda node, job: takes_replicas(node, job, self.cluster.jobs),
        )
        self.uploader = Uploader(
            node=lambda: self.state().node.id,
            uri=lambda job: self._saving(job).uri,
            is_wanted=self.is_wanted,
            is_paused=self._is_leaving_soon,
            done=self.uploaded,
            failed=self.not_uploaded,
            is_known=lambda job: job in self.cluster.jobs,
        )

    def _saving(self, job: JobId) -> Saving:
        known = self.cluster.jobs.get(job)
        return Saving() if known is None else known.saving

    def open(self) -> None:
        """Read the snapshots in memory; ``InputError`` if the folder cannot be used."""
        try:
            self.memory.open()
        except OSError as error:
            what = f"cannot hold snapshots: {error.strerror}"
            raise InputError(
                Problem(str(self.memory.folder), what, "set another folder under memory")
            ) from None

    def resume(self) -> None:
        """Take over the replications and uploads of a previous agent process."""
        for snapshot in self.memory.linked():
            self._linked[snapshot.key] = snapshot
        found = sorted(self.memory.all(), key=lambda snapshot: snapshot.point)
        taken = {snapshot.key for snapshot in found if self._take_up(snapshot)}
        for name in self._linked.keys() - taken:
            self.uploader.add(self._linked[name])  # Only the link is left of it.

    def free_bytes(self) -> int:
        """Return how many bytes are free for snapshots."""
        return free_space.free_bytes(self.memory.folder)

    def report(self, job: JobId) -> None:
        """Report which snapshots of a job this node holds."""
        self.feed(SnapshotsChanged(self.clock.now(), self.memory.sealed(job), job))

    def hear(
        self,
        job: JobId,
        rank: int,
        *,
        sealed_at: Point | None,
        bytes_short: int,
        complete: Point | None = None,
    ) -> None:
        """Handle a worker's status: it has sealed a snapshot, or lacks room for the next one.

        ``complete``: the last point that it knows to be complete on all ranks.
        """
        if bytes_short and not self._makes_room:
            self._makes_room = True
            self._tasks.start(self._make_room(job, bytes_short, complete))
        if sealed_at is None or self._taken.get((job, rank)) == sealed_at:
            return
        path = self.memory.path(job, sealed_at, snapshot_file.file_name(rank))
        snapshot = self.memory.look(path)
        if snapshot is not None:
            self._take_up(snapshot)

    def withdrawn(self, job: JobId, rank: int) -> None:
        """Forget the snapshots that a worker has removed, those that wait for upload, too."""
        self.memory.forget_missing(job)
        self._drop_links([name for name in self._linked if (name[0], name[2]) == (job, rank)])

    def _take_up(self, snapshot: SnapshotFile) -> bool:
        header, (job, point, rank) = snapshot.header, snapshot.key
        if header.node != self.state().node.id or not self.is_present(snapshot):
            return False  # Another node's replica, or a snapshot of a past generation.
        self._taken[job, rank] = point
        if header.persist:
            self._link(snapshot)
        self.replicator.add(snapshot)
        return True

    def upload_now(self, job: JobId, point: Point) -> None:
        """Upload a point at once, by the leader's order."""
        for snapshot in self.memory.snapshots(job, point):
            header, name = snapshot.header, snapshot.key
            is_ours = header.node == self.state().node.id and name not in self._linked
            has_any = any(piece.is_written for piece in header.pieces)
            if is_ours and has_any and self.is_wanted(snapshot):
                self._link(snapshot, is_ordered=True)
                if (linked := self._linked.get(name)) is not None:
                    self.uploader.add(linked)

    def _link(self, snapshot: SnapshotFile, *, is_ordered: bool = False) -> None:
        """Link the file for its upload: the worker may reuse its own name before that is done.

        What the leader orders replaces an older point whose upload has not begun, or has failed.
        """
        own, linked = (snapshot.job, snapshot.point), self._points_linked()
        if own not in linked and linked and not self._may_link_another():
            waiting = [each for each in linked if not self._is_sending(*each) and each < own]
            if not (is_ordered and waiting):
                self._set_trouble(snapshot.job, "room", self._why_skipped(snapshot.point))
                return  # The uploader says why they wait.
            self._drop_links(self._links_of(*waiting[-1]))
        if (file := self.memory.link(snapshot)) is not None:
            self._linked[snapshot.key] = file

    def _points_linked(self) -> list[tuple[JobId, Point]]:
        return sorted({(job, point) for job, point, _ in self._linked})

    def _links_of(self, job: JobId, point: Point) -> list[tuple[JobId, Point, int]]:
        return sorted(name for name in self._linked if name[:2] == (job, point))

    def _is_sending(self, job: JobId, point: Point) -> bool:
        names = self._links_of(job, point)
        return any(self.uploader.is_sending(self._linked[name]) for name in names)

    def _may_link_another(self) -> bool:
        """Return whether a second point may wait, as its ranks then need a fourth file each."""
        if len(self._points_linked()) >= POINTS_LINKED:
            return False
        node = self.state().node.id
        own = (each.header for each in self.memory.all() if self.is_present(each))
        sizes = {each.rank: each.total_bytes for each in own if each.node == node}
        return self.free_bytes() >= sum(sizes.values())

    def _why_skipped(self, skipped: Point) -> str:
        older = ", ".join(str(point.step) for _, point in self._points_linked())
        return (
            f"step {skipped.step} is skipped, since older ones ({older}) are not uploaded yet: the "
            f"storage is too slow for [checkpoint] persist_every, or {self.memory.folder} has no "
            "room for another snapshot"
        )

    async def _make_room(self, job: JobId, needed_bytes: int, complete: Point | None) -> None:
        """Delete what the present generation can spare of past ones; if that is nothing, drop the
        newest point that waits for upload: an outage of the store stops no training, and of slow
        uploads the oldest ends first. The worker asks again if it still lacks room."""
        try:
            self.memory.look_again()
            if spare := self._forget_spare(job, complete):
                await asyncio.to_thread(delete, spare)
            elif self._knows(job, complete) and self.free_bytes() < needed_bytes:
                for point in self._points_linked()[-1:]:
                    await self._drop_for_room(*point, needed_bytes)
        finally:
            self._makes_room = False

    def _knows(self, job: JobId, complete: Point | None) -> bool:
        """Return whether it is known what a job can spare: not before its record was read."""
        record = self.state().record
        return complete is not None or (record is not None and record.job == job)

    def _forget_spare(self, job: JobId, complete: Point | None) -> list[Path]:
        """Forget what the present generation can spare of past ones; return the files to delete."""
        record = self.state().record
        if complete is not None and self._is_held(job, complete):
            first = Point(0, complete.generation)
            return self.memory.release(job, first, complete.generation)
        if record is not None and record.job == job:
            return self.memory.release_spare(record)
        return []

    async def _drop_for_room(self, job: JobId, point: Point, needed_bytes: int) -> None:
        """Drop a point that waits for upload. It counts as linked until it is gone: else an order
        to upload it would be given the link that is about to be deleted."""
        text = (
            f"step {point.step} is not uploaded: the next snapshot needed "
            f"{free_space.in_mib(needed_bytes)} in {self.memory.folder}; enlarge that file "
            "system, or check why the store takes no uploads"
        )
        self._set_trouble(job, "room", text)
        for name in self._links_of(job, point):
            if (file := self._linked.get(name)) is not None:  # Else it was uploaded meanwhile.
                await self._delete_link(file)
                self._linked.pop(name, None)

    def _is_held(self, job: JobId, point: Point) -> bool:
        """Return whether the point is of the present generation, and here."""
        present = self.workers.job, self.workers.generation
        return present == (job, point.generation) and bool(self.memory.snapshots(job, point))

    def begin(self) -> None:
        """Drop the files of past generations that wait for upload: they are never committed.

        Troubles end too: this node may have nothing to replicate or upload any more.
        """
        self.memory.look_again()
        jobs = {job for (job, _), text in self._troubles.items() if text}
        self._troubles.clear()
        for job in sorted(jobs):
            self.feed(TroubleChanged(self.clock.now(), job, ""))
        self._drop_links([name for name, file in self._linked.items() if not self.is_present(file)])

    def _drop_links(self, names: list[tuple[JobId, Point, int]]) -> None:
        for name in names:
            self._tasks.start(self._delete_link(self._linked.pop(name)))

    async def _delete_link(self, file: SnapshotFile) -> None:
        """Delete a link, and end its upload."""
        await asyncio.to_thread(file.path.unlink, missing_ok=True)
        self.uploader.give_up(file)

    def is_present(self, snapshot: SnapshotFile) -> bool:
        """Return whether it belongs to the present generation."""
        workers = self.workers
        return (workers.job, workers.generation) == (snapshot.job, snapshot.header.generation)

    def _is_left(self, snapshot: SnapshotFile) -> bool:
        """Return whether its workers had left their generation before this agent started."""
        last = self.state().job, self.state().left
        return not self.workers.generation and last == (snapshot.job, snapshot.header.generation)

    # ---- replication and upload -----------------------------------------------------------------

    def replicated(self, snapshot: SnapshotFile, trouble: str) -> None:
        """Tell the worker that replication is done or has failed, and queue the upload."""
        header = snapshot.header
        failpoint("copied", header.generation)
        point = {"step": header.step, "generation": header.generation}
        order = {"order": "replicated", "point": point}
        self.workers.order(header.generation, order, rank=header.rank)
        self._set_trouble(snapshot.job, "copies", trouble)
        if (linked := self._linked.get(snapshot.key)) is not None:
            self.uploader.add(linked)

    def is_wanted(self, snapshot: SnapshotFile) -> bool:
        """Return whether the snapshot is still to be uploaded."""
        target = self.uploader.target(snapshot)
        is_there = any(vote.uri == target for vote in self.state().uploaded)
        is_ours = self.is_present(snapshot) or self._is_left(snapshot)
        return not is_there and is_ours and snapshot.path.exists()

    async def _is_leaving_soon(self) -> bool:
        """Return whether this node's end is known to be near, and others stay."""
        own = self.state().node
        if own.state != "draining" or own.leaves_at is None:
            return False
        if own.leaves_at - self.clock.now() > LEAVES_SOON_S:
            return False  # The job may train here for hours, and needs checkpoints.
        others = await self.cluster.nodes()
        return any(node.id != own.id and node.state != "draining" for node in others)

    def uploaded(self, snapshot: SnapshotFile, vote: Uploaded | None) -> None:
        """Drop the link of a file that was uploaded, or is not wanted any more."""
        failpoint("uploaded", snapshot.header.generation)
        self._linked.pop(snapshot.key, None)
        self._tasks.start(asyncio.to_thread(snapshot.path.unlink, missing_ok=True))
        if vote is not None:
            self._set_trouble(snapshot.job, "store", "")
            self._set_trouble(snapshot.job, "room", "")
            self.feed(UploadDone(self.clock.now(), snapshot.job, vote))

    def not_uploaded(self, snapshot: SnapshotFile, reason: str) -> None:
        """Report a failed attempt; the upload is retried."""
        self._set_trouble(snapshot.job, "store", reason)

    def _set_trouble(self, job: JobId, kind: str, text: str) -> None:
        if self._troubles.get((job, kind), "") != text:
            self._troubles[job, kind] = text
            found = (each for (of, _), each in self._troubles.items() if of == job)
            trouble = "; ".join(filter(None, found))
            self.feed(TroubleChanged(self.clock.now(), job, trouble))

    # ---- deletion -------------------------------------------------------------------------------

    def release(self, job: JobId, safe: Point, running: int) -> None:
        """Delete what a safe point has superseded."""
        self._delete(self.memory.release(job, safe, running))

    def delete_job(self, job: JobId) -> None:
        """Delete all snapshots of a job, those that wait for upload, too."""
        if self.workers.job == job:
            self.workers.dismiss_all()
        self._delete(self.memory.delete_job(job))
        self._drop_links([name for name in self._linked if name[0] == job])
        self._troubles = {key: text for key, text in self._troubles.items() if key[0] != job}

    def _delete(self, paths: list[Path]) -> None:
        if paths:
            self._tasks.start(asyncio.to_thread(delete, paths))
