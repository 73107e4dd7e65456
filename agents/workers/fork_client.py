"""The agent's side of the fork server: starts it once, and asks it to fork workers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agents.workers.pidfd import ProcessId

START_S = 120.0
"""For the fork server to import what workers need."""
LOOK_S = 0.02
LINE_BYTES_MAX = 1 << 20


@dataclass(eq=False)
class ForkClient:
    """The connection to a fork server (``agents.workers.fork_server``) in ``folder``."""

    folder: Path
    module: str
    """The worker's module, which the fork server imports."""
    orphan_s: float
    """The fork server ends when it has no children and no agent has called for so long."""
    _process: asyncio.subprocess.Process | None = None
    """The fork server, if we started it."""
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def wait_settled(self) -> None:
        """Return when a running fork server has done all that an earlier agent asked for."""
        with contextlib.suppress(OSError):
            await self._ask({"ask": "sync"})

    async def ensure_running(self) -> None:
        """Return when the fork server runs; start it if it does not."""
        async with self._lock:
            with contextlib.suppress(OSError):
                await self._ask({"ask": "sync"})
                return
            await self._start()

    async def fork(self, home: Path, spec: dict[str, Any]) -> ProcessId:
        """Fork a worker; its ``process.json`` is written before it runs."""
        await self._ask({"ask": "fork", "folder": str(home), "spec": spec})
        born = json.loads((home / "process.json").read_text(encoding="utf-8"))
        return ProcessId(born["pid"], born["start"])

    async def close(self) -> None:
        """End the fork server, also while it still starts; its children go on."""
        try:
            await self._ask({"ask": "end"})
        except OSError:
            if self._process is not None and self._process.returncode is None:
                self._process.kill()

    async def _start(self) -> None:
        log = self.folder / "fork_server.log"
        with log.open("ab") as output:
            process = self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "agents.workers.fork_server"),
                *(str(self._socket), self.module, str(self.orphan_s)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_S):
                while process.returncode is None:
                    with contextlib.suppress(OSError):
                        await self._ask({"ask": "sync"})
                        return
                    await asyncio.sleep(LOOK_S)
        raise OSError(f"the fork server did not start; see {log}")

    async def _ask(self, question: dict[str, Any]) -> None:
        reader, writer = await asyncio.open_unix_connection(self._socket, limit=LINE_BYTES_MAX)
        try:
            writer.write(json.dumps(question).encode() + b"\n")
            if not await reader.readline():
                raise ConnectionError("the fork server ended")
        finally:
            writer.close()

    @property
    def _socket(self) -> Path:
        return self.folder / "fork_server.sock"
