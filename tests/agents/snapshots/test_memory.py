"""Snapshots in memory: found, served over HTTP and deleted."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import threading
import time
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from agents.protocol.records import GenerationRecord, Holding, JobId, Point, Restore, Sealed
from agents.rpc.signing import REQUEST_HEADER, TICKET_S, ClusterKey, Verifier, sign_request
from agents.snapshots.http import SnapshotRoutes
from agents.snapshots.memory import SnapshotMemory, delete, head_checksum
from agents.snapshots.partial_file import read_pieces
from agents.snapshots.readers import ReadAdmission
from tests.agents.grants import reader
from tests.agents.sealing import head_of, write_snapshot
from worker.checkpoint import snapshot_file
from worker.checkpoint.reader import Reader

JOB = JobId("job")
KEY = ClusterKey("test", (b"a-key-that-is-long-enough",))
OTHER = ClusterKey("test", (b"another-key-as-long",))
RECEIVER = "here:1"


def points(memory: SnapshotMemory, job: JobId = JOB) -> list[tuple[int, int]]:
    return [(sealed.point.generation, sealed.point.step) for sealed in memory.sealed(job)]


# ---- files --------------------------------------------------------------------------------------


def test_a_starting_agent_finds_only_sealed_files(tmp_path):
    header = write_snapshot(tmp_path, step=10)
    write_snapshot(tmp_path, step=10, rank=1, pieces={(0, 1): b"more", (0, 2): b"of it"})
    write_snapshot(tmp_path, step=7, job="other")
    folder = tmp_path / "job" / "1-20"
    folder.mkdir()
    (folder / "0.snap").write_bytes(bytes(9000))  # Not sealed.
    moved = tmp_path / "job" / "1-30"
    moved.mkdir()
    (tmp_path / "job" / "1-10" / header.file_name).read_bytes()
    (moved / "0.snap").write_bytes((tmp_path / "job" / "1-10" / "0.snap").read_bytes())
    damaged = write_snapshot(tmp_path, step=40).file_name
    with (tmp_path / "job" / "1-40" / damaged).open("r+b") as file:
        file.seek(60)
        file.write(b"!")
    damaged = write_snapshot(tmp_path, step=50).file_name
    with (tmp_path / "job" / "1-50" / damaged).open("r+b") as file:
        file.seek(8 + 5)
        file.write(b"\x01")  # Its header would have 2^40 bytes.
    for number, text in enumerate([b"no JSON", b'{"pieces": [], "progress": {}, "job": []}']):
        folder = tmp_path / "job" / f"1-6{number}"
        folder.mkdir()
        (folder / "0.snap").write_bytes(head_of(text))
        (tmp_path / ".held").mkdir(exist_ok=True)
        (tmp_path / ".held" / f"job.1.6{number}.0").write_bytes(head_of(text))
    changed: list[JobId] = []
    memory = SnapshotMemory(tmp_path, changed.append)
    memory.open()
    assert list(memory.linked()) == []
    assert memory.sealed(JOB) == (Sealed(Point(10, 1), (Holding(0, 0, 3), Holding(1, 1, 2))),)
    assert memory.jobs() == {"job", "other"}
    assert set(changed) == {"job", "other"}


def test_unfinished_files_of_dead_processes_are_deleted(tmp_path):
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    (tmp_path / "job").mkdir()
    dead = tmp_path / "job" / snapshot_file.part_name(1, 0, pid, 1)
    alive = tmp_path / "job" / snapshot_file.part_name(1, 1, os.getppid(), 1)
    own = tmp_path / "job" / snapshot_file.part_name(1, 2, os.getpid(), 1)
    for path in (dead, alive, own):
        path.write_bytes(b"half a snapshot")
    memory = SnapshotMemory(tmp_path)
    memory.open()
    assert not dead.exists()
    assert alive.exists()
    assert not own.exists(), "an agent of before had the same process id"
    own.write_bytes(b"half a snapshot")
    memory.delete_unfinished()
    assert own.exists()


def test_a_folder_with_the_name_of_an_unfinished_file_does_not_keep_an_agent_from_starting(
    tmp_path,
):
    folder = tmp_path / "job" / snapshot_file.part_name(1, 0, 2**22 + 1, 1)
    folder.mkdir(parents=True)
    SnapshotMemory(tmp_path).open()


def test_unfinished_files_of_a_process_that_is_not_reaped_yet_are_deleted(tmp_path):
    """On a busy machine the fork server reaps late, and nothing looks at the files again."""
    memory = SnapshotMemory(tmp_path)
    memory.open()
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        (tmp_path / "job").mkdir()
        path = tmp_path / "job" / snapshot_file.part_name(1, 0, pid, 1)
        path.write_bytes(b"half a snapshot")
        memory.delete_unfinished()
        assert not path.exists()
    finally:
        os.waitpid(pid, 0)


def test_what_a_worker_sealed_just_before_it_was_killed_is_found(tmp_path):
    memory = SnapshotMemory(tmp_path)
    memory.open()
    write_snapshot(tmp_path, step=1)
    memory.worker_ended()
    assert [each.point for each in memory.sealed(JOB)] == [Point(1, 1)]


def test_files_that_are_being_deleted_are_not_found_again(tmp_path):
    write_snapshot(tmp_path, step=1)
    memory = SnapshotMemory(tmp_path)
    memory.open()
    gone = memory.release(JOB, Point(2, 1), running=0)
    memory.worker_ended()
    delete(gone)
    assert points(memory) == [], "the leader would count on it"


def test_a_file_that_a_worker_reused_counts_once(tmp_path):
    memory = SnapshotMemory(tmp_path)
    write_snapshot(tmp_path, step=1)
    memory.open()
    (tmp_path / "job" / "1-1" / "0.snap").unlink()
    write_snapshot(tmp_path, step=2)
    assert memory.look(tmp_path / "job" / "1-2" / "0.snap") is not None
    assert points(memory) == [(1, 2)]


# ---- deletion -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("safe", "running", "left"),
    [
        # Steps of the older generation beyond its end are void too.
        (Point(11, 2), 2, [(2, 11), (2, 12)]),
        # The last two points of the running generation are kept.
        (Point(13, 2), 2, [(2, 11), (2, 12)]),
        (Point(13, 2), 0, []),
        (Point(10, 1), 2, [(1, 10), (2, 11), (1, 12), (2, 12)]),
        (Point(9, 1), 2, [(1, 9), (1, 10), (2, 11), (1, 12), (2, 12)]),
    ],
)
def test_release_deletes_the_points_that_a_safe_point_supersedes(tmp_path, safe, running, left):
    for generation, step in ((1, 9), (1, 10), (1, 12), (2, 11), (2, 12)):
        write_snapshot(tmp_path, generation=generation, step=step)
    write_snapshot(tmp_path, job="other", step=1)
    memory = SnapshotMemory(tmp_path)
    memory.open()
    delete(memory.release(JOB, safe, running))
    assert points(memory) == left
    again = SnapshotMemory(tmp_path)
    again.open()
    assert points(again) == left
    assert points(again, JobId("other")) == [(1, 1)]


@pytest.mark.parametrize(
    ("fallback", "kept"),
    [
        (Point(6, 1), [(1, 6), (2, 9)]),
        (Point(9, 2), [(2, 9)]),
        (None, [(1, 4), (1, 6), (1, 8), (1, 9), (2, 9), (2, 10)]),
    ],
    ids=["an older point", "the restore point itself", "an older leader does not say"],
)
def test_only_what_the_record_names_stays_of_past_generations_when_room_is_short(
    tmp_path, fallback, kept
):
    made = [(1, 4), (1, 6), (1, 8), (1, 9), (2, 9), (2, 10)]
    for generation, step in (*made, (3, 10), (4, 11)):
        write_snapshot(tmp_path, generation=generation, step=step)
    write_snapshot(tmp_path, generation=1, step=4, job="other")
    memory = SnapshotMemory(tmp_path)
    memory.open()
    restore = Restore(Point(9, 2), "memory")
    record = GenerationRecord(JOB, 3, "open", "", (), restore, 1, "", fallback=fallback)
    delete(memory.release_spare(record))
    again = SnapshotMemory(tmp_path)
    again.open()
    assert sorted(points(again)) == [*kept, (3, 10), (4, 11)]
    assert points(again, JobId("other")) == [(1, 4)]


def test_later_replicas_of_a_rank_supersede_earlier_ones_without_a_leader(tmp_path):
    for step in range(1, 8):
        write_snapshot(tmp_path, step=step, rank=3)
    write_snapshot(tmp_path, step=1, rank=4)
    write_snapshot(tmp_path, step=1, rank=3, generation=2)
    memory = SnapshotMemory(tmp_path)
    memory.open()
    (last,) = memory.snapshots("job", Point(7, 1))
    gone = memory.release_replicas(last)
    assert gone == [memory.path("job", Point(step, 1), "3.snap") for step in (1, 2, 3)]
    left = [(each.point, each.header.rank) for each in memory.all()]
    assert left == [
        *((Point(1, generation), rank) for generation, rank in ((1, 4), (2, 3))),
        *((Point(step, 1), 3) for step in (4, 5, 6, 7)),
    ]


def test_an_ended_job_leaves_no_files(tmp_path):
    write_snapshot(tmp_path, step=1)
    write_snapshot(tmp_path, step=2, rank=5)
    memory = SnapshotMemory(tmp_path)
    memory.open()
    delete(memory.delete_job(JOB))
    assert [path for path in tmp_path.rglob("*") if path.name != ".held"] == []


def test_a_link_keeps_the_content_when_the_file_is_deleted_or_reused(tmp_path):
    write_snapshot(tmp_path, step=1)
    memory = SnapshotMemory(tmp_path)
    memory.open()
    (snapshot,) = memory.all()
    held = memory.link(snapshot)
    assert held is not None
    assert memory.link(snapshot) == held, "once more changes nothing"
    delete(memory.delete_job(JOB))
    assert memory.link(snapshot) is None, "what is gone cannot be held"
    again = SnapshotMemory(tmp_path)
    again.open()
    assert points(again) == []
    assert list(again.linked()) == [held]
    assert snapshot_file.read_piece(held.path, held.header.pieces[0])


# ---- over HTTP ----------------------------------------------------------------------------------


class Served:
    """A memory behind its HTTP routes."""

    def __init__(self, memory: SnapshotMemory, session: aiohttp.ClientSession, port: int) -> None:
        self.memory, self.session, self.port = memory, session, port
        self.base = f"http://127.0.0.1:{port}"

    async def get(self, path: str, *, by: Reader | None = None, span: str = ""):
        by = by or reader(KEY, "job")
        headers = by.headers(RECEIVER, path, span, at=time.time())
        if span:
            headers["Range"] = span
        url = URL(f"{self.base}{path}", encoded=True)
        async with self.session.get(url, headers=headers) as reply:
            return reply.status, await reply.read()

    async def put(self, path: str, data: bytes, *, key: ClusterKey = KEY):
        header, _ = sign_request(key, RECEIVER, "PUT", path, b"", at=time.time())
        headers = {REQUEST_HEADER: header}
        async with self.session.put(f"{self.base}{path}", data=data, headers=headers) as reply:
            return reply.status, (await reply.read()).decode()

    async def begin_put(self, size: int, body: str, *, until: bytes):
        """Announce so many bytes and send some; return the answer, and the connection."""
        path = "/v1/memory/job/1-3/7.snap?header=0"
        header, _ = sign_request(KEY, RECEIVER, "PUT", path, b"", at=time.time())
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(
            f"PUT {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n"
            f"{REQUEST_HEADER}: {header}\r\n\r\n{body}".encode()
        )
        return (await reader.readuntil(until)).decode(), writer


@pytest.fixture
async def served(tmp_path):
    memory = SnapshotMemory(tmp_path / "memory")
    memory.open()
    app = web.Application()
    verifier = Verifier(KEY, lambda: RECEIVER)
    SnapshotRoutes(memory, verifier, ReadAdmission(verifier)).add_to(app.router)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with aiohttp.ClientSession() as session:
        yield Served(memory, session, runner.addresses[0][1])
    await runner.cleanup()


async def test_workers_of_the_job_can_list_and_read_ranges(served):
    header = write_snapshot(served.memory.folder, step=3)
    served.memory.open()
    status, listed = await served.get("/v1/memory/job/1-3")
    assert status == 200
    (entry,) = json.loads(listed)
    assert snapshot_file.header_from(entry["header"], name="x") == header
    piece = header.pieces[0]
    span = f"bytes={piece.offset}-{piece.offset + piece.bytes - 1}"
    status, data = await served.get(f"/v1/memory/job/1-3/{entry['file']}", span=span)
    assert status == 206
    snapshot_file.check_piece(data, piece, name="x")
    assert await served.get("/v1/memory/job/1-4") == (200, b"[]")


async def test_several_ranges_are_read_over_one_connection(served):
    header = write_snapshot(served.memory.folder, step=3)
    served.memory.open()
    by, path = reader(KEY, "job"), "/v1/memory/job/1-3/0.snap"

    def read() -> None:
        line = http.client.HTTPConnection("127.0.0.1", served.port, timeout=10.0)
        for piece in 2 * header.pieces:
            span = f"bytes={piece.offset}-{piece.offset + piece.bytes - 1}"
            shown = by.headers(RECEIVER, path, span, at=time.time())
            line.request("GET", path, headers={**shown, "Range": span})
            answer = line.getresponse()
            assert answer.status == 206
            snapshot_file.check_piece(answer.read(), piece, name="x")
        line.close()

    await asyncio.to_thread(read)


async def test_reads_need_the_jobs_grant_and_reach_only_its_snapshots(served):
    write_snapshot(served.memory.folder, step=3)
    write_snapshot(served.memory.folder, step=3, job="other")
    served.memory.open()
    path = "/v1/memory/job/1-3/0.snap"
    now = time.time()
    none = [Reader(""), Reader("0" * 64), Reader(reader(KEY, "job").ticket)]
    foreign = [reader(KEY, "other"), reader(OTHER, "job")]
    for by in (*none, *foreign, reader(KEY, "job", at=now - 2 * TICKET_S)):
        assert (await served.get(path, by=by))[0] == 401
        assert (await served.get("/v1/memory/job/1-3", by=by))[0] == 401
    (served.memory.folder / "job" / "1-3" / "secret").write_bytes(b"x")
    for wrong in ("secret", "..", "1.snap", "%2e%2e%2fsecret", ".0.snap"):
        assert (await served.get(f"/v1/memory/job/1-3/{wrong}"))[0] in (400, 404)


async def test_a_point_is_listed_once_for_all_ranks_until_it_changes(served, monkeypatch):
    """Hundreds of ranks ask at once as a generation begins."""
    lists, listing = [], snapshot_file.listing

    def counted(found):
        lists.append(sorted(found))
        return listing(found)

    monkeypatch.setattr(snapshot_file, "listing", counted)
    for rank in (0, 1):
        write_snapshot(served.memory.folder, step=3, rank=rank)
        served.memory.open()
        for _ in range(3):
            status, body = await served.get("/v1/memory/job/1-3")
            names = [each["file"] for each in json.loads(body)]
            assert (status, names) == (200, [f"{each}.snap" for each in range(rank + 1)])
    assert (await served.get("/v1/memory/job/1-4"))[1] == b"[]"
    assert lists == [["0.snap"], ["0.snap", "1.snap"], []]


@pytest.mark.parametrize("kind", ["link", "pipe"])
async def test_a_snapshot_that_a_worker_replaced_by_something_else_is_not_served(
    served, tmp_path, kind
):
    """A link would lead to the agent's key, and a pipe would block the agent."""
    (tmp_path / "key").write_bytes(b"the cluster's key")
    write_snapshot(served.memory.folder, step=3)
    served.memory.open()
    path = served.memory.folder / "job" / "1-3" / "0.snap"
    path.unlink()
    if kind == "link":
        path.symlink_to(tmp_path / "key")
    else:
        os.mkfifo(path)
    status, body = await served.get("/v1/memory/job/1-3/0.snap")
    assert (status, b"key" in body) == (404, False)
    served.memory.open()
    with pytest.raises(OSError, match=r"symbolic|regular"):
        snapshot_file.read_header(path)
    assert (await served.get("/v1/memory/job/1-3"))[0] == 200


