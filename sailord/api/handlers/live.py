"""Handler of ``/v1/live``, the page's stream of server-sent events."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from agents.daemon.version import own_version
from agents.protocol.codec import plain
from sailord.api.access.callers import STILL_ADMITTED, caller_of, name_of
from sailord.api.access.load_limits import LOAD
from sailord.api.answers import render
from sailord.api.answers.goodput import goodput_view
from sailord.api.answers.live import DocumentCaches, LiveContext, live_document
from sailord.api.answers.responses import too_many
from sailord.api.handlers.context import CONTEXT, ApiContext
from sailord.api.handlers.plans import plan_of
from sailord.api.handlers.status import service_of
from sailord.page.merge_patch import merge_patch
from sailord.page.training_curve import CurvePoint

LOOK_S = 0.5
"""How often changes are sent to watchers."""
SHARE_MAX = 0.1
"""Largest share of the time spent on making the document; in a large cluster it is made less
often."""
QUIET_S = 5.0
"""How often a stream without changes sends a comment, so that the page knows that it is alive."""
SHARES_SHOWN = 14
"""Days of the goodput, and jobs."""
EVENTS_FIRST = 100


@dataclass(eq=False)
class LiveDocument:
    """The present document, made for all watchers at once."""

    kept: DocumentCaches = field(default_factory=DocumentCaches)
    document: dict[str, Any] = field(default_factory=dict)
    made_at: float = float("-inf")
    took_s: float = 0.0
    _making: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def look(self, api: ApiContext) -> dict[str, Any]:
        """Return the document, rebuilt if it is older than ``LOOK_S``."""
        async with self._making:
            if time.monotonic() >= self.made_at + max(LOOK_S, self.took_s / SHARE_MAX) * 0.9:
                plan, about = await plan_of(api, api.cluster.last_led)
                begun = time.monotonic()
                surroundings = _surroundings(api, plan, about)
                document = live_document(api.cluster.last_led, self.kept, surroundings)
                self.document = {**document, "leads": api.cluster.state.term is not None}
                self.made_at = time.monotonic()
                self.took_s = self.made_at - begun
            return self.document


LIVE = web.AppKey("live", LiveDocument)


def _surroundings(
    api: ApiContext, plan: dict[str, Any] | None, about: dict[str, Any]
) -> LiveContext:
    return LiveContext(
        plan=plan,
        about=about,
        step_rate=api.cluster.step_rate_of(None),
        at_of=api.cluster.outbox.at_of,
        safe=api.cluster.safe_point(),
        goodput=goodput_view(api.goodput.ledger, api.goodput.shares, most=SHARES_SHOWN),
        service=service_of(api),
        running=render.running_view(api.cluster.led_parts),
        risks=tuple(api.cluster.risks(api.cluster.last_led).values()),
        leader="" if api.cluster.leader is None else api.cluster.leader.host,
        schedule=_schedule_seen(api),
    )


def _schedule_seen(api: ApiContext) -> dict[str, Any] | None:
    active, seen = api.cluster.last_led.active, api.timeline_seen
    generation = None if active is None else active.generation
    return seen[1] if seen is not None and generation and generation.plan == seen[0] else None


async def live(request: web.Request) -> web.StreamResponse:
    """Stream what the page shows: a document and its patches, samples of training, and events."""
    api, shared = request.app[CONTEXT], request.app[LIVE]
    caller = caller_of(request)
    reply = web.StreamResponse(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
    reply.content_type = "text/event-stream"
    hello = {
        "cluster": api.config.cluster_name,
        "name": "" if caller is None else caller.name,
        "role": "viewer" if caller is None else caller.role,
        "version": own_version(),
        "now": api.clock.now(),
    }
    stream = _Stream(api, reply)
    load, name = request.app[LOAD], name_of(request)
    if not load.may_stream(name):
        raise too_many("event streams")
    with load.streaming(name):
        try:
            await reply.prepare(request)
            await stream.send("hello", hello)
            while api.may_stream_on(stream.term) and request[STILL_ADMITTED]():
                await stream.tell(await shared.look(api))
                await asyncio.sleep(LOOK_S)
        except ConnectionError:
            pass  # The client has disconnected.
    return reply  # Another sailord leads now: the page reconnects to it.


@dataclass(eq=False)
class _Stream:
    """One watcher's stream, and what it was sent."""

    api: ApiContext
    reply: web.StreamResponse
    term: int | None = field(init=False)
    known: dict[str, Any] = field(default_factory=dict)
    event_id: int = 0
    curve: tuple[int, int] = (-1, 0)
    sent_at: float = 0.0

    def __post_init__(self) -> None:
        self.term = self.api.cluster.state.term
        kept = self.api.cluster.feed.kept
        if len(kept) > EVENTS_FIRST:
            self.event_id = kept[-EVENTS_FIRST - 1].id

    async def send(self, kind: str, value: object) -> None:
        """Send one event."""
        text = json.dumps(value, separators=(",", ":"), allow_nan=False)
        await self.reply.write(f"event: {kind}\ndata: {text}\n\n".encode())
        self.sent_at = time.monotonic()

    async def tell(self, document: dict[str, Any]) -> None:
        """Send what is new."""
        patch = merge_patch(self.known, document)
        self.known = document
        if patch:
            await self.send("patch", patch)
        await self._samples()
        feed = self.api.cluster.feed
        news = list(feed.after(self.event_id))
        if news:
            self.event_id = news[-1].id
            await self.send("events", plain(news))
        if time.monotonic() >= self.sent_at + QUIET_S:
            await self.reply.write(b": nothing new\n\n")
            self.sent_at = time.monotonic()

    async def _samples(self) -> None:
        curve, (version_known, count) = self.api.curve, self.curve
        is_whole = curve.version != version_known
        fresh: Sequence[CurvePoint] = curve.samples if is_whole else curve.samples[count:]
        self.curve = curve.version, len(curve.samples)
        if fresh or is_whole:
            rows = [[s.at, s.step, s.loss, s.per_s, s.generation] for s in fresh]
            await self.send("samples", {"job": curve.job, "all": is_whole, "rows": rows})
