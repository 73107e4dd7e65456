"""Snapshots of a job through seeded random generations: nothing that is needed is deleted, and no
node holds more than it must have room for.

Files, placement, reservation, deletion and the choice of the restore point are the real code; what
is played is the order of events: when ranks seal, which one dies, and what the leader has said.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agents.core.model import UploadDone
from agents.daemon.clock import Clock
from agents.protocol.records import (
    FIRST,
    GenerationRecord,
    JobId,
    JobRecord,
    NodeId,
    Point,
    Saving,
)
from agents.snapshots import upload
from agents.snapshots.lifecycle import SnapshotLifecycle
from agents.snapshots.memory import SnapshotMemory, delete
from sailord.core.queries.restore_point import (
    complete_points,
    fallback_point,
    is_in_lineage,
    lineage_of,
    piece_holders,
    release_point,
    restore_point,
    safe_points,
    single_holders,
)
from simulator.spec.plan import Plan
from tests.processes import until
from tests.worker.control.fake_agents import plan_of
from tests.worker.training_runs import small_job
from worker.checkpoint import capacity_check, free_space, snapshot_file
from worker.checkpoint.capacity_check import NodeNeed, check_room, node_need
from worker.checkpoint.placement import SnapshotPlacement, placement_of, state_shape
from worker.checkpoint.snapshots import snapshot_writer
from worker.checkpoint.snapshots.snapshot_writer import CopySources, SnapshotWriter
from worker.layout.tensor_table import holdings_for

JOB = small_job(tied=True)
"""Its snapshots are small, so heads count."""
SHAPE = state_shape(JOB)
LAYERS, PIECES = SHAPE.layers + 1, SHAPE.atoms + 1
ID = JobId("job")
NAMES = "abcd"
NONE = GenerationRecord(ID, 0, "closed", "", (), FIRST, 1, "")


def plans() -> list[Plan]:
    """Plans of two and three nodes that keep each piece on two of them, in unequal shares."""
    found = [
        plan_of((4, [(0, 5, 1, first)]), (4, [(0, 5, 1, second)]))
        for first in NAMES
        for second in NAMES
        if first < second
    ]
    for left in NAMES:
        one, two, three = (name for name in NAMES if name != left)
        found.append(plan_of((4, [(0, 5, 1, one)]), (2, [(0, 5, 1, two)]), (2, [(0, 5, 2, three)])))
        found.append(plan_of((4, [(0, 5, 1, one)]), (4, [(0, 2, 1, two), (2, 5, 1, two)])))
    return found


def placed(plan: Plan) -> SnapshotPlacement:
    return placement_of(JOB, plan, holdings_for(plan, JOB), dict.fromkeys(NAMES, "z"))


PLANS = [placed(plan) for plan in plans()]


def head(placement: SnapshotPlacement, rank: int, generation: int) -> snapshot_file.Header:
    """The header of a rank's files."""
    pieces = tuple(
        snapshot_file.Piece(*key, offset=0, bytes=placement.sizes[key])
        for key, ranks in placement.holders.items()
        if rank in ranks
    )
    progress = snapshot_file.SavedProgress(0, 0, 1.0, 0, "", 0, 0)
    return snapshot_file.with_offsets(
        snapshot_file.Header(
            job=ID, generation=generation, step=0, term=1, rank=rank, node=placement.nodes[rank],
            atoms=SHAPE.atoms, layers=LAYERS, dtype="float32", moments=2, model="none",
            persist=False, progress=progress, pieces=pieces,
        )
    )  # fmt: skip


