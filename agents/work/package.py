"""A package: a packed work folder, named after its content, which travels in slices.

The name ``HASH-BYTES`` says what to fetch, how much, and how to check it, so a slice (``part`` in
names) may come from anyone. A slice fits into one signed message.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from simulator.inputs.work_section import PACKAGE

PART_BYTES = 512 << 10
BYTES_MAX = 100_000_000
"""Of a packed folder, and of its files together."""


@dataclass(frozen=True, slots=True)
class Package:
    """The name of a package."""

    sha256: str
    size: int

    @staticmethod
    def named(name: str) -> Package | None:
        """Parse a package's name; ``None`` if it is no valid one, or the package is too large."""
        if not PACKAGE.fullmatch(name):
            return None
        sha256, _, size = name.partition("-")
        return Package(sha256, int(size)) if int(size) <= BYTES_MAX else None

    def __str__(self) -> str:
        return f"{self.sha256}-{self.size}"

    @property
    def parts(self) -> int:
        """The number of slices."""
        return -(-self.size // PART_BYTES)

    def part_bytes(self, part: int) -> int:
        """Return the size of a slice: all but the last are equal."""
        return min(PART_BYTES, self.size - part * PART_BYTES)


def package_of(path: Path) -> Package:
    """Name the package in a file."""
    return Package(hash_of(parts_of(path)), path.stat().st_size)


def parts_of(path: Path) -> Iterator[bytes]:
    """Yield the slices of the package in a file."""
    with path.open("rb") as file:
        while part := file.read(PART_BYTES):
            yield part


def hash_of(parts: Iterator[bytes]) -> str:
    """Return the hash of all slices together."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()


def read_part(path: Path, part: int) -> bytes | None:
    """Read one slice of the package in a file; ``None``: there is none."""
    try:
        with path.open("rb") as file:
            file.seek(part * PART_BYTES)
            return file.read(PART_BYTES) or None
    except OSError:
        return None
