"""Whether the store answers reads and takes writes, as this sailord last saw it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False)
class StoreHealth:
    """Set by the store's callers, read by the API, the capacity loop and the metrics."""

    unavailable_since: float | None = None
    error: str = ""
    """The last error while it is unavailable."""
    refused_write: str = ""
    """Why the store refuses the write at hand; the controller retries it."""
    rejected_writes: int = 0
    """Writes that the store rejected for good, and that were dropped."""

    @property
    def is_available(self) -> bool:
        return self.unavailable_since is None

    def mark_unavailable(self, error: str, *, at: float) -> bool:
        """Note a failed call; returns whether this begins an outage."""
        self.error = error
        was_available = self.is_available
        if was_available:
            self.unavailable_since = at
        return was_available

    def mark_available(self) -> bool:
        """Note a successful read; returns whether this ends an outage."""
        was_available, self.unavailable_since = self.is_available, None
        return not was_available