async def test_a_replica_is_stored_if_it_is_complete_and_signed(served, tmp_path):
    write_snapshot(tmp_path / "away", step=3, rank=7)
    path = tmp_path / "away" / "job" / "1-3" / "7.snap"
    copy = snapshot_file.partial_header(snapshot_file.read_header(path), [(1, 1)])
    data, name = b"".join(read_pieces(path, copy)), f"header={head_checksum(copy)}"
    target = "/v1/memory/job/1-3/7.snap"
    assert (await served.put(f"{target}?{name}", data, key=OTHER))[0] == 401
    assert (await served.put(f"{target}?header=0", data))[0] == 422
    flipped = data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]
    status, said = await served.put(f"{target}?{name}", flipped)
    assert status == 422
    assert "piece 1 of layer 1 is damaged" in said
    for elsewhere in ("job/1-4/7.snap", "job/1-3/8.snap", "other/1-3/7.snap"):
        status, said = await served.put(f"/v1/memory/{elsewhere}?{name}", data)
        assert status == 422
        assert "not of the job and the point" in said
    assert (await served.put(f"/v1/memory/job/1-3/7.txt?{name}", data))[0] == 400
    assert points(served.memory) == []
    assert (await served.put(f"{target}?{name}", data))[0] == 200
    assert served.memory.sealed(JOB) == (Sealed(Point(3, 1), (Holding(1, 1, 2),)),)
    assert (await served.put(f"{target}?{name}", data))[0] == 200, "once more does no harm"
    other = snapshot_file.partial_header(snapshot_file.read_header(path), [(0, 0)])
    data = b"".join(read_pieces(path, other))
    assert (await served.put(f"{target}?header={head_checksum(other)}", data))[0] == 409
    left = sorted(p.name for p in served.memory.folder.rglob("*") if p.is_file())
    assert left == ["7.snap"], "what was refused is not left behind"


