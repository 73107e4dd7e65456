"""Opens a file in a folder that others may write to: never a link, a pipe or a device."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import IO


def open_plain(path: Path, mode: str = "rb") -> IO[bytes]:
    """Open a regular file, ``rb`` or ``r+b``; ``OSError`` if another kind has its name.

    A link would lead to what only this process may read, and a pipe would block it.
    """
    access = os.O_RDONLY if mode == "rb" else os.O_RDWR
    descriptor = os.open(path, access | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is no regular file", str(path))
    return os.fdopen(descriptor, mode)


def read_plain(path: Path) -> str:
    """Read a small text file that another user may have replaced."""
    with open_plain(path) as file:
        return file.read().decode("utf-8")
