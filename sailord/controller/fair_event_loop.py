"""An asyncio event loop that handles few sockets per turn, so that a flood delays no decision."""

from __future__ import annotations

import asyncio
import selectors

EVENTS_MAX = 128
"""Sockets handled per turn; the others wait for the next turn, in order."""


class FairSelector(selectors.DefaultSelector):
    """Returns at most ``EVENTS_MAX`` ready sockets; the rest are still ready next time."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return super().select(timeout)[:EVENTS_MAX]


def new_loop() -> asyncio.AbstractEventLoop:
    """A new event loop with the fair selector."""
    return asyncio.SelectorEventLoop(FairSelector())