async def test_the_room_of_a_replica_is_allocated_beside_the_event_loop(served, monkeypatch):
    """Allocating takes half a second per GB, in which the agent would be silent."""
    threads: list[threading.Thread] = []

    def create(path: Path, size: int, create=snapshot_file.create) -> int:
        threads.append(threading.current_thread())
        return create(path, size)

    monkeypatch.setattr(snapshot_file, "create", create)
    assert (await served.put("/v1/memory/job/1-3/7.snap?header=0", b"x"))[0] == 422
    assert threads
    assert threading.main_thread() not in threads


async def test_the_room_of_a_replica_is_freed_when_its_sender_stops(served, monkeypatch):
    monkeypatch.setattr("agents.snapshots.http.SILENT_S", 0.2)
    said, writer = await served.begin_put(5000, "the first bytes", until=b"for 0.2 s\n")
    assert said.startswith("HTTP/1.1 408 ")
    assert list(served.memory.folder.rglob("*.part")) == []
    writer.close()


async def test_replicas_of_a_rank_that_arrive_at_once_have_files_of_their_own(served):
    """Also if one has ended meanwhile: who removed its own file would remove another's."""

    async def begin(step: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        path = f"/v1/memory/job/1-{step}/7.snap?header=0"
        header, _ = sign_request(KEY, RECEIVER, "PUT", path, b"", at=time.time())
        before = len(list(served.memory.folder.rglob("*.part")))
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(
            f"PUT {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n"
            f"{REQUEST_HEADER}: {header}\r\n\r\nfirst".encode()
        )
        while len(list(served.memory.folder.rglob("*.part"))) == before:
            await asyncio.sleep(0.01)
        return reader, writer

    async def end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"x" * 45)
        assert b" 422 " in await reader.readline()
        writer.close()

    first, second = await begin(3), await begin(4)
    await end(*first)
    third = await begin(5)
    await end(*second)
    assert len(list(served.memory.folder.rglob("*.part"))) == 1
    await end(*third)
    assert list(served.memory.folder.rglob("*.part")) == []


