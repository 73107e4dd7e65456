"""What the ledger booked within the last hour, or since this leader began if that is less."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from sailord.goodput.core.ledger import Account, Ledger
from sailord.goodput.core.shares import difference

EVERY_US = 60_000_000
"""The time between two ledgers that are remembered."""
KEPT = 61
"""Ledgers that are remembered: those of an hour, and of the minute that has begun."""
HOUR_US = 60 * EVERY_US
MINUTES_US = 10 * EVERY_US
"""The last minutes, of which people ask when something has just happened."""


@dataclass(eq=False)
class LastHour:
    """Ledgers of the last hour, one for each minute."""

    _marks: deque[Ledger] = field(default_factory=lambda: deque(maxlen=KEPT))

    def note(self, ledger: Ledger) -> None:
        """Remember a ledger if a minute has passed."""
        if not self._marks or ledger.until_us >= self._marks[-1].until_us + EVERY_US:
            self._marks.append(ledger)

    def clear(self) -> None:
        """Forget all: another leader booked since."""
        self._marks.clear()

    def booked(self, ledger: Ledger, within_us: int = HOUR_US) -> tuple[int, tuple[Account, ...]]:
        """Return since when, in microseconds, and what was booked since then by cause.

        The time is up to a minute longer than asked, and less if the leader began since.
        A step that was under way then and has ended since is booked on its causes.
        """
        since_us = ledger.until_us - within_us - EVERY_US
        first = next((mark for mark in self._marks if mark.until_us > since_us), ledger)
        found = difference(ledger.accounts, first.accounts)
        return first.until_us, tuple(each for each in found if each.gpu_us > 0)
