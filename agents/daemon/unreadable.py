"""Records and messages that this process cannot read: each is logged once, counted, and left alone.

A newer version wrote them, or they are damaged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import structlog

log = structlog.get_logger("sailor")

NAMES_MAX = 1000
"""The most entries that are kept: a holder of the cluster's key could send any number of names."""


@dataclass(eq=False)
class UnreadableRecords:
    """Unreadable records by key, with the reason, until they can be read or are deleted."""

    found: dict[str, str] = field(default_factory=dict)
    """By the store's key of a record, or by who sent a message."""
    total: int = 0
    """How many were ever found."""

    def note(self, name: str, why: str) -> bool:
        """Note one; return whether it is new, and was logged."""
        is_full = name not in self.found and len(self.found) >= NAMES_MAX
        if is_full or self.found.get(name) == why:
            return False
        self.found[name] = why
        self.total += 1
        log.error("skipped an unreadable record", record=name, why=why)
        return True

    def clear(self, name: str) -> None:
        """Note that it was read."""
        self.found.pop(name, None)

    def note_all(self, found: Mapping[str, str], *, prefixes: Iterable[str]) -> list[str]:
        """Note what was found below these prefixes, clear all else there; return the new ones."""
        places = tuple(prefixes)
        for name in [name for name in self.found if name.startswith(places)]:
            if name not in found:
                self.clear(name)
        return [name for name, why in found.items() if self.note(name, why)]
