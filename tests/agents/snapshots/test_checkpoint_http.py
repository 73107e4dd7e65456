"""Workers of another user read a committed checkpoint through their agent."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, closing

import pytest
from aiohttp import web

from agents.protocol.records import JobId
from agents.rpc.signing import ClusterKey, Verifier
from agents.snapshots.checkpoint_http import CheckpointRoutes, checkpoint_path
from agents.snapshots.readers import ReadAdmission
from tests.agents.grants import reader
from tests.agents.sealing import write_snapshot
from tests.worker.checkpoint.fetching import fetch_all
from tests.worker.checkpoint.one_object import commit_object
from worker.checkpoint.piece_sources import PeerSource, SourceError

JOB = JobId("job")
KEY = ClusterKey("test", (b"a-key-that-is-long-enough",))
OTHER = ClusterKey("test", (b"another-key-as-long",))


def committed(folder, pieces: dict[tuple[int, int], bytes] | None = None) -> str:
    """Write a checkpoint of one object; return its manifest's URI."""
    header = write_snapshot(folder, step=3, pieces=pieces)
    return commit_object(folder / "job" / "1-3" / header.file_name)


@asynccontextmanager
async def served():
    app = web.Application()
    here: list[str] = []
    CheckpointRoutes(ReadAdmission(Verifier(KEY, lambda: here[0]))).add_to(app.router)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    here.append(f"127.0.0.1:{runner.addresses[0][1]}")
    try:
        yield here[0]
    finally:
        await runner.cleanup()


def source(address: str, path: str, job: str = JOB) -> PeerSource:
    return PeerSource("durable storage", address, path, reader(KEY, job, "a"))


async def test_a_checkpoint_is_read_piece_by_piece(tmp_path):
    manifest = committed(tmp_path)
    async with served() as address:
        group = [source(address, checkpoint_path(KEY, JOB, manifest))]
        found = await asyncio.to_thread(fetch_all, [(0, 0), (1, 1)], [group], model="none")
    assert bytes(found.bodies[0, 0]) == b"weights and moments" * 100
    assert found.report.bytes_by_source == {"durable storage": 1900 + 5000}


async def test_a_piece_larger_than_a_request_is_read_in_several(tmp_path):
    big = bytes(range(256)) * (65 << 12)
    manifest = committed(tmp_path, {(0, 0): b"small", (1, 1): big})
    async with served() as address:
        group = [source(address, checkpoint_path(KEY, JOB, manifest))]
        found = await asyncio.to_thread(fetch_all, [(0, 0), (1, 1)], [group], model="none")
    assert bytes(found.bodies[0, 0]) == b"small"
    assert bytes(found.bodies[1, 1]) == big


async def test_no_other_file_is_read_for_a_worker(tmp_path):
    """Neither one that the worker names itself, nor one of another job."""
    manifest = committed(tmp_path)
    (tmp_path / "job" / "1-3" / "secret").write_text("secret")
    mine = checkpoint_path(KEY, JOB, manifest)
    forged = checkpoint_path(OTHER, JOB, manifest)
    foreign = checkpoint_path(KEY, JobId("other"), manifest)
    async with served() as address:
        for path in (forged, foreign, foreign.replace("/other/", "/job/")):
            await refused(source(address, path), "answers 401")
        for name in ("secret", "manifest-1.json", "..%2f..%2fsecret"):
            await refused(source(address, mine), "404", file=name)
        await refused(source(address, mine, job="other"), "401")


async def test_an_agent_that_cannot_read_the_storage_says_why(tmp_path):
    manifest = committed(tmp_path)
    path = checkpoint_path(KEY, JOB, manifest)
    async with served() as address:
        with closing(source(address, path)) as asked:
            assert await asyncio.to_thread(asked.files)
            (tmp_path / "job" / "1-3" / "0.snap").unlink()
            await refused(asked, r"0\.snap: answers 502: .*No such file", file="0.snap")
        with closing(source(address, checkpoint_path(KEY, JOB, "file:///gone/m"))) as asked:
            await refused(asked, r"answers 502: file:///gone/m: .*No such file")


async def refused(asked: PeerSource, how: str, *, file: str = "") -> None:
    with closing(asked), pytest.raises(SourceError, match=how):
        await asyncio.to_thread(asked.read, file, 0, 6) if file else await asyncio.to_thread(
            asked.files
        )
