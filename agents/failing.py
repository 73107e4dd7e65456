"""Named places at which a daemon dies, so that tests can see what the others make of it.

``SAILOR_FAIL_AT=NAME`` names one, or ``NAME@GENERATION`` one as a generation passes it. The names
are those of commands, which are the arrows from one state to the next: ``WriteGeneration`` dies
before that is carried out, ``after WriteGeneration`` as soon as it is.
"""

from __future__ import annotations

import os
import signal
import sys

FAIL_AT = "SAILOR_FAIL_AT"


def reached(name: str, generation: int | None = None) -> None:
    """Die here, if that is what is wanted."""
    wanted = os.environ.get(FAIL_AT)
    if wanted is not None and wanted in (name, f"{name}@{generation}"):
        sys.stderr.write(f"{FAIL_AT}={wanted}\n")
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)
