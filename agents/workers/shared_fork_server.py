"""Forks the fork servers of many nodes of one machine, so that they share their imports.

``python -m agents.workers.shared_fork_server MODULE`` reads from each line of its input the socket
path of a fork server and, after a tab, the file of its network namespace (nothing: this one); it
forks that server, and prints its pid. An agent that finds its fork server running starts none. When
its input ends it ends, and the fork servers go on.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from agents.daemon.namespaces import enter_network_namespace
from agents.workers.fork_server import ForkServer


def main(name: str) -> None:
    """Import the workers' module, then fork a fork server for each line of the input."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    module = importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # The kernel reaps the fork servers.
    for line in sys.stdin:
        path, _, namespace = line.rstrip("\n").partition("\t")
        pid = os.fork()
        if pid == 0:
            _become_fork_server(Path(path), namespace, module)
        print(pid, flush=True)


def _become_fork_server(path: Path, namespace: str, module: ModuleType) -> NoReturn:
    try:
        os.setsid()
        if namespace:
            enter_network_namespace(namespace)
        log = os.open(path.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for number in (1, 2):
            os.dup2(log, number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.closerange(3, 1024)
        ForkServer(path, module).run()
    finally:
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
