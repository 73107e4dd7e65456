"""Tells the leader how the node stands: always the newest report, until it was heard."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp

from agents.protocol import Report
from agents.signing import REPLY_HEADER, REQUEST_HEADER, SignatureError, check_reply, sign_request
from agents.wire import encode

PATH = "/v1/agents/report"
TIMEOUT_S = 2.0
RETRY_S = 0.2
ANSWER_BYTES_MAX = 1 << 16


@dataclass(eq=False)
class Teller:
    """A report that was overtaken need not arrive: each says everything."""

    session: aiohttp.ClientSession
    key: bytes
    leader: Callable[[], str | None]
    _newest: Report | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def tell(self, report: Report) -> None:
        """Let this be the report that is told."""
        self._newest = report
        self._changed.set()

    async def run(self) -> None:
        """Tell, for ever."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            report = self._newest
            assert report is not None
            while not await self._send(report) and not self._changed.is_set():
                await asyncio.sleep(RETRY_S)

    async def _send(self, report: Report) -> bool:
        leader = self.leader()
        if leader is None:
            return False
        body = encode(report)
        header, nonce = sign_request(self.key, "POST", PATH, body, at=time.time())
        try:
            async with self.session.post(
                f"http://{leader}{PATH}",
                data=body,
                headers={REQUEST_HEADER: header, "Content-Type": "application/json"},
                timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
                allow_redirects=False,
            ) as reply:
                answer = await reply.content.read(ANSWER_BYTES_MAX)
                signature = reply.headers.get(REPLY_HEADER)
                check_reply(self.key, nonce, reply.status, answer, signature)
                return reply.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError, SignatureError, ValueError):
            return False
