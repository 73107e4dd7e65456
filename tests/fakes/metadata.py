"""A fake of Google's metadata server: real HTTP, etags, and failures."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from agents.cloud.gce_metadata import PROOF

FIRST = {
    "preempted": "FALSE",
    "maintenance-event": "NONE",
    "machine-type": "projects/123/machineTypes/a2-highgpu-2g",
    "zone": "projects/123/zones/us-central1-b",
}


@dataclass(eq=False)
class Metadata:
    """The server's values, waiting requests and injected failures."""

    address: str = ""
    values: dict[str, str] = field(default_factory=lambda: dict(FIRST))
    waiting: int = 0
    """Number of requests that wait for a change."""
    asked: list[tuple[str, bool]] = field(default_factory=list)
    """Requested paths, and whether with a wait."""
    delay_s: float = 0.0
    fails: int = 0
    """Number of next answers that are a 503."""
    drops: int = 0
    """Number of next requests whose connection breaks."""
    is_impatient: bool = False
    """Answer at once even if the request asks to wait."""
    has_marks: bool = True
    is_google: bool = True
    prove: Callable[[str], str] | None = None
    """Makes a token for an audience; ``None``: the instance has no service account."""
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def flip(self, what: str, value: str) -> None:
        """Change a value and answer the requests that wait for it."""
        async with self._changed:
            self.values[what] = value
            self._changed.notify_all()

    def etag(self, what: str) -> str:
        """Return a value's etag; as with Google's server, equal values have equal etags."""
        return hashlib.sha256(f"{what}{self.values[what]}".encode()).hexdigest()[:16]

    async def answer(self, request: web.Request) -> web.StreamResponse:
        what = request.match_info["what"]
        if request.headers.get("Metadata-Flavor") != "Google":
            return web.Response(status=403)
        waits = request.query.get("wait_for_change") == "true" and not self.is_impatient
        self.asked.append((what, waits))
        if waits and what in self.values:
            await self._wait(what, request.query)
        # Failures are injected only when there is an answer to send.
        await asyncio.sleep(self.delay_s)
        if self.drops > 0:
            self.drops -= 1
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if self.fails > 0:
            self.fails -= 1
            return self._reply(503, "")
        if what == PROOF and self.prove is not None:
            return self._reply(200, self.prove(request.query["audience"]))
        if what not in self.values:
            return self._reply(404, "")
        return self._reply(200, self.values[what], self.etag(what))

    async def _wait(self, what: str, query: Any) -> None:
        """Wait, as documented, until the etag differs from the client's or the time is over."""
        known = query.get("last_etag") or self.etag(what)
        self.waiting += 1
        try:
            async with self._changed:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(
                        self._changed.wait_for(lambda: self.etag(what) != known),
                        float(query.get("timeout_sec", "3600")),
                    )
        finally:
            self.waiting -= 1

    def _reply(self, status: int, text: str, etag: str | None = None) -> web.Response:
        headers = {"Metadata-Flavor": "Google"} if self.is_google else {}
        if etag is not None and self.has_marks:
            headers["ETag"] = etag
        return web.Response(status=status, text=text, headers=headers)


@contextlib.asynccontextmanager
async def metadata_server() -> AsyncIterator[Metadata]:
    """One server on a port of its own."""
    server = Metadata()
    app = web.Application()
    app.router.add_get("/computeMetadata/v1/instance/{what:.+}", server.answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.address = f"127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()
