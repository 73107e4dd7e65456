"""Load limits: bound the requests in progress, and the time a body may take to arrive.

The Unix socket and the TCP port are counted apart, so that neither can starve the other. Agents
and webhooks sign their bodies, so they are unauthenticated until the body is there. Unauthenticated
bodies get 5 s, and if too many are waited for, the oldest is dropped. Well-behaved senders send
head and body together and never wait.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from aiohttp import web

from sailord.api.responses import Refusal
from simulator.documents.problems import Problem

BODY_S = 5.0
"""Time for a body to arrive: 1 MiB at 2 Mbit/s; most bodies are some hundred bytes."""
IN_PROGRESS_MAX = 512
"""Requests in progress on one listener; more are answered with 429."""
UNSIGNED_MAX = 512
"""Unauthenticated bodies waited for at the same time."""


@dataclass(eq=False)
class Load:
    """The load on one listener."""

    in_progress: int = 0
    unsigned: dict[asyncio.Timeout, None] = field(default_factory=dict)
    """The timeouts of unauthenticated bodies, oldest first."""

    @property
    def is_full(self) -> bool:
        return self.in_progress >= IN_PROGRESS_MAX

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count a request."""
        self.in_progress += 1
        try:
            yield
        finally:
            self.in_progress -= 1

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Do not count a request while it only streams."""
        self.in_progress -= 1
        try:
            yield
        finally:
            self.in_progress += 1


LOAD = web.AppKey("load", Load)


async def read_body(request: web.Request) -> bytes:
    """Read the body of an authenticated request; raises ``Refusal``."""
    try:
        async with asyncio.timeout(BODY_S):
            return await request.read()
    except (TimeoutError, ConnectionError):  # A client that disconnected gets no answer anyway.
        raise _late() from None


async def read_unsigned(request: web.Request) -> bytes:
    """Read the body of an unauthenticated request; raises ``Refusal``."""
    unsigned = request.app[LOAD].unsigned
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
    except (TimeoutError, ConnectionError):  # A client that disconnected gets no answer anyway.
        raise _late() from None
    finally:
        unsigned.pop(limit, None)


def _late() -> Refusal:
    what = f"did not arrive within {BODY_S:g} s, or was dropped under load"
    return Refusal(408, Problem("body", what, "send it together with the head"))
