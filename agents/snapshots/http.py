"""Snapshots over HTTP: workers of other nodes read them, other agents write replicas.

A worker proves that its own agent granted it to read the job. An agent signs its request; the
signature covers the path, which names the checksum of the file's header, and the header holds
the checksums of all pieces.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from agents.daemon.failpoints import failpoint
from agents.protocol.names import JOB_ID
from agents.protocol.records import JobId, Point
from agents.rpc.server import answer_signed, refuse_stranger
from agents.rpc.signing import Verifier
from agents.snapshots.memory import (
    FILE_NAME,
    SnapshotFile,
    SnapshotMemory,
    delete,
)
from agents.snapshots.readers import ReadAdmission
from worker.checkpoint import snapshot_file
from worker.plain_file import open_plain

POINT = re.compile(r"([0-9]{1,12})-([0-9]{1,12})\Z", re.ASCII)
CHUNK_BYTES = 1 << 20
SILENT_S = 60.0
"""A sender that sends nothing for so long is given up."""
DONE = "the replica is here\n"


class _OpenFileResponse(web.FileResponse):
    """Answers ranges of an open file with sendfile; its name may lead to another file by now.

    aiohttp calls ``prepare``, once. A handler that did so itself would have it called again, after
    the file was closed, and the connection would break after the answer.
    """

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(f"/proc/self/fd/{file.fileno()}", chunk_size=CHUNK_BYTES)
        self._file = file

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Send the file, and close it."""
        with self._file:
            return await super().prepare(request)


@dataclass(eq=False)
class SnapshotRoutes:
    """The routes below ``/v1/memory/``."""

    memory: SnapshotMemory
    verifier: Verifier
    readers: ReadAdmission
    _coming: set[Path] = field(default_factory=set)
    _listed: tuple[tuple[SnapshotFile, ...], bytes] = ((), snapshot_file.listing({}))
    """The files that were listed last, and their list."""
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    """Makes the temporary file names of replicas that arrive at the same time differ."""

    def checks(self, request: web.Request) -> bool:
        """Return whether these routes check the sender of the request themselves."""
        return request.path.startswith("/v1/memory/")

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Add the routes."""
        router.add_get("/v1/memory/{job}/{point}", self._list)
        router.add_get("/v1/memory/{job}/{point}/{file}", self._read)
        router.add_put("/v1/memory/{job}/{point}/{file}", self._write)

    # ---- for workers of other nodes -------------------------------------------------------------

    async def _list(self, request: web.Request) -> web.StreamResponse:
        found = self.memory.snapshots(*await self._admit(request))
        if self._listed[0] != found:
            # Made once for all ranks that ask as a generation begins.
            listing = snapshot_file.listing({each.path.name: each.header for each in found})
            self._listed = found, listing
        return web.Response(body=self._listed[1], content_type="application/json")

    async def _read(self, request: web.Request) -> web.StreamResponse:
        job, point = await self._admit(request)
        name = request.match_info["file"]
        if all(each.path.name != name for each in self.memory.snapshots(job, point)):
            raise web.HTTPNotFound(text="no such snapshot on this node\n")
        failpoint("serving", point.generation)
        try:
            file = open_plain(self.memory.path(job, point, name))
        except OSError:
            raise web.HTTPNotFound(text="no such snapshot on this node any more\n") from None
        return _OpenFileResponse(file)

    async def _admit(self, request: web.Request) -> tuple[JobId, Point]:
        job, point = _named(request)
        await self.readers.admit(request, job)
        return job, point

    # ---- for other agents -----------------------------------------------------------------------

    async def _write(self, request: web.Request) -> web.StreamResponse:
        """Receive a replica; the body is not signed, but the path names its checksum."""
        if why := refuse_stranger(request, "agent"):
            raise web.HTTPForbidden(text=f"{why}\n")
        return await answer_signed(request, self.verifier, self._take, read_body=_no_body)

    async def _take(self, request: web.Request) -> web.StreamResponse:
        status, text = await self._store(request)
        return web.Response(status=status, text=text)

    async def _store(self, request: web.Request) -> tuple[int, str]:
        job, point = _named(request)
        name, size = request.match_info["file"], request.content_length
        if not FILE_NAME.match(name) or size is None:
            return 400, "the file must be named RANK.snap and have a Content-Length\n"
        path = self.memory.path(job, point, name)
        checksum = request.query.get("header", "")
        if checksum in self.memory.head_checksums(job, point):
            return 200, DONE
        if path in self._coming or path.exists():
            return 409, "another replica under that name is here, or being received\n"
        self._coming.add(path)
        try:
            return await self._receive(request, path, size, checksum)
        finally:
            self._coming.discard(path)

    async def _receive(
        self, request: web.Request, path: Path, size: int, checksum: str
    ) -> tuple[int, str]:
        generation, rank = path.parent.name.partition("-")[0], path.stem
        name = snapshot_file.part_name(int(generation), int(rank), os.getpid(), next(self._numbers))
        temporary = path.parent.parent / name
        snapshot_file.make_folder(temporary.parent)
        try:
            loop = asyncio.get_running_loop()
            # It takes half a second per GB.
            created = await asyncio.to_thread(snapshot_file.create, temporary, size)
            with os.fdopen(created, "w+b") as file:
                async with asyncio.timeout(SILENT_S) as limit:
                    async for chunk in request.content.iter_chunked(CHUNK_BYTES):
                        limit.reschedule(loop.time() + SILENT_S)
                        if file.tell() + len(chunk) > size:
                            return 400, "the body is longer than its Content-Length\n"
                        file.write(chunk)
                        failpoint("receiving", int(generation))
            defect = await asyncio.to_thread(_defect, temporary, checksum)
            if defect:
                return 422, f"{defect}\n"
            snapshot_file.make_folder(path.parent)
            temporary.rename(path)
            snapshot = self.memory.look(path)
            if snapshot is None:
                path.unlink(missing_ok=True)
                return 422, "the replica is not of the job and the point in its path\n"
            await asyncio.to_thread(delete, self.memory.release_replicas(snapshot))
        except snapshot_file.NoRoomError as error:
            return 507, f"{error.strerror}\n"
        except TimeoutError:
            return 408, f"the sender sent nothing for {SILENT_S:g} s\n"
        except OSError as error:
            return 500, f"the replica cannot be written: {error.strerror}\n"
        else:
            return 200, DONE
        finally:
            temporary.unlink(missing_ok=True)


async def _no_body(_: web.Request) -> bytes:
    return b""


def _named(request: web.Request) -> tuple[JobId, Point]:
    job, named = request.match_info["job"], POINT.match(request.match_info["point"])
    if named is None or not JOB_ID.match(job):
        raise web.HTTPNotFound(text="no such snapshot on this node\n")
    return JobId(job), Point(step=int(named[2]), generation=int(named[1]))


def _defect(path: Path, checksum: str) -> str:
    """Check a received replica; return what is wrong with it, or an empty text."""
    try:
        header = snapshot_file.read_header(path)
        if snapshot_file.head_checksum(snapshot_file.read_head(path)) != checksum:
            return "its header does not have the announced checksum"
        with open_plain(path) as file:
            read = partial(os.pread, file.fileno())
            for piece in header.pieces:
                for _ in snapshot_file.piece_chunks(read, piece, name=str(path)):
                    pass  # In chunks: a piece may be larger than the free memory.
    except (OSError, snapshot_file.SnapshotError) as error:
        return str(error)
    return ""
