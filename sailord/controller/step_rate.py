"""Measures how fast the active job trains, for comparison with the prediction."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from agents.protocol.records import JobId
from sailord.core.model.state import State

SAMPLES_MAX = 64
RECENT_S = 20.0
"""A speed is that of the last seconds, so that a slow minute is soon forgotten."""
RECENT_MIN = 8
"""A speed is of at least this many samples: nodes report their steps at uneven moments."""


@dataclass(eq=False)
class StepRate:
    """The last steps of the present generation, and when sailord heard of them."""

    measured: tuple[JobId, int] | None = None
    """The job and the generation's number: each job counts its own from 1."""
    seen: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=SAMPLES_MAX))

    def observe(self, state: State) -> None:
        """Record the step, if it is a new one."""
        active = state.active
        generation = None if active is None else active.generation
        present = None if generation is None else (generation.job, generation.number)
        if present != self.measured:
            self.measured = present
            self.seen.clear()
        if active is None or present is None:
            return
        if not self.seen or self.seen[-1][1] != active.progress.step:
            self.seen.append((state.now, active.progress.step))

    @property
    def iteration_s(self) -> float | None:
        """Mean seconds of the last steps; ``None`` before the third sample."""
        # The first sample may have come with a backlog of steps.
        samples = list(self.seen)[1:]
        if len(samples) < 2:
            return None
        ended, last = samples[-1]
        earlier = [each for each in samples[:-RECENT_MIN] if each[0] <= ended - RECENT_S]
        begun, first = earlier[-1] if earlier else samples[0]
        return (ended - begun) / (last - first) if last > first else None
