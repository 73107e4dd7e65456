"""What sailord says to agents over HTTP, signed both ways."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import aiohttp

from agents.protocol import Fence, Report
from agents.signing import (
    REPLY_HEADER,
    REQUEST_HEADER,
    SignatureError,
    check_reply,
    sign_request,
)
from agents.wire import WireError, decode, encode

TIMEOUT_S = 2.0
PROBE_S = 0.2
ANSWER_BYTES_MAX = 16 << 20


class CallFailed(Exception):  # noqa: N818 - an answer like any other: the agent was not reached
    """The agent was not reached, or what answered was not an agent of this cluster."""


@dataclass(eq=False)
class Calls:
    """One session for all agents."""

    key: bytes
    _session: aiohttp.ClientSession | None = field(default=None)

    async def abort(self, address: str, fence: Fence) -> None:
        """Say that everything up to this generation is over."""
        await self.call(address, "POST", "/v1/abort", encode(fence))

    async def wake(self, address: str) -> None:
        """Ask the agent to read the store now."""
        await self.call(address, "POST", "/v1/wake")

    async def report(self, address: str) -> Report:
        """Ask how the node stands."""
        body = await self.call(address, "GET", "/v1/report", timeout_s=PROBE_S)
        try:
            return decode(Report, body)
        except WireError as error:
            raise CallFailed(str(error)) from None

    async def call(
        self,
        address: str,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        timeout_s: float = TIMEOUT_S,
    ) -> bytes:
        """Ask, and check that the cluster's own answered."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=256), auto_decompress=False
            )
        header, nonce = sign_request(self.key, method, path, body, at=time.time())
        try:
            async with self._session.request(
                method,
                f"http://{address}{path}",
                data=body,
                headers={REQUEST_HEADER: header, "Content-Type": "application/json"},
                timeout=aiohttp.ClientTimeout(total=timeout_s),
                allow_redirects=False,
            ) as reply:
                answer = await reply.content.read(ANSWER_BYTES_MAX)
                signature = reply.headers.get(REPLY_HEADER)
                check_reply(self.key, nonce, reply.status, answer, signature)
                if reply.status >= 400:
                    raise CallFailed(f"{address}{path} answered {reply.status}")
                return answer
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
            if isinstance(error, SignatureError):
                raise CallFailed(f"{address}{path}: {error}") from None
            raise CallFailed(f"{address}{path}: {error or 'no answer in time'}") from None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
