"""What the cloud's metadata server says of the machine, and its notice that the machine goes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp

from agents.clock import Clock
from agents.model import Event, NoticeSeen, NoticeWithdrawn

HOST = "metadata.google.internal"
FIRST_ANSWER_S = 1.0
WAIT_S = 60.0
RETRY_S = 1.0
HEADERS = {"Metadata-Flavor": "Google"}
NOTICE_ID = "preempted-{node}"


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine as its cloud knows it."""

    machine: str
    zone: str


async def ask(session: aiohttp.ClientSession, what: str, *, timeout_s: float) -> str | None:
    """Return one value; ``None``: there is no such server, or it does not know."""
    host = os.environ.get("GCE_METADATA_HOST", HOST)
    url = f"http://{host}/computeMetadata/v1/instance/{what}"
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with session.get(url, headers=HEADERS, timeout=timeout) as reply:
            # Anybody's web server may answer in its place; only the real one sends this back.
            is_real = reply.headers.get("Metadata-Flavor") == "Google"
            return (await reply.text()).strip() if reply.status == 200 and is_real else None
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
        return None


async def read_machine(session: aiohttp.ClientSession) -> Machine | None:
    """Return the machine's type and zone; ``None``: this is no machine of that cloud."""
    machine = await ask(session, "machine-type", timeout_s=FIRST_ANSWER_S)
    zone = await ask(session, "zone", timeout_s=FIRST_ANSWER_S) if machine else None
    if not machine or not zone:
        return None
    return Machine(machine.rpartition("/")[2], zone.rpartition("/")[2])


async def watch_notices(
    session: aiohttp.ClientSession, node: str, clock: Clock, feed: Callable[[Event], None]
) -> None:
    """Feed the notice as it comes, and its end if it was a false one."""
    id_ = NOTICE_ID.format(node=node)
    was_noticed = False
    what = "preempted"
    while True:
        said = await ask(session, what, timeout_s=WAIT_S + 10.0)
        if said == "TRUE" and not was_noticed:
            was_noticed = True
            feed(NoticeSeen(clock.now(), id_))
        elif said == "FALSE":  # Also if an agent before us had noticed it.
            was_noticed = False
            feed(NoticeWithdrawn(clock.now(), id_))
        if said is None:
            await asyncio.sleep(RETRY_S)
        what = f"preempted?wait_for_change=true&timeout_sec={WAIT_S:.0f}"
