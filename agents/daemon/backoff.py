"""Exponential backoff between the attempts of something that fails."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Backoff:
    """Pauses that begin with ``first_s`` and double up to ``most_s``; the caller waits."""

    first_s: float
    most_s: float
    _pause_s: float = 0.0

    def next_s(self) -> float:
        """Return the pause before the next attempt."""
        self._pause_s = min(2 * self._pause_s, self.most_s) if self._pause_s else self.first_s
        return self._pause_s

    def reset(self) -> None:
        """Begin with ``first_s`` again, after an attempt that succeeded."""
        self._pause_s = 0.0
