"""Sends the outbox's messages to webhook receivers: signed, at least once, retried with backoff.

Each receiver has a cursor in the store, the revision up to which it was sent the outbox, so that
the next leader continues there. A message may arrive twice, under the same id.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import time
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

import aiohttp
import structlog

from agents.daemon.backoff import Backoff
from agents.daemon.tasks import is_set_within
from agents.store.interface import Entry, Put, StoreError
from sailord.config import WebhookReceiver
from sailord.notify.message_formats import bodies_of, wants
from sailord.notify.outbox import Outbox
from sailord.notify.webhook_signature import SIGNATURE_HEADER, sign

log = structlog.get_logger("sailord.notify.webhook_sender")

BACKOFF_S_FIRST = 0.5
BACKOFF_S_MAX = 60.0
REFUSALS_MAX = 60
"""A message is skipped after a receiver has refused it this many times (about an hour)."""
TIMEOUT_S = 10.0
POLL_S = 5.0
"""How often the outbox is read if no bell rings."""


class HasTerm(Protocol):
    """Knows whether this sailord is the leader."""

    @property
    def term(self) -> int | None:
        """Our term as leader; ``None`` while we are not: only the leader sends."""


@dataclass(eq=False)
class WebhookSender:
    """One task for each receiver, so that a slow one delays no other."""

    receivers: tuple[WebhookReceiver, ...]
    outbox: Outbox
    leadership: HasTerm

    async def begin(self, term: int) -> None:
        """Set the cursor of each new receiver to now; raises what the store raises."""
        now = (await self.outbox.read()).revision
        for receiver in self.receivers:
            if await self.outbox.gateway.store.get(self.key(receiver)) is None:
                await self.set_cursor(receiver, now, term)

    async def run(self) -> None:
        """Send the outbox, and each new message, forever."""
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session, asyncio.TaskGroup() as group:
            for receiver in self.receivers:
                group.create_task(_ReceiverTask(self, receiver, session).run())

    def key(self, receiver: WebhookReceiver) -> str:
        """The store key of the receiver's cursor."""
        about = _identify(receiver)
        earlier = itertools.takewhile(lambda each: each is not receiver, self.receivers)
        if number := sum(_identify(each) == about for each in earlier):
            about += b" %d" % number  # The same receiver may be named twice, for other events.
        name = hashlib.sha256(about).hexdigest()[:16]
        return self.outbox.gateway.keys.cursors + name

    async def set_cursor(self, receiver: WebhookReceiver, after: int, term: int) -> bool:
        """Store the cursor; ``False``: we are not the leader any more."""
        value = json.dumps({"after": after}).encode()
        order = Put(self.key(receiver), value)
        return await self.outbox.gateway.write_as_leader(term, [order])


def _identify(receiver: WebhookReceiver) -> bytes:
    about = receiver.url.encode()
    if receiver.format != "sailor":  # Several services may be reached at one address.
        about += receiver.format.encode() + receiver.secret
    return about


@dataclass(eq=False)
class _ReceiverTask:
    by: WebhookSender
    receiver: WebhookReceiver
    session: aiohttp.ClientSession

    @property
    def host(self) -> str:
        """The URL without path and user: those may contain secrets."""
        parts = urlsplit(self.receiver.url)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"

    async def run(self) -> None:
        while True:
            bell, term = self.by.outbox.bell, self.by.leadership.term
            if term is not None:
                with contextlib.suppress(StoreError):  # The next round tries again.
                    await self._send_all(term)
            await is_set_within(bell, POLL_S)

    async def _send_all(self, term: int) -> None:
        place = await self.by.outbox.gateway.store.get(self.by.key(self.receiver))
        if place is None:
            return  # begin() has not set it yet.
        try:
            after = int(json.loads(place.value)["after"])
        except (ValueError, KeyError, TypeError) as error:
            self.by.outbox.gateway.unreadable.note(self.by.key(self.receiver), repr(error))
            return
        entries = (await self.by.outbox.read()).entries
        for entry in sorted(entries, key=lambda entry: entry.created):
            if entry.created <= after:
                continue
            if self._wants(entry.value) and not await self._send_until_accepted(entry, term):
                return
            if not await self.by.set_cursor(self.receiver, entry.created, term):
                return

    async def _send_until_accepted(self, entry: Entry, term: int) -> bool:
        """Retry with backoff; ``False``: we are not the leader any more."""
        refusals, host, name = 0, self.host, self.by.key(self.receiver)
        failing = self.by.outbox.failing
        backoff = Backoff(BACKOFF_S_FIRST, BACKOFF_S_MAX)
        while self.by.leadership.term == term:
            why, was_reached = await self._send(entry.value)
            if not why:
                failing.pop(name, None)
                return True
            failing[name] = f"{host}: {why}"
            log.info("webhook not accepted; will retry", host=host, why=why, key=entry.key)
            refusals += was_reached
            if refusals >= REFUSALS_MAX:
                what = "webhook skipped after too many refusals"
                log.warning(what, host=host, why=why, key=entry.key)
                return True
            await asyncio.sleep(backoff.next_s())
        failing.pop(name, None)  # Another sailord sends now.
        return False

    def _wants(self, raw: bytes) -> bool:
        """Whether the receiver gets this message."""
        try:
            kind = str(json.loads(raw)["kind"])
        except (ValueError, KeyError, TypeError):
            return self.receiver.format == "sailor"
        return wants(self.receiver.format, self.receiver.events, kind)

    async def _send(self, raw: bytes) -> tuple[str, bool]:
        """Why the message was not accepted (empty: it was), and whether the receiver answered."""
        receiver, cluster = self.receiver, self.by.outbox.gateway.keys.cluster
        key = receiver.secret.decode("utf-8", "replace")
        why, was_reached = "", True
        for body in bodies_of(receiver.format, cluster, key, raw):
            why, was_reached = await self._post(body)
            if why:
                break  # All are sent again: to close an incident twice does no harm.
        return why, was_reached

    async def _post(self, body: bytes) -> tuple[str, bool]:
        headers = {"Content-Type": "application/json"}
        if self.receiver.format == "sailor":
            headers[SIGNATURE_HEADER] = sign(self.receiver.secret, body, time.time())
        try:
            async with self.session.post(
                self.receiver.url, data=body, headers=headers, allow_redirects=False
            ) as reply:
                return ("", True) if reply.status < 300 else (f"answered {reply.status}", True)
        except ValueError:  # An address that no client takes; the text may hold it.
            return "its address is not valid", False
        except aiohttp.ClientResponseError as error:  # Its text holds the address.
            return f"its answer is no valid HTTP ({error.status})", True
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return str(error) or "no answer in time", False
