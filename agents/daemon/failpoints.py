"""Fail points: named places at which a daemon kills itself, so that tests can see the others react.

``SAILOR_FAIL_AT=NAME`` names one, ``NAME@GENERATION`` one of a generation. Names are those of
commands: ``WriteGeneration`` fails before the command is carried out, ``after WriteGeneration`` as
soon as it is. An agent also has fail points within long operations: ``uploading`` an object,
``receiving`` a replica, ``serving`` a piece, ``fetching`` a package, a folder that is ``prepared``;
sailord has ``StorePart`` and ``ServePart`` of a package. ``SAILOR_FAIL_AT=/FILE`` names a file into
which a test may write a fail point while the daemon runs; the daemon deletes the file before it
kills itself. An agent's workers read ``/FILE.worker``.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

FAIL_AT = "SAILOR_FAIL_AT"


def failpoint(name: str, generation: int | None = None) -> None:
    """Kill this process with SIGKILL, if this fail point is set."""
    wanted = os.environ.get(FAIL_AT)
    if wanted is not None and _is_meant(wanted, (name, f"{name}@{generation}")):
        sys.stderr.write(f"{FAIL_AT}={name}@{generation}\n")
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)


def _is_meant(wanted: str, names: tuple[str, ...]) -> bool:
    if not wanted.startswith("/"):
        return wanted in names
    file = Path(wanted)
    try:
        if file.read_text(encoding="utf-8") not in names:
            return False
        file.unlink()
    except FileNotFoundError:
        return False  # Nothing is set, or another process was faster.
    return True
