"""Network namespaces: make one, and move this process into one.

A namespace here has no name: it lives as long as a process in it or an open file of it, so nothing
is left of it when those end, however they end.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


def enter_network_namespace(path: str | Path) -> None:
    """Move the calling thread into the namespace behind a file such as ``/proc/PID/ns/net``."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check(_libc.setns(handle, _CLONE_NEWNET))
    finally:
        os.close(handle)


def leave_network_namespace() -> None:
    """Move the calling thread into a new namespace, which has nothing but a loopback device."""
    _check(_libc.unshare(_CLONE_NEWNET))


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