@dataclass(eq=False)
class Node:
    """A node's memory, and the most that may be in it."""

    folder: Path
    room: int
    memory: SnapshotMemory = field(init=False)

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Start the agent anew, which knows only what is in the folder."""
        self.memory = SnapshotMemory(self.folder)
        self.memory.open()

    @property
    def used(self) -> int:
        """The bytes of all files, and of those that are deleted and still open."""
        found = [path.stat() for path in self.folder.rglob("*") if path.is_file()]
        for descriptor in Path("/proc/self/fd").iterdir():
            with suppress(OSError):  # It was closed meanwhile.
                if os.readlink(descriptor).startswith(f"{self.folder}/"):
                    found.append(descriptor.stat())
        return sum({about.st_ino: about.st_size for about in found}.values())


@dataclass(eq=False)
class Cluster:
    """Nodes, and the generation that trains on some of them."""

    folder: Path
    random: random.Random
    nodes: dict[str, Node] = field(default_factory=dict)
    record: GenerationRecord = NONE
    placement: SnapshotPlacement | None = None
    writers: dict[int, SnapshotWriter] = field(default_factory=dict)
    kept: list[int] = field(default_factory=list)
    plans: list[SnapshotPlacement] = field(default_factory=list)
    step: int = 0
    was_safe: Point | None = None
    """The newest point that the loss of any node left; ``None`` since a node was lost."""
    was_whole: bool = False
    lives: int = 0
    squeezed: int = 0
    """How often a rank had to ask for room."""

    def __post_init__(self) -> None:
        self.plans = self.random.sample(PLANS, self.random.randint(1, 4))
        for name in NAMES:
            self.boot(name)

    def boot(self, name: str) -> None:
        self.lives += 1
        rooms = [0]
        for placement in self.plans:
            if name in placement.nodes.values():
                need = node_need(placement, name)
                ranks = [rank for rank, node in placement.nodes.items() if node == name]
                heads = sum(head(placement, rank, 1).total_bytes for rank in ranks) - need.own
                rooms.append(need.during_change + 3 * heads)
        self.nodes[name] = Node(self.folder / f"{name}{self.lives}", max(rooms))

    # ---- what the leader knows ------------------------------------------------------------------

    @property
    def held(self) -> list[tuple[NodeId, object]]:
        return [
            (NodeId(name), sealed)
            for name, node in self.nodes.items()
            for sealed in node.memory.sealed(ID)
        ]

    def points(self, copies: int) -> set[Point]:
        """The points from which the job could go on, with pieces on so many nodes."""
        whole = complete_points(self.held, LAYERS, PIECES, copies=copies)
        return {point for point in whole if is_in_lineage(point, self.record)}

    def check(self) -> None:
        """No deletion has taken what a loss of one node, or of none, would need."""
        safe, whole = self.points(2), self.points(1)
        assert whole or not self.was_whole, "the job would begin again"
        assert safe or self.was_safe is None, "the loss of one node would end the job"
        assert self.was_safe is None or max(safe) >= self.was_safe, "less survives than before"
        self.was_whole |= bool(whole)
        self.was_safe = max(safe, default=None)
        for node in self.nodes.values():
            assert node.used <= node.room

    def safe(self) -> set[Point]:
        """The points that the leader knows to survive the loss of any node."""
        domains = {NodeId(name): name for name in self.nodes}
        return safe_points(self.held, LAYERS, PIECES, durable=None, domains=domains)

    def answer(self) -> None:
        """The leader's answer to all nodes' reports."""
        found = release_point(self.safe(), self.record)
        for node in self.nodes.values():
            if found is not None:
                delete(node.memory.release(ID, found, self.record.number))
        self.check()

    # ---- a generation ---------------------------------------------------------------------------

    def open(self) -> bool:
        """The next generation begins from what is in memory, under a random plan.

        It may fail before all ranks have reserved their files.
        """
        last = self.record if self.record.number else None
        restore = restore_point(self.held, layers=LAYERS, atoms=PIECES, last=last, durable=None)
        assert restore.source == "memory" or not self.was_whole
        whole = single_holders(piece_holders(self.held), LAYERS, PIECES)
        fallback = fallback_point(self.safe(), whole, restore, last)
        assert fallback is not None
        self.record = GenerationRecord(
            ID, self.record.number + 1, "opening", "", (), restore, 1, "",
            lineage=() if last is None else lineage_of(last), fallback=fallback,
        )  # fmt: skip
        self.step, self.kept = restore.point.step, []
        self.placement = self.random.choice(self.plans)
        number = self.record.number
        needed = [(point.generation, point.step) for point in (restore.point, fallback)]
        at_once = {}
        for rank, name in self.placement.nodes.items():
            need = node_need(self.placement, name)
            at_once[rank] = check_room(need, self.nodes[name].folder, ID, number, needed)
        fails = self.random.random() < 0.2
        for rank, name in self.placement.nodes.items():
            if fails and self.random.random() < 0.5:
                continue
            writer = SnapshotWriter(
                self.nodes[name].folder, head(self.placement, rank, number), CopySources((), []),
                on_no_room=lambda _, safe, name=name: self.make_room(name, safe),
            )  # fmt: skip
            first = self.placement.first_files
            writer.reserve(first, self.placement.files - first if at_once[rank] else 0)
            self.writers[rank] = writer
            self.check()
        return not fails

    def make_room(self, name: str, safe: int) -> None:
        """What an agent does for a worker that lacks room."""
        self.squeezed += 1
        memory, number = self.nodes[name].memory, self.record.number
        if safe:
            delete(memory.release(ID, Point(0, number), number))
        else:
            delete(memory.release_spare(self.record))
        self.check()

    def seal(self, ranks: list[int], *, safe: int, is_last: bool = False) -> None:
        """These ranks seal the present step; at the last one there may be no room."""
        for rank in ranks:
            writer = self.writers[rank]
            writer.room_wait_s = 0.0 if is_last else 1.0
            progress = replace(writer.template.progress, step=self.step)
            try:
                writer.begin(progress, persist=False, safe_step=safe)
                writer.wait_sealed()
            except snapshot_file.NoRoomError:
                assert is_last
                continue
            name = writer.template.node
            path = snapshot_file.point_folder(
                writer.memory, ID, generation=self.record.number, step=self.step
            )
            assert self.nodes[name].memory.look(path / writer.template.file_name)
            self.check()

    def run(self) -> None:
        """Open a generation and train for some snapshots, until all stop or one is lost."""
        ending = self.random.choice(["stop", "process", "process", "node", "node"])
        snapshots = self.random.choice([0, 0, 1, 1, 2, 3, 5])
        if self.open():
            self.train(snapshots, stops=ending == "stop")
        for writer in self.writers.values():
            writer.close()
        self.writers.clear()
        if ending == "node":
            self.lose(self.random.choice(sorted(set(self.placement.nodes.values()))))
        for node in self.nodes.values():
            if self.random.random() < 0.3:
                node.restart()
        if self.random.random() < 0.5:
            self.answer()

    def train(self, snapshots: int, *, stops: bool) -> None:
        """Take some snapshots; then all ranks seal the last step, or one is lost."""
        ranks = sorted(self.writers)
        for _ in range(snapshots):
            self.step += 1
            self.seal(ranks, safe=self.kept[-1] if self.kept else 0)
            self.kept.append(self.step)
            if self.random.random() < 0.7:
                self.answer()
        safe = self.kept[-1] if self.kept else 0
        if stops:
            self.step += 1
            self.seal(ranks, safe=safe)
            return
        victim = self.random.choice(ranks)
        others = [rank for rank in ranks if rank != victim]
        if self.random.random() < 0.5:  # It dies as the others seal a snapshot.
            self.step += 1
            self.seal(self.random.sample(others, self.random.randint(0, len(others))), safe=safe)
        if self.random.random() < 0.5:  # The others finish a step, and seal it.
            self.step += 1
            self.seal(others, safe=safe, is_last=True)

    def lose(self, name: str) -> None:
        """A node is lost; the point that was safe is still there, and a new node comes."""
        del self.nodes[name]
        assert self.was_safe is None or max(self.points(1)) >= self.was_safe
        if self.was_safe is None:
            self.was_whole = bool(self.points(1))
        self.was_safe = None
        self.boot(name)


@pytest.fixture
def small_rooms(monkeypatch):
    """Files take room in their node's share only."""
    clusters: list[Cluster | SlowStore] = []
    create = snapshot_file.create

    def node_of(folder: Path) -> Node:
        live = clusters[-1].nodes.values()
        return next(node for node in live if folder.is_relative_to(node.folder))

    def create_if_room(path: Path, size: int) -> int:
        node = node_of(path)
        if node.used + size > node.room:
            raise snapshot_file.NoRoomError.of(28, "no room", path.parent, size)
        return create(path, size)

    def free(folder: Path) -> int:
        node = node_of(folder)
        return node.room - node.used

    monkeypatch.setattr(snapshot_file, "create", create_if_room)
    monkeypatch.setattr(snapshot_file, "free_bytes", free)
    monkeypatch.setattr(free_space, "free_bytes", free)
    monkeypatch.setattr(capacity_check, "free_bytes", free)
    monkeypatch.setattr(snapshot_writer, "_POLL_S", 0.0)
    return clusters


