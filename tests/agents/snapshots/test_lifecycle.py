"""From a sealed snapshot to the queue of its upload."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agents.core.model import SnapshotsChanged, TroubleChanged
from agents.daemon.clock import Clock
from agents.loop import AgentLoop
from agents.protocol.codec import read
from agents.protocol.records import GenerationRecord, JobId, JobRecord, Point, Restore
from agents.snapshots.lifecycle import SnapshotLifecycle
from agents.snapshots.memory import SnapshotMemory, delete
from agents.workers.status import WorkerStatus
from tests.agents.sealing import write_snapshot
from tests.processes import until
from worker.checkpoint.snapshot_file import LINKS

JOB = JobId("job")
RANKS = 16


class Node:
    """A node of many GPUs whose store takes nothing until the test lets it."""

    def __init__(self, folder: Path) -> None:
        self.queued: list[tuple[int, int]] = []
        """Steps and ranks whose upload was queued."""
        self.told: list[str] = []
        self.sending: set[int] = set()
        """Steps that the store is being given."""
        self.given_up: set[int] = set()
        """Steps whose links were deleted."""
        self.held: list[int] = []
        """The step of the last point that was reported, if any, at each change."""
        any_: Any = SimpleNamespace(
            job=JOB, generation=1, order=lambda *_, **__: None, known={}, jobs={}, nodes=None
        )
        state: Any = SimpleNamespace(
            node=SimpleNamespace(id="a.1.1", state="ready"),
            uploaded=(),
            job=JOB,
            left=0,
            record=None,
        )
        self.workers, self.state = any_, state
        memory = SnapshotMemory(folder)
        memory.open()
        self.lifecycle = SnapshotLifecycle(
            memory=memory, workers=any_, cluster=any_, client=any_, clock=Clock(),
            feed=self.hear, state=lambda: state, rate_bytes_s=1e9,
        )  # fmt: skip
        self.is_known = self.lifecycle.uploader.is_known
        uploader: Any = SimpleNamespace(
            add=lambda file: self.queued.append((file.point.step, file.header.rank)),
            target=lambda file: file.path.name,
            is_sending=lambda file: file.point.step in self.sending,
            give_up=lambda file: self.given_up.add(file.point.step),
        )
        self.lifecycle.uploader = uploader

    @property
    def links(self) -> Path:
        return self.lifecycle.memory.folder / LINKS

    async def idle(self) -> None:
        """Wait until nothing is under way."""
        while running := self.lifecycle._tasks._running:
            await asyncio.wait(list(running))

    def hear(self, event: object) -> None:
        if isinstance(event, TroubleChanged):
            self.told.append(event.trouble)
        if isinstance(event, SnapshotsChanged):
            self.held.append(event.sealed[-1].point.step if event.sealed else 0)

    def seal(self, step: int, ranks: int = RANKS) -> None:
        """All ranks seal a point to be stored before any of its files is replicated."""
        memory = self.lifecycle.memory
        for rank in range(ranks):
            write_snapshot(memory.folder, step=step, rank=rank, persist=True)
        for rank in range(ranks):
            self.lifecycle.hear(JOB, rank, sealed_at=Point(step, 1), bytes_short=0)
        for snapshot in memory.snapshots(JOB, Point(step, 1)):
            self.lifecycle.replicated(snapshot, "")


@pytest.fixture
def node(tmp_path):
    return Node(tmp_path)


def test_the_files_of_all_ranks_of_two_points_wait_for_the_store(node):
    node.seal(5)
    node.seal(10)
    assert sorted(node.queued) == [(step, rank) for step in (5, 10) for rank in range(RANKS)]
    assert node.told == []


async def test_third_point_is_skipped_for_all_ranks_and_reported_until_one_is_stored(node):
    node.seal(5)
    node.seal(10)
    node.queued.clear()
    node.seal(15)
    assert node.queued == []
    (told,) = node.told
    assert told.startswith("step 15 is skipped, since older ones (5, 10) are not uploaded yet: ")
    for name, linked in list(node.lifecycle._linked.items()):
        if name[1].step == 5 and name[2] > 0:
            node.lifecycle.uploaded(linked, None)
    node.seal(20)
    assert node.queued == [], "one file of step 5 still waits"
    node.lifecycle.uploaded(node.lifecycle._linked[JOB, Point(5, 1), 0], None)
    node.seal(25)
    assert sorted(node.queued) == [(25, rank) for rank in range(RANKS)]


@pytest.mark.parametrize(("left", "queued"), [(1, [(5, 0)]), (2, [])])
def test_agent_that_restarts_without_workers_uploads_what_the_last_ones_left(
    tmp_path, left, queued
):
    """The job waits for nodes, say, and is paused: its last step would be lost with the node."""
    write_snapshot(tmp_path, step=5, rank=0)
    node = Node(tmp_path)
    node.workers.generation, node.state.left = 0, left
    node.lifecycle.resume()
    node.lifecycle.upload_now(JOB, Point(5, 1))
    assert node.queued == queued
    assert node.lifecycle.replicator.is_idle, "its replicas were made then"


def test_uploads_wait_until_their_job_was_read(node):
    assert not node.is_known(JOB)
    node.workers.jobs[JOB] = JobRecord(JOB, "running")
    assert node.is_known(JOB)


def test_troubles_end_with_their_generation_and_are_reported_again(node):
    """Whether anything is still to be replicated or uploaded here is not known before."""
    node.seal(5, ranks=1)
    (snapshot,) = node.lifecycle.memory.snapshots(JOB, Point(5, 1))
    node.lifecycle.replicated(snapshot, "no replica")
    node.lifecycle.not_uploaded(snapshot, "no answer")
    node.lifecycle.begin()
    assert node.told == ["no replica", "no replica; no answer", ""]
    node.lifecycle.begin()
    node.lifecycle.replicated(snapshot, "no replica")
    assert node.told[3:] == ["no replica"]


async def test_withdrawn_snapshots_are_neither_reported_nor_uploaded(node):
    node.seal(5, ranks=2)
    memory = node.lifecycle.memory
    withdrawn, kept = sorted(memory.snapshots(JOB, Point(5, 1)), key=lambda file: file.key)
    withdrawn.path.unlink()
    told = len(node.held)
    node.lifecycle.withdrawn(JOB, 0)
    node.lifecycle.withdrawn(JOB, 0)
    assert memory.snapshots(JOB, Point(5, 1)) == (kept,)
    assert [name[2] for name in node.lifecycle._linked] == [1]
    kept.path.unlink()
    node.lifecycle.withdrawn(JOB, 1)
    assert (node.held[told:], memory.sealed(JOB)) == ([0], ())
    assert node.lifecycle._linked == {}


@pytest.mark.parametrize(
    ("own", "leaves_at", "other", "is_paused"),
    [
        ("ready", None, "ready", False),
        ("draining", None, "ready", False),
        ("draining", 9.0, "ready", True),
        ("draining", 9.0, "cordoned", True),
        ("draining", 9.0, "draining", False),
        ("draining", 9.0, None, False),
        ("draining", 121.0, "ready", False),
    ],
)
async def test_node_with_a_notice_leaves_uploads_to_nodes_that_stay(
    node, own, leaves_at, other, is_paused
):
    """All spot nodes may get a notice at once: then each uploads what it can."""
    mine = SimpleNamespace(id="a.1.1", state=own, leaves_at=leaves_at)
    others = [] if other is None else [SimpleNamespace(id="b.1.1", state=other)]

    async def nodes():
        return (mine, *others)

    node.lifecycle.cluster = SimpleNamespace(nodes=nodes)
    node.lifecycle.state = lambda: SimpleNamespace(node=mine)
    node.lifecycle.clock = SimpleNamespace(now=lambda: 0.0)
    assert await node.lifecycle._is_leaving_soon() is is_paused


def test_the_agent_hears_of_withdrawn_snapshots_in_a_workers_status():
    told = []
    snapshots = SimpleNamespace(
        hear=lambda *_, **__: None, withdrawn=lambda *about: told.append(about)
    )
    loop: Any = SimpleNamespace(snapshots=snapshots, joiner=SimpleNamespace(hear=lambda *_: None))
    for withdrew in (False, True):
        AgentLoop.hear(loop, JOB, WorkerStatus(1, 3, "failed", withdrew=withdrew))
    assert told == [(JOB, 3)]


@pytest.mark.parametrize(("said", "complete"), [({"complete_step": 7}, Point(7, 2)), ({}, None)])
def test_the_agent_hears_which_point_is_complete_where_room_is_short(said, complete):
    told = []
    snapshots = SimpleNamespace(hear=lambda *_, **about: told.append(about))
    loop: Any = SimpleNamespace(snapshots=snapshots, joiner=SimpleNamespace(hear=lambda *_: None))
    status = {"generation": 2, "rank": 0, "taking": "running", "room_short": 9, **said}
    AgentLoop.hear(loop, JOB, read(WorkerStatus, status))
    assert told == [{"sealed_at": None, "bytes_short": 9, "complete": complete}]


def test_trouble_of_one_job_is_neither_reported_nor_hidden_as_that_of_the_next(node):
    lifecycle, text = node.lifecycle, "replicas stay in z1: no node in another zone is ready"
    lifecycle._set_trouble(JobId("job"), "copies", text)
    lifecycle._set_trouble(JobId("job"), "store", "the storage is full: make room there")
    node.told.clear()
    lifecycle._set_trouble(JobId("next"), "copies", text)
    assert node.told == [text]
    lifecycle._set_trouble(JobId("next"), "copies", "")
    assert node.told == [text, ""]


async def test_snapshots_of_an_ended_job_wait_for_its_store_no_longer(node):
    node.lifecycle.workers.dismiss_all = lambda: None
    node.seal(5, ranks=2)
    links = [linked.path for linked in node.lifecycle._linked.values()]
    assert all(path.exists() for path in links)
    node.lifecycle.delete_job(JOB)
    await until(lambda: not any(path.exists() for path in links))
    assert node.lifecycle._linked == {}
    node.seal(10, ranks=2)
    assert len(node.lifecycle._linked) == 2, "the folder of links stays"


OWN = {(2, 10), (2, 11), (2, 12)}
STAY = {(1, 4), (1, 8), *OWN}


@pytest.mark.parametrize(
    ("complete", "left"),
    [(None, STAY), (Point(12, 2), OWN), (Point(10, 3), STAY), (Point(99, 2), STAY)],
    ids=["none yet", "its own", "another generation's", "one that is not here"],
)
async def test_worker_without_room_gets_that_of_what_past_generations_left(node, complete, left):
    memory = node.lifecycle.memory
    for generation, step in {*STAY, (1, 6), (1, 9)}:
        write_snapshot(memory.folder, generation=generation, step=step)
    memory.open()
    node.workers.generation = 2
    restore = Restore(Point(8, 1), "memory")
    node.state.record = GenerationRecord(
        JOB, 2, "open", "", (), restore, 1, "", fallback=Point(4, 1)
    )
    node.lifecycle.hear(JOB, 0, sealed_at=None, bytes_short=1, complete=complete)
    await until(lambda: {(p.generation, p.step) for p in memory._points(JOB)} == left)
    await until(lambda: len(list(memory.folder.glob("*/*/*.snap"))) == len(left))
    assert node.held[-1] == 12


def record_of(job: JobId = JOB) -> GenerationRecord:
    return GenerationRecord(job, 1, "open", "", (), Restore(Point(0, 0), "start"), 1, "")


async def test_worker_without_room_gets_that_of_the_newest_point_that_waits_for_its_upload(node):
    """All its files: without one of them the others are no checkpoint."""
    node.seal(5, ranks=4)
    node.seal(10, ranks=4)
    node.state.record = record_of()
    node.lifecycle.free_bytes = lambda: 0
    for rank in range(4):
        node.lifecycle.hear(JOB, rank, sealed_at=None, bytes_short=2)
    await node.idle()
    assert {name[1].step for name in node.lifecycle._linked} == {5}
    assert len(list(node.links.iterdir())) == 4
    assert node.given_up == {10}
    assert node.told[-1].startswith("step 10 is not uploaded: the next snapshot needed ")


async def test_no_upload_is_dropped_for_a_worker_that_has_got_room(node, monkeypatch):
    """It asks each second, also while files are being deleted for it."""
    node.state.record = replace(record_of(), number=2, fallback=Point(0, 0))
    write_snapshot(node.lifecycle.memory.folder, step=4)
    node.lifecycle.memory.open()
    node.workers.generation = 2
    write_snapshot(node.lifecycle.memory.folder, step=5, generation=2, persist=True)
    node.lifecycle.hear(JOB, 0, sealed_at=Point(5, 2), bytes_short=0)

    async def to_thread(act, *of, **how):
        if act == delete:
            node.lifecycle.hear(JOB, 0, sealed_at=None, bytes_short=1)
            await asyncio.sleep(0)
        return act(*of, **how)

    monkeypatch.setattr(asyncio, "to_thread", to_thread)
    node.lifecycle.free_bytes = lambda: 0
    node.lifecycle.hear(JOB, 0, sealed_at=None, bytes_short=1)
    await node.idle()
    assert list(node.lifecycle.memory.folder.glob("job/1-4/*")) == []
    assert {name[1].step for name in node.lifecycle._linked} == {5}
    node.lifecycle.hear(JOB, 0, sealed_at=None, bytes_short=1)
    await node.idle()
    assert node.lifecycle._linked == {}, "that was not enough"


@pytest.mark.parametrize(
    ("record", "complete", "is_kept"),
    [
        (None, None, True),
        (record_of(JobId("other")), None, True),
        (record_of(), None, False),
        (None, Point(5, 1), False),
    ],
)
async def test_agent_that_has_not_read_what_a_job_can_spare_drops_no_upload(
    node, record, complete, is_kept
):
    node.seal(5, ranks=1)
    node.state.record = record
    node.lifecycle.free_bytes = lambda: 0
    node.lifecycle.hear(JOB, 0, sealed_at=None, bytes_short=1, complete=complete)
    await node.idle()
    assert bool(node.lifecycle._linked) is is_kept


def test_one_point_waits_for_the_store_where_there_is_no_room_for_another(node):
    node.lifecycle.free_bytes = lambda: 0
    node.seal(5, ranks=2)
    node.seal(10, ranks=2)
    assert node.queued == [(5, 0), (5, 1)]
    (told,) = node.told
    assert told.startswith("step 10 is skipped, since older ones (5) are not uploaded yet: ")


@pytest.mark.parametrize(("sending", "left"), [(set(), 10), ({5}, 5)], ids=["waits", "is sent"])
async def test_ordered_upload_replaces_one_that_waits_where_there_is_no_room(node, sending, left):
    node.lifecycle.free_bytes = lambda: 0
    node.seal(5, ranks=2)
    node.seal(10, ranks=2)
    node.sending |= sending
    for step in (10, 5):
        node.lifecycle.upload_now(JOB, Point(step, 1))
    await node.idle()
    assert [name[1].step for name in node.lifecycle._linked] == [left, left]
    assert len(list(node.links.iterdir())) == 2
    assert node.given_up == ({5} if left == 10 else set())


@pytest.mark.parametrize("when", ["begin", "room is short"])
async def test_file_that_no_status_told_of_is_found(node, when):
    """Its worker was killed just after it had sealed it."""
    memory = node.lifecycle.memory
    write_snapshot(memory.folder, step=9)
    if when == "begin":
        node.lifecycle.begin()
        assert node.held == [9]
    else:
        node.state.record = replace(record_of(), number=2, fallback=Point(0, 0))
        node.lifecycle.hear(JOB, 0, sealed_at=None, bytes_short=1)
        await node.idle()
        assert list(memory.folder.glob("job/*/*")) == []


def test_folder_that_is_deleted_as_a_generation_begins_is_passed_over(node, monkeypatch):
    memory = node.lifecycle.memory
    write_snapshot(memory.folder, step=9)
    memory.open()
    gone, scan = memory.delete_job(JOB), os.scandir

    def scandir(folder):
        if Path(folder).name == "job":
            delete(gone)
        return scan(folder)

    monkeypatch.setattr(os, "scandir", scandir)
    node.lifecycle.begin()
    assert memory.sealed(JOB) == ()
    assert not (memory.folder / "job").exists(), "it was not deleted meanwhile"


async def test_file_that_was_uploaded_while_room_is_made_is_passed_over(node, monkeypatch):
    node.seal(5, ranks=2)
    node.state.record = record_of()
    node.lifecycle.free_bytes = lambda: 0
    second = node.lifecycle._linked[JOB, Point(5, 1), 1]

    async def to_thread(act, *of, **how):
        if second.key in node.lifecycle._linked:
            node.lifecycle.uploaded(second, None)
        return act(*of, **how)

    monkeypatch.setattr(asyncio, "to_thread", to_thread)
    node.lifecycle.hear(JOB, 0, sealed_at=None, bytes_short=1)
    await node.idle()
    assert node.lifecycle._linked == {}


async def test_order_to_upload_gets_no_link_that_is_being_deleted(node, monkeypatch):
    node.seal(5, ranks=1)
    node.queued.clear()
    node.state.record = record_of()
    node.lifecycle.free_bytes = lambda: 1 - len(list(node.links.iterdir()))

    async def to_thread(act, *of, **how):
        node.lifecycle.upload_now(JOB, Point(5, 1))
        return act(*of, **how)

    monkeypatch.setattr(asyncio, "to_thread", to_thread)
    node.lifecycle.hear(JOB, 0, sealed_at=None, bytes_short=1)
    await node.idle()
    assert node.queued == [], "a link that is gone"
    assert list(node.links.iterdir()) == []
    node.lifecycle.upload_now(JOB, Point(5, 1))
    assert node.queued == [(5, 0)], "the order comes again"
    assert len(list(node.links.iterdir())) == 1
