"""The state folder of a service, locked by one process at a time."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from simulator.documents.problems import InputError, Problem


def lock_folder(folder: Path, *, service: str) -> int:
    """Lock the folder until the returned descriptor is closed; ``InputError`` if it cannot."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = lock_file(folder / "lock")
    except OSError as error:
        what = f"cannot be used as the state folder: {error.strerror}"
        raise InputError(Problem(str(folder), what, "set another folder as state")) from None
    if lock is None:
        what = f"another {service} uses this state folder"
        raise InputError(Problem(str(folder), what, "stop it first, or set another folder"))
    return lock


def lock_file(path: Path) -> int | None:
    """Lock a file until the descriptor is closed; return None if another process has it."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock
