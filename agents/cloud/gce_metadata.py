"""Reads values of Google's metadata server, once or whenever they change.

The server may be slow, unavailable for a moment, or cut off answers when the instance is about to
be stopped. Only a complete answer counts, and no request waits for long.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

import aiohttp

from agents.daemon.backoff import Backoff

HOST = "metadata.google.internal"
ANSWER_S = 2.0
WAIT_S = 5.0
"""How long a request waits for a change. The server answers at once after one, and a dead
connection is noticed ``ANSWER_S`` later."""
RETRY_S = 0.5
RETRY_S_MAX = 5.0
"""The longest pause between attempts until the server has answered once."""
INSTANCE_S = 10.0
"""How long to wait for a slow server to identify the instance."""
HEADERS = {"Metadata-Flavor": "Google"}
PROOF = "service-accounts/default/identity"
PROOF_S = 2.0
"""How long to wait for a proof; the caller asks again later."""


@dataclass(frozen=True, slots=True)
class InstanceMetadata:
    """The instance, as its cloud describes it."""

    machine_type: str
    zone: str


@dataclass(frozen=True, slots=True)
class MetadataValue:
    """One value and its ETag."""

    value: str | None
    """``None``: the server has no such value."""
    etag: str | None


class NoServerError(Exception):
    """There is no metadata server: this is no instance of Google Compute Engine."""


async def read_instance(
    session: aiohttp.ClientSession, within_s: float = INSTANCE_S
) -> InstanceMetadata | None:
    """Return the machine type and zone; ``None``: no server answered within ``within_s``."""
    try:
        async with asyncio.timeout(within_s):
            machine_type = await _ask_until_answered(session, "machine-type")
            zone = await _ask_until_answered(session, "zone")
    except (NoServerError, TimeoutError):
        return None
    if not machine_type or not zone:
        return None
    return InstanceMetadata(machine_type.rpartition("/")[2], zone.rpartition("/")[2])


async def read_proof(session: aiohttp.ClientSession, audience: str) -> str | None:
    """Return a token in which Google tells the audience which instance this is.

    ``None``: no server answered, or the instance has no service account.
    """
    query = {"audience": audience, "format": "full"}
    try:
        async with asyncio.timeout(PROOF_S):
            return await _ask_until_answered(session, PROOF, query)
    except (NoServerError, TimeoutError):
        return None


async def _ask_until_answered(
    session: aiohttp.ClientSession, what: str, query: Mapping[str, str] | None = None
) -> str | None:
    while (answer := await ask(session, what, query=query)) is None:
        await asyncio.sleep(RETRY_S)
    return answer.value


async def follow(session: aiohttp.ClientSession, what: str) -> AsyncIterator[str | None]:
    """Yield the value now, and again whenever it may have changed, forever."""
    answer: MetadataValue | None = None
    backoff, loop = Backoff(RETRY_S, RETRY_S_MAX), asyncio.get_running_loop()
    while True:
        asked_at, etag = loop.time(), None if answer is None else answer.etag
        try:
            fresh = await ask(session, what, after=etag)
        except NoServerError:
            fresh = None
        if fresh is not None:
            is_same, answer = fresh == answer, fresh
            yield fresh.value
            # Ask a server that ignores wait_for_change at a slower rate.
            if fresh.etag is not None and not (is_same and loop.time() < asked_at + RETRY_S):
                continue
        await asyncio.sleep(backoff.next_s() if answer is None else RETRY_S)


async def ask(
    session: aiohttp.ClientSession,
    what: str,
    *,
    after: str | None = None,
    query: Mapping[str, str] | None = None,
) -> MetadataValue | None:
    """Return one value; with ``after`` wait up to ``WAIT_S`` until its ETag is another one.

    ``None``: there was no complete answer, and a retry may help.
    """
    url = f"http://{os.environ.get('GCE_METADATA_HOST', HOST)}/computeMetadata/v1/instance/{what}"
    sent, wait_s = dict(query or {}), 0.0
    if after is not None:
        sent |= {"wait_for_change": "true", "last_etag": after, "timeout_sec": f"{WAIT_S:.0f}"}
        wait_s = WAIT_S
    timeout = aiohttp.ClientTimeout(total=wait_s + ANSWER_S)
    try:
        async with session.get(
            url, params=sent, headers=HEADERS, timeout=timeout, allow_redirects=False
        ) as reply:
            # Another web server may answer under this name; only the real one sends this header.
            if reply.headers.get("Metadata-Flavor") != "Google":
                raise NoServerError
            if reply.status == 404:
                return MetadataValue(None, None)
            value = (await reply.text()).strip()
            return MetadataValue(value, reply.headers.get("ETag")) if reply.status == 200 else None
    except aiohttp.ClientConnectorError as error:
        if isinstance(error.os_error, socket.gaierror) and error.os_error.errno != socket.EAI_AGAIN:
            raise NoServerError from None
        return None
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
        return None
