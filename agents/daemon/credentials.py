"""Where the services' secrets lie: with systemd's credentials, or in files."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from simulator.documents.problems import InputError, Problem


def secret_path(name: str, folder: Path) -> Path:
    """Return the file of a secret that a configuration names.

    A bare file name is the unit's credential (``LoadCredential=``) if it has one of that name;
    everything else is a path, relative to the configuration's folder.
    """
    given = os.environ.get("CREDENTIALS_DIRECTORY")
    if given is not None and "/" not in name:
        credential = Path(given, name)
        if credential.exists():
            return credential
    return folder / name


def check_mode(path: Path, cure: str = "") -> None:
    """Refuse a secret file that others than its owner may use.

    Credentials of systemd are read-only copies for this service alone.
    """
    given = os.environ.get("CREDENTIALS_DIRECTORY")
    if given is not None and path.is_relative_to(given):
        return
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError as error:
        problem = Problem(str(path), f"cannot be read: {error.strerror}", cure)
        raise InputError(problem) from None
    if mode & 0o077:
        what = f"is a secret, and its mode {mode:04o} lets others use it"
        raise InputError(Problem(str(path), what, f"chmod 600 {path}"))
