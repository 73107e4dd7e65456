"""What a process that a rank or a launcher has forked does first."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterable

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int, *, ignored: Iterable[signal.Signals]) -> None:
    """End this process when its parent ends, however that ends, and leave signals to it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # The parent died before prctl took effect.
    # The parent alone decides when to end.
    for each in ignored:
        signal.signal(each, signal.SIG_IGN)
