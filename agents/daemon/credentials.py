"""Files that a configuration names: beside it, or among the credentials that systemd passed on."""

from __future__ import annotations

import os
from pathlib import Path

from simulator.documents.fields import InvalidValue, Table

FOLDER = "CREDENTIALS_DIRECTORY"
PREFIX = f"${FOLDER}/"
"""A path that begins so names a credential of the unit (``LoadCredential=``)."""


def find_path(text: str, folder: Path) -> Path:
    """Return where a file lies; paths are relative to ``folder``."""
    if not text.startswith(PREFIX):
        return folder / text
    given = os.environ.get(FOLDER)
    if not given:
        cure = "run this as the unit does (docs/security.md, Secrets as credentials)"
        raise InvalidValue(f"is {text}, and systemd gave this process no credentials", cure)
    return Path(given, text.removeprefix(PREFIX))


def read_path(table: Table, key: str, folder: Path, *, required: bool = False) -> Path | None:
    """Read the key of a configuration that names a file."""
    text = table.text(key, required=required)
    try:
        return None if text is None else find_path(text, folder)
    except InvalidValue as error:
        table.report(key, error.what, error.cure)
        return None
