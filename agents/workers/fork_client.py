"""The agent's side of the warm parent: it is started once, and forks workers when asked."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agents.workers.pidfd import ProcessId

NURSERY_S = 120.0
"""For the warm parent to import what workers need."""
LINE_BYTES_MAX = 1 << 20


@dataclass(eq=False)
class WarmParent:
    """A process that has imported what workers need (``agents.workers.fork_server``)."""

    folder: Path
    module: str
    orphan_s: float
    """Without a word from an agent, and without children, it ends after so long."""
    _process: asyncio.subprocess.Process | None = None
    """If we started it."""
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def settle(self) -> None:
        """Return when all is done that an agent before us asked for; no matter if it is gone."""
        with contextlib.suppress(OSError):
            await self._ask({"ask": "sync"})

    async def up(self) -> None:
        """Return when it is there; start it if it is not."""
        async with self._lock:
            with contextlib.suppress(OSError):
                await self._ask({"ask": "sync"})
                return
            await self._begin()

    async def fork(self, home: Path, spec: dict[str, Any]) -> ProcessId:
        """Have a worker; all about its process stands in its folder before it runs."""
        await self._ask({"ask": "fork", "folder": str(home), "spec": spec})
        born = json.loads((home / "process.json").read_text(encoding="utf-8"))
        return ProcessId(born["pid"], born["start"])

    async def end(self) -> None:
        """Let it go, even while it only comes up; its children stay."""
        try:
            await self._ask({"ask": "end"})
        except OSError:
            if self._process is not None and self._process.returncode is None:
                self._process.kill()

    async def _begin(self) -> None:
        with (self.folder / "nursery.log").open("ab") as output:
            process = self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "agents.workers.fork_server"),
                *(str(self.folder / "nursery.sock"), self.module, str(self.orphan_s)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(NURSERY_S):
                while process.returncode is None:
                    with contextlib.suppress(OSError):
                        await self._ask({"ask": "sync"})
                        return
                    await asyncio.sleep(0.02)
        raise OSError(f"the warm parent did not come up; see {self.folder / 'nursery.log'}")

    async def _ask(self, question: dict[str, Any]) -> None:
        path = self.folder / "nursery.sock"
        reader, writer = await asyncio.open_unix_connection(path, limit=LINE_BYTES_MAX)
        try:
            writer.write(json.dumps(question).encode() + b"\n")
            if not await reader.readline():
                raise ConnectionError("the warm parent ended")
        finally:
            writer.close()