@pytest.mark.parametrize("seed", [1, 3, 4, 6, 18, 25, 30])
def test_needed_points_stay_and_the_computed_room_suffices(
    tmp_path, small_rooms, monkeypatch, seed
):
    monkeypatch.setattr(SnapshotWriter, "_with_checksums", lambda _self, _memory, pieces: pieces)
    cluster = Cluster(tmp_path, random.Random(seed))
    small_rooms.append(cluster)
    for _ in range(12):
        cluster.run()
    assert cluster.squeezed, "the room was never short: nothing was tried"


# ---- while a checkpoint is uploaded -------------------------------------------------------------


class SlowStore:
    """A node with room for some files of its only rank, and a store that takes the first bytes of
    each object, and no more until it may go on."""

    def __init__(self, folder: Path, files: int, monkeypatch: pytest.MonkeyPatch) -> None:
        template = head(PLANS[0], 0, 1)
        written = tuple(replace(piece, is_written=True) for piece in template.pieces)
        self.template = replace(template, pieces=written)
        self.size = template.total_bytes
        self.node = Node(folder, files * self.size)
        self.nodes = {"a": self.node}
        self.goes_on = threading.Event()
        self.uploaded: list[int] = []
        self.asked = 0
        """How often the worker asked for room, and so waited."""
        self.workers: Any = SimpleNamespace(job=ID, generation=1, order=lambda *_, **__: None)
        jobs = {ID: JobRecord(ID, "running", saving=Saving(uri="memory://far"))}
        cluster: Any = SimpleNamespace(known={}, jobs=jobs, nodes=None)
        state: Any = SimpleNamespace(
            node=SimpleNamespace(id=template.node, state="ready"), uploaded=(), job=ID, left=0,
            record=replace(NONE, number=1, fallback=Point(0, 0)),
        )  # fmt: skip

        def feed(event: object) -> None:
            if isinstance(event, UploadDone):
                state.uploaded = (*state.uploaded, event.uploaded)
                self.uploaded.append(event.uploaded.point.step)

        def take(_, __, content) -> None:
            for number, _ in enumerate(content.chunks()):
                if number == 2:
                    self.goes_on.wait()

        monkeypatch.setattr(upload, "write_once", take)
        self.lifecycle = SnapshotLifecycle(
            memory=self.node.memory, workers=self.workers, cluster=cluster, client=cluster,
            clock=Clock(), feed=feed, state=lambda: state, rate_bytes_s=1e9,
        )  # fmt: skip
        self.writer = SnapshotWriter(folder, self.template, CopySources((), []))
        self.writer.room_wait_s = 5.0
        loop = asyncio.get_running_loop()
        self.writer.on_no_room = lambda size, safe: loop.call_soon_threadsafe(
            self.lack_room, size, safe
        )

    def lack_room(self, size: int, safe: int) -> None:
        self.asked += 1
        complete = Point(safe, 1) if safe else None
        self.lifecycle.hear(ID, 0, sealed_at=None, bytes_short=size, complete=complete)

    async def seal(self, step: int) -> None:
        """Seal a step; every fourth is to be uploaded."""
        progress = replace(self.template.progress, step=step)
        persist, safe = step % 4 == 0, step - 1
        await asyncio.to_thread(self.writer.begin, progress, persist=persist, safe_step=safe)
        await asyncio.to_thread(self.writer.wait_sealed)
        self.lifecycle.hear(ID, 0, sealed_at=Point(step, 1), bytes_short=0)
        for snapshot in self.node.memory.snapshots(ID, Point(step, 1)):
            self.lifecycle.replicated(snapshot, "")
        assert self.node.used <= self.node.room

    @property
    def waiting(self) -> list[int]:
        """The steps that wait for upload."""
        return [point.step for _, point, _ in self.lifecycle._linked]


