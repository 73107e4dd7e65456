"""Measures how fast the active job trains, for comparison with the prediction."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from sailord.core.model.state import State

SAMPLES_MAX = 64


@dataclass(eq=False)
class StepRate:
    """The last steps of the present generation, and when sailord heard of them."""

    generation: int = 0
    seen: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=SAMPLES_MAX))

    def observe(self, state: State) -> None:
        """Record the step, if it is a new one."""
        active = state.active
        number = 0 if active is None or active.generation is None else active.generation.number
        if number != self.generation:
            self.generation = number
            self.seen.clear()
        if active is None or number == 0:
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
