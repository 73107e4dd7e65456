"""Hands pieces from the threads that read them to the one that copies them into buffers.

A rank's state may be larger than what its node has left beside snapshots, so only some bytes of it
are in memory at once: reading waits until enough of them were copied.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from worker.checkpoint.piece_sources import PieceBytes
from worker.checkpoint.placement import PieceKey


@dataclass(eq=False)
class PieceQueue:
    """Pieces that were read and not copied yet."""

    bytes_max: float = math.inf
    """The most bytes that are held at once; a piece that has more is held alone."""
    _held: int = 0
    _is_closed: bool = False
    _pieces: deque[tuple[PieceKey, PieceBytes, int]] = field(default_factory=deque)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def reserve(self, size: int) -> bool:
        """Count bytes that are about to be read; ``False``: too many are held."""
        with self._changed:
            if size and self._held and self._held + size > self.bytes_max:
                return False
            self._held += size
            return True

    def free(self, size: int) -> None:
        """Count reserved bytes no more."""
        with self._changed:
            self._held -= size
            self._changed.notify_all()

    def put(self, key: PieceKey, body: PieceBytes, size: int) -> None:
        """Hand over a piece, for which ``size`` bytes are reserved."""
        with self._changed:
            self._pieces.append((key, body, size))
            self._changed.notify_all()

    def drain(self) -> Iterator[tuple[PieceKey, PieceBytes]]:
        """Yield what has arrived; a piece is held until the next one is asked for."""
        while self._pieces:
            key, body, size = self._pieces.popleft()
            yield key, body
            del body
            self.free(size)

    def wait(self, timeout_s: float) -> None:
        """Wait until a piece has arrived or bytes were freed."""
        with self._changed:
            self._changed.wait(timeout_s)

    def wait_for_piece(self, timeout_s: float) -> None:
        """Wait until there is a piece, or no more will come."""
        with self._changed:
            if not self._pieces and not self._is_closed:
                self._changed.wait(timeout_s)

    def close(self) -> None:
        """Say that no more will come."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