async def test_a_replica_is_checked_in_parts(served, tmp_path, monkeypatch):
    """Linux reads less than 2 GiB at once."""
    header = write_snapshot(tmp_path / "away", step=3)
    path, read = tmp_path / "away" / "job" / "1-3" / "0.snap", os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, at: read(file, min(size, 1000), at))
    copy = snapshot_file.partial_header(header, [piece.key for piece in header.pieces])
    data = b"".join(read_pieces(path, copy))
    target = f"/v1/memory/job/1-3/0.snap?header={head_checksum(copy)}"
    assert (await served.put(target, data))[0] == 200


async def test_a_replica_without_room_is_refused_with_the_sizes(served):
    said, writer = await served.begin_put(1 << 60, "", until=b"are free\n")
    assert said.startswith("HTTP/1.1 507 ")
    assert f"{(1 << 60) / 2**20:,.1f} MiB are needed" in said
    writer.close()


def test_a_file_overwritten_while_it_is_read_gives_no_replica(tmp_path):
    header = write_snapshot(tmp_path, step=1)
    path = tmp_path / "job" / "1-1" / "0.snap"
    with path.open("r+b") as file:
        file.seek(header.pieces[1].offset + 10)
        file.write(b"new")
    with pytest.raises(snapshot_file.SnapshotError, match="piece 1 of layer 1"):
        list(read_pieces(path, snapshot_file.partial_header(header, [(1, 1)])))
    assert b"".join(read_pieces(path, snapshot_file.partial_header(header, [(0, 0)])))
