"""Snapshots over HTTP: other nodes' workers read them, other agents bring copies for safety.

A worker shows the ticket that its own agent gave it for the job; an agent signs, as always. What
an agent brings is bound by the signature too: the path names the checksum of the file's header,
which holds the checksums of all that follows.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

from agents.daemon.failpoints import reached
from agents.protocol.records import JobId, Point
from agents.rpc.signing import (
    REPLY_HEADER,
    REQUEST_HEADER,
    TICKET_HEADER,
    SignatureError,
    Verifier,
    is_ticket,
    sign_reply,
)
from agents.snapshots.memory import FILE_NAME, JOB, Memory, delete, head_checksum
from worker.checkpoint import snapshot_file

POINT = re.compile(r"([0-9]{1,12})-([0-9]{1,12})\Z", re.ASCII)
CHUNK_BYTES = 1 << 20


@dataclass(eq=False)
class MemoryDoor:
    """The routes below ``/v1/memory/``."""

    memory: Memory
    verifier: Verifier
    _coming: set[Path] = field(default_factory=set)

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Let these be found before what catches all."""
        router.add_get("/v1/memory/{job}/{point}", self._list)
        router.add_get("/v1/memory/{job}/{point}/{file}", self._read)
        router.add_put("/v1/memory/{job}/{point}/{file}", self._write)

    # ---- for workers ----------------------------------------------------------------------------

    async def _list(self, request: web.Request) -> web.StreamResponse:
        job, point = self._admit(request)
        found = self.memory.snapshots(job, point)
        listing = snapshot_file.listing(
            snapshot_file.SealedFile(each.path, each.header) for each in found
        )
        return web.Response(body=listing, content_type="application/json")

    async def _read(self, request: web.Request) -> web.StreamResponse:
        job, point = self._admit(request)
        name = request.match_info["file"]
        if all(each.path.name != name for each in self.memory.snapshots(job, point)):
            raise web.HTTPNotFound(text="there is no such snapshot here\n")
        reached("serving", point.generation)
        # Ranges are answered, and the kernel sends from the file itself.
        return web.FileResponse(self.memory.path(job, point, name), chunk_size=CHUNK_BYTES)

    def _admit(self, request: web.Request) -> tuple[JobId, Point]:
        job, point = _named(request)
        if not is_ticket(self.verifier.key, job, request.headers.get(TICKET_HEADER)):
            raise web.HTTPUnauthorized(text="the ticket is not one for this job\n")
        return job, point

    # ---- from agents ----------------------------------------------------------------------------

    async def _write(self, request: web.Request) -> web.StreamResponse:
        header = request.headers.get(REQUEST_HEADER)
        try:
            nonce = self.verifier.check_request(
                "PUT", request.raw_path, b"", header, at=time.time()
            )
        except SignatureError as error:
            return web.Response(status=401, text=f"{error}\n")
        status, text = await self._take(request)
        answer = text.encode()
        signature = sign_reply(self.verifier.key, nonce, status, answer)
        return web.Response(status=status, body=answer, headers={REPLY_HEADER: signature})

    async def _take(self, request: web.Request) -> tuple[int, str]:
        job, point = _named(request)
        name, size = request.match_info["file"], request.content_length
        if not FILE_NAME.match(name) or size is None:
            return 400, "a copy has the name of a rank, and a length\n"
        path = self.memory.path(job, point, name)
        checksum = request.query.get("header", "")
        if checksum in {head_checksum(each.header) for each in self.memory.snapshots(job, point)}:
            return 200, "it is here\n"
        if path in self._coming or path.exists():
            return 409, "another copy of that is here, or on its way\n"
        self._coming.add(path)
        try:
            return await self._receive(request, path, size, checksum)
        finally:
            self._coming.discard(path)

    async def _receive(
        self, request: web.Request, path: Path, size: int, checksum: str
    ) -> tuple[int, str]:
        generation, rank = path.parent.name.partition("-")[0], path.stem
        name = snapshot_file.part_name(int(generation), int(rank), os.getpid(), len(self._coming))
        early = path.parent.parent / name
        try:
            with os.fdopen(snapshot_file.create(early, size), "w+b") as file:
                async for chunk in request.content.iter_chunked(CHUNK_BYTES):
                    if file.tell() + len(chunk) > size:
                        return 400, "it is longer than was said\n"
                    file.write(chunk)
                    reached("receiving", int(generation))
            flaw = await asyncio.to_thread(_flaw, early, checksum)
            if flaw:
                return 422, f"{flaw}\n"
            path.parent.mkdir(exist_ok=True)
            early.rename(path)
            snapshot = self.memory.look(path)
            if snapshot is None:
                path.unlink(missing_ok=True)
                return 422, "the copy is not of the job and the point that its path names\n"
            await asyncio.to_thread(delete, self.memory.outrun(snapshot))
        except snapshot_file.NoRoomError as error:
            return 507, f"{error.strerror}\n"
        except OSError as error:
            return 500, f"it cannot be written: {error.strerror}\n"
        else:
            return 200, "it is here\n"
        finally:
            early.unlink(missing_ok=True)


def _named(request: web.Request) -> tuple[JobId, Point]:
    job, named = request.match_info["job"], POINT.match(request.match_info["point"])
    if named is None or not re.fullmatch(JOB, job, re.ASCII):
        raise web.HTTPNotFound(text="there is no such snapshot here\n")
    return JobId(job), Point(step=int(named[2]), generation=int(named[1]))


def _flaw(path: Path, checksum: str) -> str:
    """What is wrong with a copy that has arrived; it is nothing most of the time."""
    try:
        header = snapshot_file.read_header(path)
        if head_checksum(header) != checksum:
            return "its header is not the one that was announced"
        for piece in header.pieces:
            snapshot_file.read_piece(path, piece)
    except (OSError, snapshot_file.SnapshotError) as error:
        return str(error)
    return ""
