"""An etcd of three members, of which any can be killed, suspended and restarted."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

from agents.daemon.process_cleanup import mark
from tests.agents.store.places import ETCD, Cluster

SIZE = 3
ARGUMENTS = (
    # No power cut is simulated, so fsync is not needed; and the cores are busy.
    *("--unsafe-no-fsync", "--heartbeat-interval", "100", "--election-timeout", "1000"),
)


class Members(Cluster):
    """The members, marked as the cluster's processes so that they end with it."""

    def __init__(self, folder: Path) -> None:
        if ETCD is None:
            raise SystemExit(
                "there is no etcd here: install etcd-server, or leave out --store etcd"
            )
        self._mark = mark(folder)
        super().__init__(SIZE, arguments=ARGUMENTS)

    def start(self, members: Sequence[int] | None = None) -> None:
        with patch.dict(os.environ, self._mark):
            super().start(members)

    def pids(self) -> list[int]:
        """Return the process ids of all running members."""
        return [each.pid for each in self.processes if each is not None and each.poll() is None]

    def close(self) -> None:
        for pid in self.pids():
            os.kill(pid, signal.SIGCONT)
        super().close()
