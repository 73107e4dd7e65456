"""The shared memory in which each rank records what it is doing."""

from __future__ import annotations

import mmap
import struct

from worker.types import ACTIVITIES, Activity

_RECORD = struct.Struct("=qq")


class ActivityBoard:
    """What every rank of a machine is doing now, in shared memory that outlives the ranks.

    It is created before the ranks are forked. Each rank writes only its own record, so no lock is
    needed.
    """

    def __init__(self, ranks: int) -> None:
        self._memory = mmap.mmap(-1, max(1, ranks) * _RECORD.size)

    def write(self, rank: int, step: int, activity: Activity) -> None:
        """Record what a rank is doing."""
        _RECORD.pack_into(self._memory, rank * _RECORD.size, step, ACTIVITIES.index(activity))

    def read(self, rank: int) -> tuple[int, Activity]:
        """Return a rank's step and activity; for a dead rank, the last ones."""
        step, activity = _RECORD.unpack_from(self._memory, rank * _RECORD.size)
        return step, ACTIVITIES[activity]
