"""Writes the times of a rank's last passes and sums to a file, which its agent reads.

Ranks keep the same steps without speaking of it: those whose number is a multiple of a power of
two, which grows until the file is written about every 5 s. The last two are kept, since other ranks
may be a moment behind.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from worker.atomic_file import replace_file
from worker.profiling.compute_time import (
    ComputeTimer,
    TimedStep,
    TimeMark,
    seconds_between,
    slowed_by_file,
)

FILE = "steps.json"
KEEP_S = 5.0
PASSES_MAX = 512
STEPS_MAX = 2


class KeptStepsFile:
    """The last kept steps of one rank in one generation, and their file."""

    def __init__(self, folder: Path, now: Callable[[], float] = time.monotonic) -> None:
        self._path, self._now = folder / FILE, now
        self._every = 1
        self._last: tuple[int, float] | None = None
        """The last kept step, and when that was."""
        self._steps: deque[dict[str, Any]] = deque(maxlen=STEPS_MAX)

    def offer(self, step: TimedStep) -> None:
        """Keep the step if it is due."""
        if step.voted is None or step.number % self._every:
            return
        now = self._now()
        if self._last is not None:
            number, at_s = self._last
            step_s = (now - at_s) / max(step.number - number, 1)
            if step_s * self._every < KEEP_S:
                self._every *= 2
        self._last = step.number, now
        self._steps.append(plain_step(step, at=time.time()))
        with contextlib.suppress(OSError):  # Training does not depend on it.
            self._write()

    def _write(self) -> None:
        replace_file(self._path, json.dumps({"steps": list(self._steps)}), is_durable=False)


def plain_step(step: TimedStep, *, at: float) -> dict[str, Any]:
    """Return a step as plain values; times are seconds from its beginning on this rank."""
    assert step.voted is not None

    def at_s(mark: TimeMark) -> float:
        return round(seconds_between(step.begun, mark), 6)

    passes = [each for each in step.pieces if each.kind != "update"][:PASSES_MAX]
    updates = [each for each in step.pieces if each.kind == "update"]
    return {
        "step": step.number,
        "at": at,
        "voted_s": at_s(step.voted),
        "passes": [[p.kind, at_s(p.begun), at_s(p.ended), p.micro_batch] for p in passes],
        "sums": [[at_s(begun), at_s(ended)] for begun, ended in step.sums[:PASSES_MAX]],
        "update": [time_s for p in updates[:1] for time_s in (at_s(p.begun), at_s(p.ended))],
    }


def timer_of_rank(device: torch.device, node: str, folder: Path) -> ComputeTimer:
    """Return the timer of a rank that an agent has started; ``folder`` is the rank's own."""
    return ComputeTimer(device, times_slower=slowed_by_file(node), keep=KeptStepsFile(folder).offer)
