"""Keeps those who are slow, or too many, out of everybody else's way.

Whoever may open the Unix socket and whoever shows the token are counted apart, so that neither
keeps the other out. Agents and webhooks sign their bodies, so that nobody knows who they are before
the body has come: until then they are strangers, who get a little time, and of too many of whom the
one who has kept us longest has to go. Honest senders send head and body together and never wait.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from aiohttp import web

BODY_S = 5.0
"""What a body may take to come: 1 MiB at 2 Mbit/s; most are some hundred bytes."""
AT_ONCE_MAX = 512
"""Requests that are worked on at a time at one door; more are turned away at once."""
STRANGERS_MAX = 512
"""Those whose bodies are waited for at a time."""


class BodyLate(Exception):  # noqa: N818 - an answer like any other: the sender took too long
    """A body did not come in time; answered with 408."""


@dataclass(eq=False)
class Door:
    """One way in, and how many are inside."""

    inside: int = 0
    strangers: dict[asyncio.Timeout, None] = field(default_factory=dict)
    """The waits for bodies of whoever has not shown who it is, oldest first."""

    @property
    def is_full(self) -> bool:
        return self.inside >= AT_ONCE_MAX

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Count one more inside."""
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Whoever only listens is not in anybody's way."""
        self.inside -= 1
        try:
            yield
        finally:
            self.inside += 1


DOOR = web.AppKey("door", Door)


async def read_body(request: web.Request) -> bytes:
    """The body of one who is counted, in bounded time; raises ``BodyLate``."""
    try:
        async with asyncio.timeout(BODY_S):
            return await request.read()
    except (TimeoutError, ConnectionError):  # Who has hung up hears no answer anyway.
        raise BodyLate from None


async def read_unsigned(request: web.Request) -> bytes:
    """The body of one of whom nobody knows who it is; raises ``BodyLate``."""
    strangers = request.app[DOOR].strangers
    if len(strangers) >= STRANGERS_MAX:
        oldest = next(iter(strangers))
        del strangers[oldest]
        with contextlib.suppress(RuntimeError):  # Its time is over already.
            oldest.reschedule(asyncio.get_running_loop().time())
    limit = asyncio.timeout(BODY_S)
    try:
        async with limit:
            strangers[limit] = None
            return await request.read()
    except (TimeoutError, ConnectionError):  # Who has hung up hears no answer anyway.
        raise BodyLate from None
    finally:
        strangers.pop(limit, None)
