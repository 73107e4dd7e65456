"""Serves committed checkpoints to workers of this node that have a user of their own.

The agent reads the storage with its own rights: files, and a cloud's credentials. A worker may read
only the manifest that its spec names: the path contains the agent's signature of it.
"""

from __future__ import annotations

import asyncio
import base64
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from aiohttp import web

from agents.protocol.records import JobId
from agents.rpc.signing import ClusterKey
from agents.snapshots.readers import ReadAdmission
from worker.checkpoint import snapshot_file
from worker.checkpoint.piece_sources import REQUEST_BYTES_MAX, DurableSource, SourceError

PREFIX = "/v1/checkpoint/"
RANGE = re.compile(r"bytes=([0-9]{1,15})-([0-9]{1,15})\Z", re.ASCII)
KEPT = 2
"""Most manifests that stay open."""


def checkpoint_path(key: ClusterKey, job: JobId, manifest: str) -> str:
    """Return the path under which workers of this node read a checkpoint."""
    named = base64.urlsafe_b64encode(manifest.encode()).decode()
    return f"{PREFIX}{job}/{key.mac('checkpoint', job, manifest)}/{named}"


@dataclass(eq=False)
class _Open:
    source: DurableSource
    headers: Mapping[str, snapshot_file.Header] = field(default_factory=dict)
    one: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(eq=False)
class CheckpointRoutes:
    """The routes below ``/v1/checkpoint/``."""

    readers: ReadAdmission
    _open: OrderedDict[str, _Open] = field(default_factory=OrderedDict)

    def checks(self, request: web.Request) -> bool:
        """Return whether these routes check the sender of the request themselves."""
        return request.path.startswith(PREFIX)

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Add the routes."""
        router.add_get(PREFIX + "{job}/{mac}/{manifest}", self._list)
        router.add_get(PREFIX + "{job}/{mac}/{manifest}/{file}", self._read)

    async def _list(self, request: web.Request) -> web.Response:
        opened = await self._admit(request)
        body = snapshot_file.listing(opened.headers)
        return web.Response(body=body, content_type="application/json")

    async def _read(self, request: web.Request) -> web.Response:
        opened, name = await self._admit(request), request.match_info["file"]
        wanted = RANGE.match(request.headers.get("Range", ""))
        if name not in opened.headers or wanted is None:
            raise web.HTTPNotFound(text="no such object, or no range of it\n")
        first, last = int(wanted[1]), int(wanted[2])
        # Workers of an older fork server ask for a whole piece at once.
        if not 0 <= last - first < REQUEST_BYTES_MAX * 2:
            raise web.HTTPRequestEntityTooLarge(0, 0, text="the range is too long\n")
        try:
            body = await asyncio.to_thread(opened.source.read, name, first, last + 1 - first)
        except SourceError as error:
            raise web.HTTPBadGateway(text=f"{error}\n") from None
        return web.Response(status=206, body=bytes(body))

    async def _admit(self, request: web.Request) -> _Open:
        job, mac = request.match_info["job"], request.match_info["mac"]
        await self.readers.admit(request, job)
        try:
            manifest = base64.urlsafe_b64decode(request.match_info["manifest"]).decode()
        except ValueError as error:
            raise web.HTTPUnauthorized(text=f"{error}\n") from None
        if not self.readers.verifier.key.is_mac(mac, "checkpoint", job, manifest):
            raise web.HTTPUnauthorized(text="the checkpoint is not one of this worker's\n")
        opened = self._open.setdefault(manifest, _Open(DurableSource(manifest)))
        while len(self._open) > KEPT:
            self._open.popitem(last=False)
        async with opened.one:
            if not opened.headers:
                try:
                    opened.headers = await asyncio.to_thread(opened.source.files)
                except SourceError as error:
                    raise web.HTTPBadGateway(text=f"{error}\n") from None
        return opened
