"""Reads bodies whose senders are unknown until all of it is there.

They get 5 s, and beyond 512 waiting bodies the oldest is dropped. Well-behaved senders send head
and body together and never wait.
"""

from __future__ import annotations

import asyncio
import contextlib

from aiohttp import web

BODY_S = 5.0
"""Time for a body to arrive: 1 MiB at 2 Mbit/s; most bodies are some hundred bytes."""
BYTES_PER_S_MIN = 64 * 1024
"""A known sender gets, beyond ``BODY_S``, the time that its body takes at this rate."""
UNSIGNED_MAX = 512
"""Unauthenticated bodies waited for at the same time."""
UNSIGNED = web.AppKey("unsigned", dict[asyncio.Timeout, None])
"""The timeouts of bodies that are waited for, oldest first; each application has them."""


class LateBody(web.HTTPRequestTimeout):
    """The body did not arrive in time, or its sender disconnected."""


async def read_in_time(request: web.Request) -> bytes:
    """Read a body; raises ``LateBody``."""
    try:
        expected = min(request.content_length or 0, request.client_max_size)
        async with asyncio.timeout(BODY_S + expected / BYTES_PER_S_MIN):
            return await request.read()
    except (TimeoutError, ConnectionError, web.RequestPayloadError):
        raise LateBody from None  # A client that disconnected gets no answer anyway.


async def read_unsigned(request: web.Request) -> bytes:
    """Read the body of an unauthenticated request; raises ``LateBody``."""
    unsigned = request.app[UNSIGNED]
    if len(unsigned) >= UNSIGNED_MAX:
        oldest = next(iter(unsigned))
        del unsigned[oldest]
        with contextlib.suppress(RuntimeError):  # It has expired already.
            oldest.reschedule(asyncio.get_running_loop().time())
    limit = asyncio.timeout(BODY_S)
    try:
        async with limit:
            unsigned[limit] = None
            return await request.read()
    except (TimeoutError, ConnectionError, web.RequestPayloadError):
        raise LateBody from None
    finally:
        unsigned.pop(limit, None)
