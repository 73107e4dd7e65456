"""Where a node keeps the values of secrets: files in a folder, or the agent's environment."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path


class SecretsError(Exception):
    """Secrets of a job are missing on the node; the message names them."""


def find_secrets(folder: Path | None, names: Iterable[str]) -> dict[str, Path | None]:
    """Return the file of each secret; ``None``: it is in the environment."""
    found: dict[str, Path | None] = {}
    missing = []
    for name in names:
        path = None if folder is None else folder / name
        if path is not None and path.is_file():
            found[name] = path
        elif os.environ.get(name):
            found[name] = None
        else:
            missing.append(name)
    if missing:
        where = "in the agent's environment"
        if folder is not None:
            where = f"as files in {folder}, or {where}"
        raise SecretsError(
            f"secrets are missing on this node: {', '.join(missing)}; give them {where}"
        )
    return found


def check_group_reads(found: Mapping[str, Path | None], group: int) -> None:
    """Raise ``SecretsError`` unless workers of another user with this group can read all."""
    closed = []
    for name, path in found.items():
        if path is not None:
            about = path.stat()
            bits = 0o044 if about.st_gid == group else 0o004
            if not about.st_mode & bits:
                closed.append(f"{name} ({path})")
    if closed:
        cure = "chgrp it to the group of sailor-worker.service, and chmod 640"
        raise SecretsError(f"workers cannot read secrets: {', '.join(closed)}; {cure}")


def read_secrets(found: Mapping[str, Path | None]) -> dict[str, str]:
    """Read the values; an end of line at the end of a file is no part of one."""
    return {
        name: os.environ[name] if path is None else _read(name, path)
        for name, path in found.items()
    }


def _read(name: str, path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8").rstrip("\r\n")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        what = f"secret {name} on this node is not text, as a variable must be"
        raise SecretsError(f"{what}; encode it in {path}, as base64 for example")
    return text
