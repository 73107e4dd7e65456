"""An event loop that does a little at each turn, so that no flood holds up a decision."""

from __future__ import annotations

import asyncio
import selectors

EVENTS_MAX = 128
"""Sockets that are looked after at one turn; the others wait for the next, in their order."""


class FewAtOnce(selectors.DefaultSelector):
    """Tells of a few sockets only; those left out are still ready when it is asked again."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return super().select(timeout)[:EVENTS_MAX]


def new_loop() -> asyncio.AbstractEventLoop:
    """The loop of a process that must never be busy for long."""
    return asyncio.SelectorEventLoop(FewAtOnce())
