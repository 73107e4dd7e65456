"""Opens files in folders that others may write to, but no link, pipe or device."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import IO


def open_plain(path: Path, mode: str = "rb") -> IO[bytes]:
    """Open a regular file, ``rb`` or ``r+b``; ``OSError`` if it is anything else.

    A link could lead to a file that only this process may read, and a pipe would block it.
    """
    access = os.O_RDONLY if mode == "rb" else os.O_RDWR
    descriptor = os.open(path, access | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return os.fdopen(descriptor, mode)


def read_plain(path: Path) -> str:
    """Read a small text file that another user may have replaced."""
    with open_plain(path) as file:
        return file.read().decode("utf-8")
