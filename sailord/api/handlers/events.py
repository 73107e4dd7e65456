"""Handler of ``/v1/events``: the event feed, once or as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator

from aiohttp import web

from agents.protocol.codec import plain
from sailord.api.access.load_limits import LOAD
from sailord.api.answers.responses import answer
from sailord.api.answers.types import Events
from sailord.api.handlers.context import CONTEXT
from sailord.notify.feed import FeedEvent
from simulator.documents.problems import InputError, Problem

KEEPALIVE_S = 15.0


async def events(request: web.Request) -> web.StreamResponse:
    """Stream events as server-sent events, after the last id that the client saw."""
    feed = request.app[CONTEXT].controller.announcer.feed
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
    await reply.prepare(request)
    with request.app[LOAD].uncounted():
        return await _stream(reply, feed.follow(int(given)))


async def _stream(
    reply: web.StreamResponse, followed: AsyncIterator[FeedEvent]
) -> web.StreamResponse:
    pending = asyncio.ensure_future(anext(followed))
    try:
        while True:
            done, _ = await asyncio.wait([pending], timeout=KEEPALIVE_S)
            if not done:
                await reply.write(b": keepalive\n\n")
                continue
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
