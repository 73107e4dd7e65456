"""Looks after this node's snapshots: sees them sealed, copied, brought to the durable store, freed.

What may be freed, and when, is decided in ``agents.core.decide`` and by the leader; here it is
done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from agents.core.model import Event, SnapshotsChanged, State, TroubleChanged, UploadDone
from agents.daemon.clock import Clock
from agents.daemon.failpoints import reached
from agents.daemon.tasks import Tasks
from agents.protocol.records import JobId, Point, Saving, Uploaded
from agents.registration import Registration
from agents.rpc.client import Peers
from agents.snapshots.memory import Memory, Snapshot, delete
from agents.snapshots.replication import Buddies
from agents.snapshots.upload import Uploading
from agents.workers.gang import Workers
from agents.workers.status import Word
from simulator.documents.problems import InputError, Problem
from worker.checkpoint import snapshot_file

HELD_MAX = 8
"""So many files wait for the durable store: more would fill the memory while it is away."""


def new_keeper(
    folder: Path, peers: Peers, workers: Workers, registration: Registration, rate_bytes_s: float
) -> Keeper:
    """Put together all that looks after snapshots; ``state`` is still to be set."""
    memory = Memory(folder)
    keeper = Keeper(memory, workers, registration.clock, registration.feed)
    memory.changed = keeper.tell

    def saving(job: JobId) -> Saving:
        known = registration.jobs.get(job)
        return Saving() if known is None else known.saving

    keeper.buddies = Buddies(
        peers.session,
        peers.key,
        lambda: keeper.state().node,
        registration.known.get,
        registration.nodes,
        rate_bytes_s,
        keeper.is_present,
        keeper.replicated,
        outlives_zone=lambda job: saving(job).survive == "zone",
    )
    keeper.uploading = Uploading(
        lambda: keeper.state().node.id,
        lambda job: saving(job).uri,
        keeper.is_wanted,
        lambda: keeper.is_doomed() and len(registration.known) > 1,
        keeper.uploaded,
        keeper.not_uploaded,
    )
    registration.kept = memory.jobs
    workers.ended = memory.tidy
    return keeper


def _name(snapshot: Snapshot) -> tuple[JobId, Point, int]:
    return snapshot.job, snapshot.point, snapshot.header.rank


@dataclass(eq=False)
class Keeper:
    """Between the workers that seal and those who take copies."""

    memory: Memory
    workers: Workers
    clock: Clock
    feed: Callable[[Event], None]
    state: Callable[[], State] = field(init=False)
    buddies: Buddies = field(init=False)
    uploading: Uploading = field(init=False)
    _known: set[tuple[JobId, Point, int]] = field(default_factory=set)
    """Our own workers' files that are in hand, or were."""
    _held: dict[tuple[JobId, Point, int], Snapshot] = field(default_factory=dict)
    """What waits to be brought to the durable store, by names that are ours alone."""
    _troubles: dict[str, str] = field(default_factory=dict)
    _tasks: Tasks = field(default_factory=Tasks)

    def open(self) -> None:
        """Find what stands in memory; the folder must be usable."""
        try:
            self.memory.open()
        except OSError as error:
            what = f"cannot keep snapshots: {error.strerror}"
            raise InputError(
                Problem(str(self.memory.folder), what, "name another folder under memory")
            ) from None

    def resume(self) -> None:
        """Take over what an agent before us had in hand."""
        for snapshot in self.memory.held():
            self._held[_name(snapshot)] = snapshot
        for snapshot in self.memory.all():
            self._take_up(snapshot)
        for name in self._held.keys() - self._known:
            self.uploading.add(self._held[name])  # All that is left of it is what we hold.

    def free_bytes(self) -> int:
        """How much more could stand in memory."""
        return snapshot_file.free_bytes(self.memory.folder)

    def tell(self, job: JobId) -> None:
        """Say what stands here of a job."""
        self.feed(SnapshotsChanged(self.clock.now(), self.memory.sealed(job), job))

    def hear(self, job: JobId, word: Word) -> None:
        """A worker may have sealed another snapshot, or have no room for the next one."""
        if word.room_short:
            self._tasks.start(self._make_room(word.room_short))
        point = word.sealed_at
        if point is None or (job, point, word.rank) in self._known:
            return
        snapshot = self.memory.look(
            self.memory.path(job, point, snapshot_file.file_name(word.rank))
        )
        if snapshot is not None:
            self._take_up(snapshot)

    def _take_up(self, snapshot: Snapshot) -> None:
        header = snapshot.header
        if header.node != self.state().node.id or not self.is_present(snapshot):
            return  # A copy for another node; or nobody will ask for it but to read.
        self._known.add(_name(snapshot))
        if header.persist:
            self._hold(snapshot)
        self.buddies.add(snapshot)

    def secure(self, job: JobId, point: Point) -> None:
        """The leader wants this point made durable now, whatever the interval says."""
        for snapshot in self.memory.snapshots(job, point):
            header, name = snapshot.header, _name(snapshot)
            is_ours = header.node == self.state().node.id and name not in self._held
            has_any = any(piece.is_written for piece in header.pieces)
            if is_ours and has_any and self.is_wanted(snapshot):
                self._hold(snapshot)
                if (held := self._held.get(name)) is not None:
                    self.uploading.add(held)

    def _hold(self, snapshot: Snapshot) -> None:
        """Its worker may want to use the file again before it is in the durable store."""
        name = _name(snapshot)
        if name not in self._held and len(self._held) >= HELD_MAX:
            point = snapshot.point
            text = f"step {point.step} is not made durable: {HELD_MAX} older files still wait"
            self._trouble(snapshot.job, "store", text)
        elif (held := self.memory.hold(snapshot)) is not None:
            self._held[name] = held

    async def _make_room(self, needed_bytes: int) -> None:
        """Let go of what has waited longest for the durable store: an outage stops no training."""
        for name in sorted(self._held, key=lambda name: name[1]):
            if self.free_bytes() >= needed_bytes:
                return
            if (snapshot := self._held.pop(name, None)) is None:
                continue  # It is there meanwhile.
            job, point, _ = name
            text = (
                f"step {point.step} is not made durable: {snapshot_file.in_mib(needed_bytes)} were "
                f"needed in {self.memory.folder} for the next snapshot, and what waits for the "
                "store gave way; enlarge that file system, or see why the store takes nothing"
            )
            self._trouble(job, "room", text)
            await asyncio.to_thread(snapshot.path.unlink, missing_ok=True)

    def begin(self) -> None:
        """Another generation begins: what waits for the store of older ones is never committed."""
        for name in [name for name, held in self._held.items() if not self.is_present(held)]:
            path = self._held.pop(name).path
            self._tasks.start(asyncio.to_thread(path.unlink, missing_ok=True))

    def is_present(self, snapshot: Snapshot) -> bool:
        """The generation goes on that it is of."""
        workers = self.workers
        return (workers.job, workers.generation) == (snapshot.job, snapshot.header.generation)

    # ---- copies ---------------------------------------------------------------------------------

    def replicated(self, snapshot: Snapshot, trouble: str) -> None:
        """Copies are where they should be, or cannot be; then it is brought to the store."""
        header = snapshot.header
        reached("copied", header.generation)
        point = {"step": header.step, "generation": header.generation}
        order = {"order": "replicated", "point": point}
        self.workers.order(header.generation, order, rank=header.rank)
        self._trouble(snapshot.job, "copies", trouble)
        if (held := self._held.get(_name(snapshot))) is not None:
            self.uploading.add(held)

    def is_wanted(self, snapshot: Snapshot) -> bool:
        """Whether to bring it to the durable store, still."""
        target = self.uploading.target(snapshot)
        is_there = any(vote.uri == target for vote in self.state().uploaded)
        return not is_there and self.is_present(snapshot) and snapshot.path.exists()

    def is_doomed(self) -> bool:
        """This node will be gone at a moment that is known."""
        node = self.state().node
        return node.state == "draining" and node.leaves_at is not None

    def uploaded(self, snapshot: Snapshot, vote: Uploaded | None) -> None:
        """It is there, or nobody wants it there any more."""
        reached("uploaded", snapshot.header.generation)
        self._held.pop(_name(snapshot), None)
        self._tasks.start(asyncio.to_thread(snapshot.path.unlink, missing_ok=True))
        if vote is not None:
            self._trouble(snapshot.job, "store", "")
            self._trouble(snapshot.job, "room", "")
            self.feed(UploadDone(self.clock.now(), snapshot.job, vote))

    def not_uploaded(self, snapshot: Snapshot, reason: str) -> None:
        """It is not, and is tried again."""
        self._trouble(snapshot.job, "store", reason)

    def _trouble(self, job: JobId, kind: str, text: str) -> None:
        if self._troubles.get(kind, "") != text:
            self._troubles[kind] = text
            told = "; ".join(each for each in self._troubles.values() if each)
            self.feed(TroubleChanged(self.clock.now(), job, told))

    # ---- letting go -----------------------------------------------------------------------------

    def release(self, job: JobId, safe: Point, running: int) -> None:
        """Free what a safe point makes needless."""
        self._delete(self.memory.release(job, safe, running))

    def sweep(self, job: JobId) -> None:
        """Free all of a job."""
        if self.workers.job == job:
            self.workers.end_idle()
        self._delete(self.memory.sweep(job))

    def _delete(self, paths: list[Path]) -> None:
        if paths:
            self._tasks.start(asyncio.to_thread(delete, paths))
