"""Measures how fast the active job trains, for comparison with the prediction."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from agents.protocol.records import JobId
from sailord.core.model.state import State

SAMPLES_MAX = 64


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
        """Mean seconds per step; ``None`` before the third sample."""
        if len(self.seen) < 3:
            return None
        # The first sample may have come with a backlog of steps.
        (begun, first), (ended, last) = self.seen[1], self.seen[-1]
        return (ended - begun) / (last - first) if last > first else None
