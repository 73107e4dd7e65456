"""Logs which GPUs are up, so that `sailorctl replay` can play them again."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from sailord.core.model.state import State
from sailord.planning.machine_lifetimes import pool_of

log = structlog.get_logger("sailord")

FILE = "availability.jsonl"
EVERY_S = 1.0
"""How often GPUs are counted."""
REPEAT_S = 86400.0
"""A line is written at least this often, so that a trace does not end with the last change."""


@dataclass(eq=False)
class AvailabilityLog:
    """A line for each change, or day, while this sailord leads: the time, and GPUs by pool."""

    path: Path
    _last: dict[str, int] | None = field(default=None)
    _counted_at: float = 0.0
    _written_at: float = 0.0

    def note(self, state: State) -> None:
        """Write a line if the available GPUs differ from those of the last one, or that is old."""
        if state.term is None:
            self._last = None
            return
        if self._last is not None and state.now < self._counted_at + EVERY_S:
            return
        self._counted_at = state.now
        gpus = Counter[str]()
        for node in state.nodes.values():
            if not node.is_lost and node.record.gpus:
                gpus[pool_of(node.record)] += node.record.gpus
        found = dict(sorted(gpus.items()))
        if found == self._last and state.now < self._written_at + REPEAT_S:
            return
        self._last, self._written_at = found, state.now
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"at": round(state.now, 3), "gpus": found}) + "\n")
        except OSError as error:
            log.warning("availability could not be logged", path=str(self.path), error=str(error))
