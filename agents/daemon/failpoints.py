"""Named places at which a daemon dies, so that tests can see what the others make of it.

``SAILOR_FAIL_AT=NAME`` names one, or ``NAME@GENERATION`` one as a generation passes it. The names
are those of commands, which are the arrows from one state to the next: ``WriteGeneration`` dies
before that is carried out, ``after WriteGeneration`` as soon as it is. An agent may also die in
the middle of what lasts: ``uploading`` an object, ``receiving`` a copy, ``serving`` a piece.
``SAILOR_FAIL_AT=/FILE`` names a file in which the place may be written while the daemon runs:
whoever comes by removes the file and dies, so that nobody dies twice. An agent's workers look at
``/FILE.worker``.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

FAIL_AT = "SAILOR_FAIL_AT"


def failpoint(name: str, generation: int | None = None) -> None:
    """Die here, if that is what is wanted."""
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
        return False  # Nothing is wanted of anybody, or another came first.
    return True
