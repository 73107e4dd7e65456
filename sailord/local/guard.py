"""Cleans up after a launcher that was killed.

``python -m sailord.local.guard FOLDER`` waits for the end of its input, which comes when the
launcher ends. After an orderly end there is nothing left to do.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from agents.daemon.process_cleanup import kill_all
from sailord.local.paths import LocalFolders


def main(folder: Path) -> None:
    """Wait for the end of input, then kill all processes and delete the folders."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.read()
    kill_all(folder)
    LocalFolders(folder, port=0).remove()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
