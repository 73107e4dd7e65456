"""Where the services' secrets lie: with systemd's credentials, or in files."""

from __future__ import annotations

import os
from pathlib import Path


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
