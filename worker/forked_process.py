"""What a process that a rank or a launcher has forked does first."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterable

_PR_SET_PDEATHSIG = 1
_withheld: set[tuple[int, int]] = set()
"""By device and inode: files of which forked processes keep no descriptor."""


def end_with_parent(parent: int, *, ignored: Iterable[signal.Signals]) -> None:
    """End this process when its parent ends, however that ends, and leave signals to it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # The parent died before prctl took effect.
    # The parent alone decides when to end.
    for each in ignored:
        signal.signal(each, signal.SIG_IGN)


def withhold(file: int) -> None:
    """Let no forked process keep an open file, whose memory would be taken until that ends."""
    _withheld.add(_identity(os.fstat(file)))


def withhold_no_more(file: int) -> None:
    """Undo ``withhold``, before the file is closed."""
    _withheld.discard(_identity(os.fstat(file)))


def is_withheld(about: os.stat_result) -> bool:
    """Return whether this is a file of which a forked process keeps no descriptor."""
    return _identity(about) in _withheld


def _identity(about: os.stat_result) -> tuple[int, int]:
    return about.st_dev, about.st_ino
