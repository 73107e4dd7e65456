"""What each rank is doing now, in memory that outlives the rank."""

from __future__ import annotations

import mmap
import struct

from worker.types import ACTIVITIES, Activity

_RECORD = struct.Struct("=qq")


class ActivityBoard:
    """What every rank of a machine is doing now, in memory that outlives each of them.

    It is made before the ranks are forked. Each writes its own record only, so nothing is locked.
    """

    def __init__(self, ranks: int) -> None:
        self._memory = mmap.mmap(-1, max(1, ranks) * _RECORD.size)

    def write(self, rank: int, step: int, activity: Activity) -> None:
        """Say what a rank does now."""
        _RECORD.pack_into(self._memory, rank * _RECORD.size, step, ACTIVITIES.index(activity))

    def read(self, rank: int) -> tuple[int, Activity]:
        """The step that a rank is at, and what it is doing there or was doing when it died."""
        step, activity = _RECORD.unpack_from(self._memory, rank * _RECORD.size)
        return step, ACTIVITIES[activity]
