"""When a sailord last answered this node, also across crashes of its agent.

An agent that hears no leader for ``alone_s`` ends with an exit code of its own, and its unit powers
the node off. Crashes of the agent do not restart the count; an orderly end
and a boot do.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from agents.daemon.clock import boot_id
from worker.atomic_file import replace_file

WRITTEN_S = 15.0
"""The file is at most this much older than the answer."""
AT_LEAST_S = 60.0
"""The shortest wait for a sailord after the agent's start, unless ``alone_s`` is shorter."""


@dataclass(eq=False)
class LastAnswer:
    """The last answer of a sailord, or when the agent began without one."""

    path: Path | None = None
    """``None``: it is not kept."""
    clock: Callable[[], float] = time.monotonic
    """Must go on from one process to the next, as the kernel's monotonic clock does."""
    at_s: float = field(init=False)
    began_s: float = field(init=False)
    _written_s: float = -math.inf

    def __post_init__(self) -> None:
        self.at_s = self.began_s = self.clock()

    @classmethod
    def read(cls, path: Path | None, clock: Callable[[], float] = time.monotonic) -> LastAnswer:
        """Read what the last agent left, unless it ended in order or the machine has booted."""
        found = cls(path, clock)
        if path is None:
            return found
        with contextlib.suppress(OSError, ValueError):
            boot, at = path.read_text(encoding="ascii").split()
            if boot == boot_id():
                found.at_s = min(float(at), found.at_s)
        found._write()
        return found

    def note(self) -> None:
        """Note that a sailord has answered."""
        self.at_s = self.clock()
        if self.at_s - self._written_s >= WRITTEN_S:
            self._write()

    def _write(self) -> None:
        if self.path is not None:
            self._written_s = self.at_s
            with contextlib.suppress(OSError):  # On a full disk the next agent counts anew.
                text = f"{boot_id()} {self.at_s:.3f}\n"
                replace_file(self.path, text, is_durable=False)

    def forget(self) -> None:
        """Let the next agent count anew, since this one ends in order."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def left_s(self, alone_s: float) -> float:
        """Return the seconds until no sailord has answered for ``alone_s``."""
        ends_s = max(self.at_s + alone_s, self.began_s + min(alone_s, AT_LEAST_S))
        return ends_s - self.clock()

    async def wait(self, alone_s: float) -> None:
        """Return once no sailord has answered for ``alone_s``."""
        while (left_s := self.left_s(alone_s)) > 0:
            await asyncio.sleep(left_s)
