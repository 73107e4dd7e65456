"""Warm parents for many nodes of one machine: what workers need is imported once for all.

``python -m agents.workers.shared_fork_server MODULE`` reads the address of an agent's warm parent
from each line of its input, forks that parent, and answers with its number. An agent that finds
its warm parent there starts none. It ends, and leaves the warm parents, when its input does.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from agents.workers.fork_server import Nursery


def main(name: str) -> None:
    """Import what workers need, then fork a warm parent for each line."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    module = importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # The kernel buries those that are killed.
    for line in sys.stdin:
        path = Path(line.rstrip("\n"))
        pid = os.fork()
        if pid == 0:
            _be_nursery(path, module)
        print(pid, flush=True)


def _be_nursery(path: Path, module: ModuleType) -> NoReturn:
    try:
        os.setsid()
        log = os.open(path.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for number in (1, 2):
            os.dup2(log, number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.closerange(3, 1024)
        Nursery(path, module).run()
    finally:
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
