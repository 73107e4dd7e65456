"""Load limits: bound the authenticated requests in progress.

The Unix socket and the TCP port are counted apart, so that neither can starve the other.
``agents.rpc.strangers`` limits requests that are not authenticated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from aiohttp import web

IN_PROGRESS_MAX = 512
"""Requests in progress on one listener; more are answered with 429."""


@dataclass(eq=False)
class Load:
    """The load on one listener."""

    in_progress: int = 0

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
