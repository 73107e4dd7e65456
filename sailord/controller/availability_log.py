"""Logs which GPUs are up, so that `sailorctl replay` can play them again."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from math import inf
from os import SEEK_END
from pathlib import Path

import structlog

from sailord.core.model.state import State
from sailord.planning.machine_lifetimes import pool_of
from simulator.traces.sailord_log import OLDER

log = structlog.get_logger("sailord")

FILE = "availability.jsonl"
EVERY_S = 1.0
"""How often GPUs are counted."""
BYTES_MAX = 16 * 2**20
"""A file that reaches this size is renamed to end in ``.1``, in place of an older one."""
REPEAT_S = 86400.0
"""A line is written at least this often, so that a trace does not end with the last change."""


@dataclass(eq=False)
class AvailabilityLog:
    """A line for each change, or day, while this sailord leads: the time, and GPUs by pool."""

    path: Path
    bytes_max: int = BYTES_MAX
    _last: dict[str, int] | None = field(default=None)
    _counted_at: float = -inf
    _written_at: float = -inf
    _fails: bool = False

    def note(self, state: State) -> None:
        """Write a line if the available GPUs differ from those of the last one, or that is old."""
        if state.term is None:
            self._last, self._counted_at = None, -inf
            return
        if state.now < self._counted_at + EVERY_S:
            return
        self._counted_at = state.now
        gpus = Counter[str]()
        for node in state.nodes.values():
            if not node.is_lost and node.record.gpus:
                gpus[pool_of(node.record)] += node.record.gpus
        found = dict(sorted(gpus.items()))
        if found == self._last and state.now < self._written_at + REPEAT_S:
            return
        try:
            self._append(json.dumps({"at": round(state.now, 3), "gpus": found}).encode() + b"\n")
        except OSError as error:
            if not self._fails:
                path = str(self.path)
                log.warning("availability cannot be logged", path=path, error=str(error))
            self._fails = True  # The next count tries again.
            return
        self._last, self._written_at, self._fails = found, state.now, False

    def _append(self, line: bytes) -> None:
        """Append a line; begin a new file if this one is long."""
        if self.path.exists() and self.path.stat().st_size >= self.bytes_max:
            self.path.replace(self.path.with_name(self.path.name + OLDER))
        with self.path.open("ab+") as file:
            size = file.seek(0, SEEK_END)
            file.seek(max(0, size - 1))
            if size and file.read() != b"\n":
                line = b"\n" + line  # A crash or a full disk cut the last line short.
            file.write(line)
