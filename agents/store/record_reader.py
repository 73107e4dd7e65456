"""Decodes records of the store; those that have not changed since are not decoded again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from agents.protocol.codec import WireError, decode, unknown_fields
from agents.protocol.compression import unpack
from agents.store.interface import Entry

T = TypeVar("T")


@dataclass(eq=False)
class RecordReader:
    """What was decoded, by key and revision; a record of many members takes long to decode."""

    rewritten: tuple[type, ...] = ()
    """Kinds of records that are written anew, so that fields of a newer version must stay."""
    newer: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """By key: the fields that a newer version wrote into records of these kinds (ADR 70)."""
    _read: dict[str, tuple[int, object]] = field(default_factory=dict)
    """By key: the revision, and the record or why it cannot be read."""

    def read(self, kind: type[T], entries: Iterable[Entry], unreadable: dict[str, str]) -> list[T]:
        """Return the records of these entries.

        Those that cannot be read are left out; ``unreadable`` gets their keys, and why.
        """
        found = []
        for entry in entries:
            modified, value = self._read.get(entry.key, (0, None))
            if modified != entry.modified:
                value = self._decode(kind, entry)
                self._read[entry.key] = entry.modified, value
            if isinstance(value, kind):
                found.append(value)
            else:
                unreadable[entry.key] = str(value)
        return found

    def _decode(self, kind: type[T], entry: Entry) -> T | WireError:
        try:
            text = unpack(entry.value)
            value = decode(kind, text)
        except WireError as error:
            return error
        if kind in self.rewritten:
            self.newer.pop(entry.key, None)
            if fields := unknown_fields(kind, text):
                self.newer[entry.key] = fields
        return value

    def keep_only(self, entries: Iterable[Entry]) -> None:
        """Forget all records but those of these entries: the others were deleted."""
        keys = {entry.key for entry in entries}
        self._read = {key: each for key, each in self._read.items() if key in keys}
        self.newer = {key: each for key, each in self.newer.items() if key in keys}

    def clear(self) -> None:
        """Forget everything: revisions may have meant other records."""
        self._read.clear()
        self.newer.clear()
