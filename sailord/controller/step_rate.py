"""How fast a job trains by what was seen, to stand beside what was predicted."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from sailord.core.state import State

SEEN_MAX = 64


@dataclass(eq=False)
class Pace:
    """The last steps of the present generation and when they were heard of."""

    generation: int = 0
    seen: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=SEEN_MAX))

    def look(self, state: State) -> None:
        """Note a new step."""
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
        """Seconds a step over the last steps; ``None`` while too few were seen."""
        if len(self.seen) < 3:
            return None
        # The first of them may have come with the news of many.
        (begun, first), (ended, last) = self.seen[1], self.seen[-1]
        return (ended - begun) / (last - first) if last > first else None
