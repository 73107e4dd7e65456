"""What the agent answers over HTTP, to those who have the cluster's key."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from agents.core.model import AbortHeard, Event, State
from agents.daemon.clock import Clock
from agents.protocol.codec import WireError, decode, encode
from agents.protocol.records import Abort, JobId
from agents.rpc.signing import REPLY_HEADER, REQUEST_HEADER, SignatureError, Verifier, sign_reply
from agents.snapshots.http import MemoryDoor
from agents.workers.logs import MARK, read_output
from agents.workers.rendezvous import Meeting

BODY_BYTES_MAX = 1 << 16
JOB = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
MEETING_PATH = re.compile(rf"/v1/meeting/({JOB})/([0-9]{{1,12}})\Z", re.ASCII)
LOG_PATH = re.compile(r"/v1/logs(?:/([0-9]{1,5}))?\Z", re.ASCII)


@dataclass(eq=False)
class Door:
    """Where peers and the controller are heard."""

    verifier: Verifier
    clock: Clock
    state: Callable[[], State]
    outputs: Callable[[], Mapping[int, Path]]
    meeting: Meeting
    memory: MemoryDoor
    feed: Callable[[Event], None]
    wake: Callable[[], None]

    async def open(self, host: str, port: int) -> tuple[web.AppRunner, int]:
        """Listen; return what must be cleaned up, and the port."""
        app = web.Application(client_max_size=BODY_BYTES_MAX)
        self.memory.add_to(app.router)
        app.router.add_route("*", "/{path:.*}", self._serve)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, host, port).start()
        return runner, int(runner.addresses[0][1])

    async def _serve(self, request: web.Request) -> web.Response:
        body = await request.read()
        header = request.headers.get(REQUEST_HEADER)
        try:
            nonce = self.verifier.check_request(
                request.method, request.raw_path, body, header, at=time.time()
            )
        except SignatureError as error:
            return web.Response(status=401, text=f"{error}\n")
        status, answer = await self._answer(request, body)
        signature = sign_reply(self.verifier.key, nonce, status, answer)
        return web.Response(status=status, body=answer, headers={REPLY_HEADER: signature})

    def _ways(self) -> dict[tuple[str, str], Callable[[bytes], Awaitable[tuple[int, bytes]]]]:
        return {
            ("GET", "/v1/report"): self._report,
            ("POST", "/v1/abort"): self._abort,
            ("POST", "/v1/wake"): self._wake,
        }

    async def _answer(self, request: web.Request, body: bytes) -> tuple[int, bytes]:
        if request.method == "GET" and (log := LOG_PATH.match(request.path)) is not None:
            return self._log(log[1], request.query.get("after", ""))
        if request.method == "GET" and (asked := MEETING_PATH.match(request.path)) is not None:
            return await self._meeting(JobId(asked[1]), int(asked[2]))
        way = self._ways().get((request.method, request.path))
        return (404, b"there is no such thing here\n") if way is None else await way(body)

    async def _report(self, body: bytes) -> tuple[int, bytes]:
        del body
        report = self.state().last_report
        return (503, b"the agent has only begun\n") if report is None else (200, encode(report))

    async def _abort(self, body: bytes) -> tuple[int, bytes]:
        try:
            abort = decode(Abort, body)
        except WireError as error:
            return 422, f"{error}\n".encode()
        heard = self.state().heard
        if abort.fence.term < heard.term:
            return 409, encode(heard)
        self.feed(AbortHeard(self.clock.now(), abort.job, abort.fence))
        return 200, b"{}"

    async def _wake(self, body: bytes) -> tuple[int, bytes]:
        del body
        self.wake()
        return 200, b"{}"

    def _log(self, rank: str | None, mark: str) -> tuple[int, bytes]:
        if not MARK.match(mark):
            return 422, b"that is no mark of ours\n"
        return 200, encode(read_output(self.outputs(), None if rank is None else int(rank), mark))

    async def _meeting(self, job: JobId, generation: int) -> tuple[int, bytes]:
        place = await self.meeting.wait(job, generation)
        return (404, b"that is not known here\n") if place is None else (200, place.encode())
