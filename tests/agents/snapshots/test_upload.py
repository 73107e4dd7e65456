"""Uploads of snapshots to the durable store."""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from agents.protocol.codec import encode
from agents.protocol.records import (
    Durable,
    Holding,
    JobId,
    JobRecord,
    NodeId,
    Point,
    Saving,
    Uploaded,
)
from agents.snapshots import upload
from agents.snapshots.memory import SnapshotFile
from agents.snapshots.upload import Uploader, upload_pieces
from agents.store.interface import Put
from tests.agents.running import JOB, PREFIX, place
from tests.agents.sealing import write_snapshot
from tests.processes import until
from worker.checkpoint import snapshot_file

PIECES = {(0, 0): b"first" * 300, (0, 1): b"second" * 90, (1, 2): b"third"}


def snapshot_of(folder: Path, step: int = 5, **changes) -> SnapshotFile:
    header = write_snapshot(folder, step=step, **{"pieces": PIECES, "persist": True, **changes})
    return SnapshotFile(folder / "job" / f"1-{step}" / header.file_name, header)


def names(folder: Path) -> list[str]:
    found = [Path(at, name) for at, _, files in os.walk(folder) for name in files]
    return sorted(str(path.relative_to(folder)) for path in found)


# ---- one object ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_an_object_is_a_sealed_file_of_the_chosen_pieces(tmp_path, kind):
    snapshot = snapshot_of(tmp_path)
    copy = snapshot_file.partial_header(snapshot.header, [(0, 1), (1, 2)])
    uri = f"{kind}://{tmp_path}/far/job/1-5/0-a.snap"
    upload_pieces(uri, snapshot.path, copy)
    with fsspec.open(uri, "rb") as written:
        (tmp_path / "back.snap").write_bytes(written.read())
    back = snapshot_file.read_header(tmp_path / "back.snap")
    assert back == copy
    found = {
        piece.key: snapshot_file.read_piece(tmp_path / "back.snap", piece) for piece in back.pieces
    }
    assert found == {key: PIECES[key] for key in ((0, 1), (1, 2))}
    assert not fsspec.core.url_to_fs(uri)[0].transaction.files, "each upload is kept forever"


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_a_file_overwritten_during_the_upload_leaves_no_object(tmp_path, kind):
    snapshot = snapshot_of(tmp_path / "memory")
    with snapshot.path.open("r+b") as file:
        file.seek(snapshot.header.pieces[1].offset)
        file.write(b"later")
    uri = f"{kind}://{tmp_path}/far2/0.snap"
    with pytest.raises(snapshot_file.SnapshotError, match="piece 1 of layer 0"):
        upload_pieces(uri, snapshot.path, snapshot_file.partial_header(snapshot.header, PIECES))
    system, target = fsspec.core.url_to_fs(uri)
    assert not system.exists(target)
    assert names(tmp_path / "far2") == [] if kind == "file" else True


class Plain(MemoryFileSystem):
    """A store whose client cannot create an object exclusively."""

    protocol = "plainmemory"

    def _open(self, path, mode="rb", **options):
        if "x" in mode:
            raise ValueError(f"unsupported file mode: {mode}")
        return super()._open(path, mode, **options)


fsspec.register_implementation("plainmemory", Plain, clobber=True)


@pytest.mark.parametrize("kind", ["memory", "plainmemory"])
def test_a_repeated_upload_succeeds(tmp_path, kind):
    """As after a lost answer."""
    snapshot = snapshot_of(tmp_path)
    uri = f"{kind}://{tmp_path}/again/0.snap"
    for _ in range(2):
        upload_pieces(uri, snapshot.path, snapshot_file.partial_header(snapshot.header, PIECES))


def test_another_object_under_the_name_is_not_overwritten(tmp_path):
    first, second = snapshot_of(tmp_path), snapshot_of(tmp_path, 6)
    uri = f"memory://{tmp_path}/taken/0.snap"
    upload_pieces(uri, first.path, snapshot_file.partial_header(first.header, PIECES))
    system, target = fsspec.core.url_to_fs(uri)
    before = system.cat_file(target)
    with pytest.raises(OSError, match="another object has that name"):
        upload_pieces(uri, second.path, snapshot_file.partial_header(second.header, PIECES))
    assert system.cat_file(target) == before