@pytest.fixture
async def slow_store(tmp_path, small_rooms, monkeypatch):
    """Returns a function that makes one whose agent runs."""
    found: list[tuple[SlowStore, asyncio.Task[None]]] = []

    def make(files: int) -> SlowStore:
        store = SlowStore(tmp_path, files, monkeypatch)
        small_rooms.append(store)
        store.writer.reserve(1, 1)
        found.append((store, asyncio.create_task(store.lifecycle.uploader.run())))
        return store

    yield make
    for store, task in found:
        store.goes_on.set()
        store.writer.close()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        store.lifecycle.uploader.close()


async def test_storage_that_is_slower_than_two_intervals_stops_no_training(slow_store):
    store = slow_store(files=3)
    for step in range(1, 12):
        await store.seal(step)
    assert (store.waiting, store.asked) == ([4], 0), "there is no room for another one"
    store.goes_on.set()
    await until(lambda: store.uploaded == [4] and not store.waiting)
    for step in range(12, 16):
        await store.seal(step)
    await until(lambda: store.uploaded == [4, 12])


async def test_memory_of_an_upload_that_hangs_comes_back_when_another_generation_begins(slow_store):
    store = slow_store(files=3)
    for step in range(1, 12):
        await store.seal(step)
    store.writer.close()
    assert store.node.used == 3 * store.size
    store.workers.generation = 2
    store.lifecycle.begin()
    await until(lambda: store.node.used == 2 * store.size)
    need = NodeNeed(own=store.size, copies=0, files=2, first_files=1)
    assert not check_room(need, store.node.folder, ID, 2, {(1, 11), (1, 10)})


async def test_room_that_others_take_is_that_of_the_newest_upload_even_if_it_hangs(slow_store):
    """The oldest is the next to end: of slow uploads another one would be dropped each time."""
    store = slow_store(files=4)
    for step in range(1, 10):
        await store.seal(step)
    assert store.waiting == [4, 8]
    await until(lambda: len(store.lifecycle.uploader._sending) == 2)
    store.node.room -= store.size
    for step in range(10, 14):
        await store.seal(step)
    assert store.waiting == [4]
    store.goes_on.set()
    await until(lambda: store.uploaded == [4])
