"""Sets which process the kernel ends first when memory is short."""

from __future__ import annotations

import contextlib
from pathlib import Path

SCORE = Path("/proc/self/oom_score_adj")


def end_before_the_daemon() -> None:
    """Undo the protection that systemd gave the daemon which started this process."""
    with contextlib.suppress(OSError, ValueError):
        if int(SCORE.read_text(encoding="ascii")) < 0:
            SCORE.write_text("0", encoding="ascii")
