"""Tells others what happened: signed, at least once, and again with growing pauses.

Each receiver has a place in the outbox up to which it was told; that stands in the store too, so
that whoever leads next goes on from there. A message may come twice, and its id tells.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

import aiohttp
import structlog

from agents.daemon.backoff import Backoff
from agents.store import Entry, Put, StoreError
from sailord.api.preemption_webhook import SIGNATURE_HEADER, sign
from sailord.config import Receiver
from sailord.notify.outbox import Outbox

log = structlog.get_logger("sailord.notify.webhook_sender")

PAUSE_S_FIRST = 0.5
PAUSE_S_MAX = 60.0
REFUSALS_MAX = 60
"""About an hour: one that refuses a message for so long does not want it, and may want the next."""
TIMEOUT_S = 10.0
LOOK_S = 5.0
"""How often the outbox is looked at where no bell rings before."""


@dataclass(eq=False)
class Outgoing:
    """One messenger for each receiver, so that none waits for another."""

    receivers: tuple[Receiver, ...]
    outbox: Outbox
    term: Callable[[], int | None]
    """Our term as leader: only a leader tells."""

    async def begin(self, term: int) -> None:
        """A new receiver hears what happens from now on; raises what the store raises."""
        now = (await self.outbox.look()).revision
        for receiver in self.receivers:
            if await self.outbox.store.get(self.key(receiver)) is None:
                await self.move(receiver, now, term)

    async def run(self) -> None:
        """Tell everything that is in the outbox, and what comes into it."""
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session, asyncio.TaskGroup() as group:
            for receiver in self.receivers:
                group.create_task(_Messenger(self, receiver, session).run())

    def key(self, receiver: Receiver) -> str:
        """Where it stands up to which revision the receiver was told."""
        name = hashlib.sha256(receiver.url.encode()).hexdigest()[:16]
        return self.outbox.keys.cursors + name

    async def move(self, receiver: Receiver, after: int, term: int) -> bool:
        """Remember it; ``False``: somebody else leads."""
        value = json.dumps({"after": after, "url": receiver.url}).encode()
        order = Put(self.key(receiver), value)
        return await self.outbox.gateway.write_as_leader(term, [order])


@dataclass(eq=False)
class _Messenger:
    by: Outgoing
    receiver: Receiver
    session: aiohttp.ClientSession

    @property
    def host(self) -> str:
        """What may be shown to anybody: the rest of an address may be a secret."""
        parts = urlsplit(self.receiver.url)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"

    async def run(self) -> None:
        while True:
            bell, term = self.by.outbox.bell, self.by.term()
            if term is not None:
                with contextlib.suppress(StoreError):  # It is asked again soon.
                    await self._tell_all(term)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(bell.wait(), LOOK_S)

    async def _tell_all(self, term: int) -> None:
        place = await self.by.outbox.store.get(self.by.key(self.receiver))
        if place is None:
            return  # We have only just come to lead.
        after = int(json.loads(place.value)["after"])
        entries = (await self.by.outbox.look()).entries
        for entry in sorted(entries, key=lambda entry: entry.created):
            if entry.created <= after:
                continue
            if not await self._insist(entry, term):
                return
            if not await self.by.move(self.receiver, entry.created, term):
                return

    async def _insist(self, entry: Entry, term: int) -> bool:
        """Send until it is taken; ``False``: it is another leader's now."""
        backoff, refusals, url = Backoff(PAUSE_S_FIRST, PAUSE_S_MAX), 0, self.receiver.url
        while self.by.term() == term:
            why, was_heard = await self._send(entry.value)
            if not why:
                self.by.outbox.unheard.pop(self.host, None)
                return True
            self.by.outbox.unheard[self.host] = why
            log.info("a webhook was not taken", url=url, why=why, key=entry.key)
            refusals += was_heard
            if refusals >= REFUSALS_MAX:
                log.warning("a webhook was given up", url=url, why=why, key=entry.key)
                return True
            await asyncio.sleep(backoff.next_s())
        return False

    async def _send(self, body: bytes) -> tuple[str, bool]:
        """Why it was not taken, if so, and whether the receiver said that itself."""
        signature = sign(self.receiver.secret, body, time.time())
        headers = {"Content-Type": "application/json", SIGNATURE_HEADER: signature}
        try:
            async with self.session.post(
                self.receiver.url, data=body, headers=headers, allow_redirects=False
            ) as reply:
                return ("", True) if reply.status < 300 else (f"answered {reply.status}", True)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return str(error) or "no answer in time", False