def test_an_incomplete_object_is_deleted_and_the_retry_succeeds(tmp_path):
    snapshot = snapshot_of(tmp_path)
    copy = snapshot_file.partial_header(snapshot.header, PIECES)
    uri = f"memory://{tmp_path}/half/0.snap"
    upload_pieces(uri, snapshot.path, copy)
    system, target = fsspec.core.url_to_fs(uri)
    whole = system.cat_file(target)
    for size in (0, 10, len(whole) - 1):
        system.pipe_file(target, whole[:size])
        with pytest.raises(OSError, match="incomplete object had that name"):
            upload_pieces(uri, snapshot.path, copy)
        upload_pieces(uri, snapshot.path, copy)
        assert system.cat_file(target) == whole


# ---- the queue ----------------------------------------------------------------------------------


@dataclass
class Run:
    """An uploader, and what it reports."""

    uri: str | None
    votes: list[Uploaded] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)
    is_wanted: bool = True
    wanted: Callable[[SnapshotFile], bool] = lambda _: True
    is_leaving: bool = False
    ended: int = 0
    silent_s: float = 60.0
    uploader: Uploader | None = None
    looks_until_known: int = 0
    """How often the uploader finds that the job was not read yet."""

    async def is_paused(self) -> bool:
        return self.is_leaving

    def is_known(self, _: JobId) -> bool:
        self.looks_until_known -= 1
        return self.looks_until_known < 0

    def done(self, _: SnapshotFile, vote: Uploaded | None) -> None:
        self.ended += 1
        self.votes += [] if vote is None else [vote]

    async def until(self, holds, *snapshots: SnapshotFile) -> None:
        uploading = Uploader(
            node=lambda: NodeId("a.1.2"),
            uri=lambda _: self.uri if self.looks_until_known < 0 else None,
            is_wanted=lambda snapshot: (
                self.is_wanted and self.wanted(snapshot) and snapshot.path.exists()
            ),
            is_paused=self.is_paused,
            done=self.done,
            failed=lambda _, reason: self.troubles.append(reason),
            is_known=self.is_known,
            retry_s=0.02,
            silent_s=self.silent_s,
        )
        self.uploader = uploading
        for snapshot in snapshots:
            uploading.add(snapshot)
        task = asyncio.create_task(uploading.run())
        await until(holds)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        uploading.close()


async def test_an_upload_is_reported_with_its_uri_size_and_pieces(tmp_path):
    run = Run(f"file://{tmp_path}/far/")
    await run.until(lambda: run.votes, snapshot_of(tmp_path / "memory"))
    (vote,) = run.votes
    path = tmp_path / "far" / "job" / "1-5" / "0-a.1.2.snap"
    assert vote.uri == f"file://{path}"
    assert (vote.point, vote.holds) == (Point(5, 1), (Holding(0, 0, 2), Holding(1, 2, 3)))
    assert vote.bytes == path.stat().st_size
    assert vote.checksum == snapshot_file.head_checksum(snapshot_file.read_head(path))
    assert names(tmp_path / "far") == ["job/1-5/0-a.1.2.snap"]


async def test_a_failed_upload_is_reported_and_retried(tmp_path):
    (tmp_path / "far").write_text("a file where a folder should be")
    run = Run(f"file://{tmp_path}/far")
    snapshot = snapshot_of(tmp_path / "memory")

    def is_mended() -> bool:
        if len(run.troubles) >= 2 and (tmp_path / "far").is_file():
            (tmp_path / "far").unlink()
        return bool(run.votes)

    await run.until(is_mended, snapshot)
    assert run.troubles[0].startswith(f"file://{tmp_path}/far/job/1-5/0-a.1.2.snap: ")
    assert "Not a directory" in run.troubles[0] or "File exists" in run.troubles[0]
    tried = re.compile(r"; tried at \d\d:\d\d:\d\d \S+, again in (\S+) s\Z")
    pauses = [float(found[1]) for each in run.troubles[:2] if (found := tried.search(each))]
    assert pauses == [0.02, 0.04], "what is shown is what was found then, not now"
    assert len(run.votes) == 1


