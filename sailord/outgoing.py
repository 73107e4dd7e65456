"""Tells others what happened: signed, at least once, and again with growing pauses."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass

import aiohttp
import structlog

from agents.wire import plain
from sailord.config import Receiver
from sailord.feed import Feed, Happening

log = structlog.get_logger("sailord.outgoing")

TOLD = frozenset(
    {
        "generation_opened",
        "generation_running",
        "node_preempted",
        "checkpoint_committed",
        "job_held",
        "job_finished",
    }
)
PAUSE_S_FIRST = 0.5
PAUSE_S_MAX = 60.0
TRIES_MAX = 60
"""About an hour; a receiver that is away for longer misses the message."""
TIMEOUT_S = 10.0


@dataclass(eq=False)
class Outgoing:
    """One messenger for each receiver, so that none waits for another."""

    receivers: tuple[Receiver, ...]
    feed: Feed

    async def run(self) -> None:
        """Tell everything that happens from now on."""
        after = self.feed.next_id(0.0)
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session, asyncio.TaskGroup() as group:
            for receiver in self.receivers:
                group.create_task(self._tell(session, receiver, after))

    async def _tell(self, session: aiohttp.ClientSession, receiver: Receiver, after: int) -> None:
        async for happening in self.feed.follow(after):
            if happening.kind in TOLD:
                await _insist(session, receiver, happening)


async def _insist(session: aiohttp.ClientSession, receiver: Receiver, happening: Happening) -> None:
    from sailord.api.webhooks import SIGNATURE_HEADER, sign  # noqa: PLC0415 - the API stands on us

    body = json.dumps(plain(happening)).encode()
    pause_s = PAUSE_S_FIRST
    for _ in range(TRIES_MAX):
        signature = sign(receiver.secret, body, time.time())
        headers = {"Content-Type": "application/json", SIGNATURE_HEADER: signature}
        try:
            async with session.post(
                receiver.url, data=body, headers=headers, allow_redirects=False
            ) as reply:
                if reply.status < 300:
                    return
                why = f"answered {reply.status}"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            why = str(error) or "no answer in time"
        log.info("a webhook was not taken", url=receiver.url, why=why, id=happening.id)
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, PAUSE_S_MAX)
    log.warning("a webhook was given up", url=receiver.url, id=happening.id)
