"""Replaces a file atomically: a reader sees the old content or the new one, also after a crash."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

OWNER_ONLY = 0o600
"""The mode of a file with a secret."""


@contextlib.contextmanager
def replacing(
    path: Path, *, is_durable: bool = True, suffix: str = "new", mode: int | None = None
) -> Iterator[IO[bytes]]:
    """Open a temporary file that takes the place of ``path`` when the block ends.

    If the block fails, the temporary file is deleted and ``path`` is left as it was. With
    ``is_durable`` the content and the name survive a power failure. Writers that may run at the
    same time need different values of ``suffix``. With ``mode`` the file never has a wider one.
    """

    def opened(name: str, flags: int) -> int:
        descriptor = os.open(name, flags, 0o666 if mode is None else mode & 0o600)
        if mode is not None:
            os.fchmod(descriptor, mode)  # Whatever the umask is.
        return descriptor

    temporary = path.with_name(f".{path.name}.{suffix}")
    # Always a new file: an existing one is left from a crash, or is a link that an attacker placed.
    temporary.unlink(missing_ok=True)
    try:
        with open(temporary, "xb", opener=opened) as file:
            yield file
            if is_durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    if is_durable:
        sync_folder(path.parent)


def replace_file(
    path: Path, content: str | bytes, *, is_durable: bool = True, mode: int | None = None
) -> None:
    """Replace the file's content; an ``OSError`` names the file."""
    try:
        with replacing(path, is_durable=is_durable, mode=mode) as file:
            file.write(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        error.filename = error.filename or str(path)  # A write to a descriptor names none.
        raise


def sync_folder(folder: Path) -> None:
    """Flush a folder to the disk: a new name in it is durable only then."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