async def test_an_upload_to_a_store_that_hangs_is_reported_and_goes_on(tmp_path, monkeypatch):
    answers = threading.Event()

    def hang(_, __, content):
        for chunk in content.chunks():
            assert chunk
        answers.wait()

    monkeypatch.setattr(upload, "write_once", hang)
    run = Run(f"file://{tmp_path}/far", silent_s=0.02)

    def has_answered() -> bool:
        if run.troubles:
            answers.set()
        return bool(run.votes)

    try:
        await run.until(has_answered, snapshot_of(tmp_path / "memory"))
    finally:
        answers.set()
    assert run.troubles[0].endswith("0-a.1.2.snap: the storage has taken nothing for 0.02 s")


async def test_an_upload_that_hangs_blocks_no_later_generation(tmp_path, monkeypatch):
    """A connection may hang for good; what its snapshot was for is over by then."""
    answers, wrote = threading.Event(), upload.write_once

    def hang(system, target, content):
        if "1-7" not in target:
            answers.wait()
        wrote(system, target, content)

    monkeypatch.setattr(upload, "write_once", hang)
    run = Run(f"file://{tmp_path}/far", silent_s=0.02)
    old = [snapshot_of(tmp_path / str(number), step=5) for number in range(upload.THREADS)]
    run.wanted = lambda snapshot: snapshot.point.step == 7 or not run.troubles
    try:
        await run.until(lambda: run.votes, *old, snapshot_of(tmp_path / "memory", step=7))
    finally:
        answers.set()
    assert [vote.point.step for vote in run.votes] == [7]
    assert run.ended > 1, "one of those that hang was given up"


async def test_an_upload_that_hangs_is_given_up_at_once_when_its_file_is_deleted(
    tmp_path, monkeypatch
):
    """A worker needs the memory, and the next upload its turn."""
    answers, wrote = threading.Event(), upload.write_once

    def hang(system, target, content):
        if "1-7" not in target:
            answers.wait()
        wrote(system, target, content)

    monkeypatch.setattr(upload, "write_once", hang)
    run = Run(f"file://{tmp_path}/far")
    old = [snapshot_of(tmp_path / str(number), step=5) for number in range(upload.THREADS)]

    def has_voted() -> bool:
        for snapshot in filter(run.uploader.is_sending, old):
            snapshot.path.unlink()
            run.uploader.give_up(snapshot)
        return bool(run.votes)

    try:
        await run.until(has_voted, *old, snapshot_of(tmp_path / "memory", step=7))
    finally:
        answers.set()
    assert ([vote.point.step for vote in run.votes], run.troubles) == ([7], [])


@pytest.mark.parametrize("error", [OSError("no route"), snapshot_file.SnapshotError("changed")])
async def test_an_upload_of_a_past_generation_that_fails_is_no_trouble(
    tmp_path, monkeypatch, error
):
    """Nothing would end that trouble: it is not uploaded again."""
    answers, hangs = threading.Event(), threading.Event()

    def fail(_, __, ___):
        hangs.set()
        answers.wait()
        raise error

    monkeypatch.setattr(upload, "write_once", fail)
    run = Run(f"file://{tmp_path}/far")

    def has_ended() -> bool:
        if hangs.is_set():
            run.is_wanted = False
            answers.set()
        return run.ended > 0

    try:
        await run.until(has_ended, snapshot_of(tmp_path / "memory"))
    finally:
        answers.set()
    assert (run.troubles, run.votes) == ([], [])


async def test_an_agent_that_ends_waits_for_no_upload(tmp_path, monkeypatch):
    """Training waits for the next agent, and an upload may take hours, or hang."""
    taken, answers, given_up = threading.Event(), threading.Event(), threading.Event()

    def hang(_, __, content):
        try:
            for chunk in content.chunks():
                assert chunk
                taken.set()
                answers.wait()
        except OSError:
            given_up.set()
            raise

    monkeypatch.setattr(upload, "write_once", hang)
    run = Run(f"file://{tmp_path}/far")
    try:
        await run.until(taken.is_set, snapshot_of(tmp_path / "memory"))
        (thread,) = [each for each in threading.enumerate() if each.name.startswith("upload")]
        assert thread.daemon, "Python would wait for it"
    finally:
        answers.set()
    await asyncio.to_thread(thread.join)
    assert given_up.is_set(), "it went on after the agent's end"
    assert run.votes == []


