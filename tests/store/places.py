"""Stores to try the contract on: each can be opened, and most can be killed and started again."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Protocol

from agents.store import EmbeddedStore, Store, open_store

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 2.0
"""Of every call; what an outage costs the tests that wait for it."""
HISTORY_MAX = 50
"""Small, so that the embedded stores forget soon."""


class Place(Protocol):
    """Somewhere a store is."""

    async def open(self) -> Store:
        """One more way to it."""
        ...

    async def compact(self, store: Store) -> None:
        """Make it forget the changes so far."""
        ...

    def close(self) -> None:
        """Leave nothing behind."""
        ...


class Server(Place, Protocol):
    """A store that runs elsewhere and can die."""

    def start(self) -> None: ...

    def kill(self) -> None: ...


class Embedded:
    """Inside this very process; all that open it have one and the same."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "store.db"
        self._store: EmbeddedStore | None = None

    async def open(self) -> Store:
        if self._store is None:
            self._store = await EmbeddedStore.open(self.file, history_max=HISTORY_MAX)
        return self._store

    async def compact(self, store: Store) -> None:
        await write_much(store)

    def close(self) -> None:
        pass


class Socket:
    """Inside another process, through its socket."""

    def __init__(self) -> None:
        # A socket's path must be short, and those of pytest's folders need not be.
        self._folder = tempfile.TemporaryDirectory(prefix="sailor-")
        self.folder = Path(self._folder.name)
        self.socket = self.folder / "store.sock"
        self.start()

    async def open(self) -> Store:
        return await open_store(f"unix://{self.socket}?timeout_s={TIMEOUT_S}")

    async def compact(self, store: Store) -> None:
        await write_much(store)

    def start(self) -> None:
        script = ROOT / "tests" / "store" / "serving.py"
        command = [sys.executable, script, self.folder / "store.db", self.socket, str(HISTORY_MAX)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(command, env=environment)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        self._folder.cleanup()


async def write_much(store: Store) -> None:
    """More changes than an embedded store of these tests remembers."""
    for _ in range(2 * HISTORY_MAX + 2):
        await store.put("/elsewhere", b"")
