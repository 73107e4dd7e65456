"""The client of signed HTTP: calls agents and sailord, and checks their answers."""

from __future__ import annotations

import time
from collections.abc import AsyncIterable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from agents.rpc.signing import (
    REPLY_HEADER,
    REQUEST_HEADER,
    ClusterKey,
    SignatureError,
    check_reply,
    sign_request,
)
from agents.rpc.tls import Tls, explain

TIMEOUT_S = 2.0
JSON = {"Content-Type": "application/json"}


class CallFailed(Exception):  # noqa: N818 - names the outcome of a call
    """The peer was not reached, or its answer was not signed with the cluster's key."""


@dataclass(frozen=True, slots=True)
class StreamedBody:
    """A long body, which is sent as it is read."""

    chunks: AsyncIterable[bytes]
    headers: Mapping[str, str]
    timeout: aiohttp.ClientTimeout


@dataclass(eq=False)
class SignedClient:
    """Calls peers with signed requests."""

    session: aiohttp.ClientSession
    key: ClusterKey
    answer_bytes_max: int = 1 << 20
    tls: Tls | None = None
    """``None``: plain HTTP."""

    async def call(
        self,
        address: str,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        to: str,
        timeout_s: float = TIMEOUT_S,
        stream: StreamedBody | None = None,
    ) -> tuple[int, bytes]:
        """Send a request; return the status and body of the answer, whose signature is valid.

        ``to`` is what the receiver's certificate must say: a role, or ``NAME.ROLE`` (``agent_of``)
        where the caller knows the name. A stream is sent as the body without being signed, and has
        its own timeout.
        """
        header, nonce = sign_request(self.key, address, method, path, body, at=time.time())
        try:
            async with self.session.request(
                method,
                f"{scheme_of(self.tls)}://{address}{path}",
                data=body if stream is None else stream.chunks,
                headers={REQUEST_HEADER: header, **(JSON if stream is None else stream.headers)},
                timeout=(
                    aiohttp.ClientTimeout(total=timeout_s) if stream is None else stream.timeout
                ),
                allow_redirects=False,
                **tls_of(self.tls, to),
            ) as reply:
                answer = await read_answer(reply, self.answer_bytes_max)
                signature = reply.headers.get(REPLY_HEADER)
                check_reply(self.key, nonce, reply.status, answer, signature)
                return reply.status, answer
        except (aiohttp.ClientError, OSError, TimeoutError, SignatureError, ValueError) as error:
            raise CallFailed(f"{address}{path}: {_explain_failure(error)}") from None


def agent_of(node: str) -> str:
    """Return what the certificate of this node's agent says."""
    return f"{node}.agent"


def scheme_of(tls: Tls | None) -> str:
    """Return the scheme of addresses in the cluster."""
    return "http" if tls is None else "https"


def tls_of(tls: Tls | None, to: str) -> dict[str, Any]:
    """Return how aiohttp connects to a member of the cluster."""
    if tls is None:
        return {}
    return {"ssl": tls.client, "server_hostname": tls.server_name(to)}


def _explain_failure(error: Exception) -> str:
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "it closed the connection without an answer; it may require TLS (docs/security.md)"
    return explain(error) if str(error) else "no answer in time"


async def read_answer(reply: aiohttp.ClientResponse, bytes_max: int) -> bytes:
    """Read an answer to its end, up to a limit; aiohttp's ``read(n)`` returns what has arrived."""
    answer = bytearray()
    async for chunk in reply.content.iter_any():
        answer += chunk
        if len(answer) > bytes_max:
            raise ValueError(f"the answer is longer than {bytes_max} bytes")
    return bytes(answer)
