"""Load limits: bound the requests in progress at addresses that need a token.

The Unix socket and the TCP port are counted apart, so that neither can starve the other.
``agents.rpc.strangers`` limits requests that are not authenticated.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from aiohttp import web

IN_PROGRESS_MAX = 512
"""Requests in progress on one listener; more are answered with 429."""

STREAMS_MAX = 64
"""Most open streams of one person."""


@dataclass(eq=False)
class Load:
    """The load on one listener."""

    in_progress: int = 0
    streams: Counter[str] = field(default_factory=Counter)
    """Number of open event streams, by reader."""

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

    def may_stream(self, name: str) -> bool:
        """Whether this person may open another stream."""
        return self.streams[name] < STREAMS_MAX

    @contextlib.contextmanager
    def streaming(self, name: str) -> Iterator[None]:
        """Count a request as a stream of this person, and no longer as a request in progress."""
        self.streams[name] += 1
        self.in_progress -= 1
        try:
            yield
        finally:
            self.in_progress += 1
            self.streams[name] -= 1
            if not self.streams[name]:
                del self.streams[name]


LOAD = web.AppKey("load", Load)
