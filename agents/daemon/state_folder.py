"""The folder in which a service keeps its state: one process has it at a time."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from simulator.documents.problems import InputError, Problem


def lock_folder(folder: Path, *, service: str) -> int:
    """Make the folder ours alone until the descriptor is closed, or say who has it."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        what = f"cannot be the state folder: {error.strerror}"
        raise InputError(Problem(str(folder), what, "name another one under state")) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        what = f"another {service} runs on this state folder"
        raise InputError(Problem(str(folder), what, "stop it first, or name another")) from None
    return lock