async def test_an_unknown_store_is_reported_by_name(tmp_path):
    run = Run("nowhere://bucket")
    await run.until(lambda: run.troubles, snapshot_of(tmp_path / "memory"))
    assert "nowhere" in run.troubles[0]


async def test_an_unwanted_or_missing_snapshot_is_not_uploaded(tmp_path):
    run = Run(f"file://{tmp_path}/far")
    gone, last = snapshot_of(tmp_path / "memory", 5), snapshot_of(tmp_path / "memory", 7)
    gone.path.unlink()
    await run.until(lambda: run.votes, gone, last)
    assert [vote.point.step for vote in run.votes] == [7]
    assert not run.troubles
    run.is_wanted = False
    again = snapshot_of(tmp_path / "memory", 8)
    nothing = snapshot_of(tmp_path / "memory", 9, written=False)
    await run.until(lambda: run.ended == 4, again, nothing)
    assert [vote.point.step for vote in run.votes] == [7]


async def test_a_leaving_node_starts_no_upload_until_the_notice_is_withdrawn(tmp_path):
    run = Run(f"file://{tmp_path}/far", is_leaving=True)
    looks = 0

    def is_there() -> bool:
        nonlocal looks
        looks += 1
        assert not (run.is_leaving and run.votes)
        if looks == 10:
            assert not (tmp_path / "far").exists()
            run.is_leaving = False
        return bool(run.votes)

    await run.until(is_there, snapshot_of(tmp_path / "memory"))


async def test_an_upload_waits_until_the_agent_has_read_where_the_job_has_its_checkpoints(tmp_path):
    """An agent that has just started takes uploads over before it has read the store."""
    run = Run(f"file://{tmp_path}/far", looks_until_known=3)
    await run.until(lambda: run.ended, snapshot_of(tmp_path / "memory"))
    assert [vote.point.step for vote in run.votes] == [5]


# ---- with real agents ---------------------------------------------------------------------------


@pytest.mark.slow
async def test_uploads_survive_a_restart_and_are_forgotten_after_a_newer_commit(tmp_path):
    async with place(tmp_path) as here:
        saving = Saving(uri=f"file://{tmp_path}/far")
        job = JobRecord(JOB, "running", layers=5, atoms=3, saving=saving)
        await here.store.transact([], [Put(f"{PREFIX}job/{JOB}/state", encode(job))])
        agent = here.start()
        node = await here.ready()
        await here.open(node, 1, memory_every=10, persist_every=20)

        async def votes(least: int) -> list[Uploaded]:
            report = await here.report()
            found = [] if report is None else list(report.uploaded)
            return found if len({vote.point for vote in found}) >= least else []

        found = await until(lambda: votes(2))
        assert {vote.point.step % 20 for vote in found} == {0}
        for vote in found:
            assert Path(vote.uri.removeprefix("file://")).stat().st_size == vote.bytes
        assert all(len(vote.holds) == 5 for vote in found), "the first rank writes everything"
        agent.kill()
        agent.wait()
        here.start()
        await until(lambda: votes(2))
        report = await here.report()
        assert report is not None
        assert set(found) <= set(report.uploaded)
        durable = Durable(Point(40, 1), "file:///m", "0")
        await here.store.transact([], [Put(f"{PREFIX}job/{JOB}/durable", encode(durable))])

        async def only_newer() -> bool:
            report = await here.report()
            return report is not None and all(v.point.step >= 40 for v in report.uploaded)

        await until(only_newer)
        # The job ends, and its memory is freed.
        await here.open(node, 1, state="closed")
        ended = JobRecord(JobId(JOB), "done", layers=5, atoms=3, saving=saving)
        await here.store.transact([], [Put(f"{PREFIX}job/{JOB}/state", encode(ended))])
        await until(lambda: names(here.memory()) == [])
        assert names(tmp_path / "far"), "an agent deletes nothing from the durable store"
