"""Turns signals that end a launcher into an exception, so that it cleans up."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Ended(BaseException):
    """A signal asked the launcher to end."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(signal.Signals(number).name)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Raise ``Ended`` at the first signal in the block, and ignore further ones."""
    before = {number: signal.signal(number, _end) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ignore() -> None:
    """Ignore these signals from now on."""
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)


def _end(number: int, _: FrameType | None) -> NoReturn:
    ignore()
    raise Ended(number)
