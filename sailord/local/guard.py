"""The last to leave: tidies up after a launcher that was killed.

``python -m sailord.local.guard FOLDER`` waits until nobody holds the other end of its
input any more. Whoever ends well has tidied up before, and leaves it nothing to do.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from agents.daemon.process_cleanup import end_all
from sailord.local.paths import Place


def main(folder: Path) -> None:
    """Wait, then sweep."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.read()
    end_all(folder)
    Place(folder, port=0).remove()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
