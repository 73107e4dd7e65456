"""Handler of ``/v1/events``: the event feed, once or as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator, Callable

from aiohttp import web

from agents.protocol.codec import plain
from sailord.api.access.callers import STILL_ADMITTED, name_of
from sailord.api.access.load_limits import LOAD
from sailord.api.answers.responses import answer, too_many
from sailord.api.answers.types import Events
from sailord.api.handlers.context import CONTEXT
from sailord.notify.feed import FeedEvent
from simulator.documents.problems import InputError, Problem

KEEPALIVE_S = 15.0
LOOK_S = 2.0
"""How often it is checked whether a stream may go on."""


async def events(request: web.Request) -> web.StreamResponse:
    """Stream events as server-sent events, after the last id that the client saw."""
    api = request.app[CONTEXT]
    feed, term = api.cluster.feed, api.cluster.state.term
    given = request.headers.get("Last-Event-ID") or request.query.get("after") or "0"
    if not re.fullmatch(r"[0-9]{1,18}", given, re.ASCII):
        raise InputError(Problem("Last-Event-ID", "is not a number", "send the last id you saw"))
    follow = request.query.get("follow", "true")
    if follow not in ("true", "false"):
        raise InputError(Problem("follow", "is neither true nor false", "give one of them"))
    if follow == "false":
        return answer(Events(tuple(feed.after(int(given)))))
    reply = web.StreamResponse(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
    reply.content_type = "text/event-stream"
    load, name = request.app[LOAD], name_of(request)
    if not load.may_stream(name):
        raise too_many("event streams")
    with load.streaming(name):
        await reply.prepare(request)

        def goes_on() -> bool:
            # Once another sailord leads, events are there: the client asks again and gets them.
            return api.may_stream_on(term) and request[STILL_ADMITTED]()

        return await _stream(reply, feed.follow(int(given)), goes_on)


async def _stream(
    reply: web.StreamResponse,
    followed: AsyncIterator[FeedEvent],
    goes_on: Callable[[], bool],
) -> web.StreamResponse:
    """Send events until the client disconnects, or may get no more of them here."""
    pending = asyncio.ensure_future(anext(followed))
    written_s = time.monotonic()
    try:
        while True:
            done, _ = await asyncio.wait([pending], timeout=LOOK_S)
            if not goes_on():
                return reply
            if not done:
                if time.monotonic() >= written_s + KEEPALIVE_S:
                    await reply.write(b": keepalive\n\n")
                    written_s = time.monotonic()
                continue
            written_s = time.monotonic()
            each = pending.result()
            text = json.dumps(plain(each))
            await reply.write(f"id: {each.id}\nevent: {each.kind}\ndata: {text}\n\n".encode())
            pending = asyncio.ensure_future(anext(followed))
    except ConnectionError:
        return reply  # The client has disconnected.
    finally:
        pending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await pending
