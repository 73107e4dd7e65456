"""Describes an error in a sentence, for reports and answers."""

from __future__ import annotations

import errno
from pathlib import Path


def describe_error(error: Exception, path: Path) -> str:
    """Return what went wrong, with the file that an ``OSError`` names, else ``path``."""
    if isinstance(error, OSError) and error.strerror:
        cure = "; free room there" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        return f"{error.filename or path}: {error.strerror}{cure}"
    return str(error) or type(error).__name__
