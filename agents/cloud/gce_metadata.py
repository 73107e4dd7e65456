"""What the cloud's metadata server says of the machine, now and whenever it changes.

The server may be slow, away for a moment, or begin to break off answers just when the machine is
about to go, so nothing but a clear answer counts as one, and no request waits for long.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass

import aiohttp

HOST = "metadata.google.internal"
ANSWER_S = 2.0
WAIT_S = 5.0
"""A change is told at once. Only a connection that died unseen costs as long as this."""
RETRY_S = 0.5
RETRY_S_MAX = 5.0
"""Where there never was an answer."""
MACHINE_S = 10.0
"""For a server that is there, to say at last what the machine is."""
HEADERS = {"Metadata-Flavor": "Google"}


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine as its cloud knows it."""

    machine: str
    zone: str


@dataclass(frozen=True, slots=True)
class Answer:
    """One value, and by which mark the server knows that it is still the same."""

    value: str | None
    """``None``: the server does not know such a thing."""
    etag: str | None


class NoServerError(Exception):
    """There is no metadata server: this is no machine of that cloud."""


async def read_machine(
    session: aiohttp.ClientSession, within_s: float = MACHINE_S
) -> Machine | None:
    """Return the machine's type and zone; ``None``: this is no machine of that cloud."""
    try:
        async with asyncio.timeout(within_s):
            machine = await _insist(session, "machine-type")
            zone = await _insist(session, "zone")
    except (NoServerError, TimeoutError):
        return None
    if not machine or not zone:
        return None
    return Machine(machine.rpartition("/")[2], zone.rpartition("/")[2])


async def _insist(session: aiohttp.ClientSession, what: str) -> str | None:
    while (answer := await ask(session, what)) is None:
        await asyncio.sleep(RETRY_S)
    return answer.value


async def follow(session: aiohttp.ClientSession, what: str) -> AsyncIterator[str | None]:
    """Yield the value at once, and again whenever it may have changed; for ever."""
    answer: Answer | None = None
    pause_s, loop = RETRY_S, asyncio.get_running_loop()
    while True:
        asked_at, etag = loop.time(), None if answer is None else answer.etag
        try:
            fresh = await ask(session, what, after=etag)
        except NoServerError:
            fresh = None
        if fresh is not None:
            is_same, answer, pause_s = fresh == answer, fresh, RETRY_S
            yield fresh.value
            # Whoever does not wait with the same answer, though asked to, is not asked too often.
            if fresh.etag is not None and not (is_same and loop.time() < asked_at + RETRY_S):
                continue
        await asyncio.sleep(pause_s)
        if answer is None:
            pause_s = min(2 * pause_s, RETRY_S_MAX)


async def ask(
    session: aiohttp.ClientSession, what: str, *, after: str | None = None
) -> Answer | None:
    """Return one value; ``after`` waits for another than the one with this mark.

    ``None``: nothing clear was said, and asking again may help.
    """
    url = f"http://{os.environ.get('GCE_METADATA_HOST', HOST)}/computeMetadata/v1/instance/{what}"
    query, wait_s = {}, 0.0
    if after is not None:
        query = {"wait_for_change": "true", "last_etag": after, "timeout_sec": f"{WAIT_S:.0f}"}
        wait_s = WAIT_S
    timeout = aiohttp.ClientTimeout(total=wait_s + ANSWER_S)
    try:
        async with session.get(
            url, params=query, headers=HEADERS, timeout=timeout, allow_redirects=False
        ) as reply:
            # Anybody's web server may answer in its place; only the real one sends this back.
            if reply.headers.get("Metadata-Flavor") != "Google":
                raise NoServerError
            if reply.status == 404:
                return Answer(None, None)
            value = (await reply.text()).strip()
            return Answer(value, reply.headers.get("ETag")) if reply.status == 200 else None
    except aiohttp.ClientConnectorError as error:
        if isinstance(error.os_error, socket.gaierror) and error.os_error.errno != socket.EAI_AGAIN:
            raise NoServerError from None
        return None
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
        return None
