"""Asks other agents and sailord over HTTP, signed both ways."""

from __future__ import annotations

import time
from dataclasses import dataclass

import aiohttp

from agents.rpc.signing import (
    REPLY_HEADER,
    REQUEST_HEADER,
    SignatureError,
    check_reply,
    sign_request,
)

TIMEOUT_S = 2.0


class CallFailed(Exception):  # noqa: N818 - an answer like any other: nobody was reached
    """Nobody was reached, or who answered was not one of this cluster."""


@dataclass(eq=False)
class SignedClient:
    """All that have the cluster's key."""

    session: aiohttp.ClientSession
    key: bytes
    answer_bytes_max: int = 1 << 20

    async def call(
        self,
        address: str,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        timeout_s: float = TIMEOUT_S,
    ) -> tuple[int, bytes]:
        """Ask; return the status and the answer, which one with the key has given."""
        header, nonce = sign_request(self.key, method, path, body, at=time.time())
        try:
            async with self.session.request(
                method,
                f"http://{address}{path}",
                data=body,
                headers={REQUEST_HEADER: header, "Content-Type": "application/json"},
                timeout=aiohttp.ClientTimeout(total=timeout_s),
                allow_redirects=False,
            ) as reply:
                answer = await read_answer(reply, self.answer_bytes_max)
                signature = reply.headers.get(REPLY_HEADER)
                check_reply(self.key, nonce, reply.status, answer, signature)
                return reply.status, answer
        except (aiohttp.ClientError, OSError, TimeoutError, SignatureError, ValueError) as error:
            raise CallFailed(f"{address}{path}: {error or 'no answer in time'}") from None


async def read_answer(reply: aiohttp.ClientResponse, bytes_max: int) -> bytes:
    """Read an answer to its end; aiohttp's own ``read(n)`` returns what has come so far."""
    answer = bytearray()
    async for chunk in reply.content.iter_any():
        answer += chunk
        if len(answer) > bytes_max:
            raise ValueError(f"the answer is longer than {bytes_max} bytes")
    return bytes(answer)
