"""Where the ranks of a generation meet: known on rank 0's node, asked for on all others."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

from agents.protocol.records import JobId
from agents.rpc.client import CallFailed, Peers

WAIT_S = 5.0
"""So long an agent that does not know the place yet keeps its answer back."""
ANSWER_S = 2.0
"""And so long the answer may take beyond that."""


@dataclass(eq=False)
class Meeting:
    """The meeting place of the newest generation, and the way to ask for it."""

    peers: Peers
    _known: tuple[JobId, int, str] | None = None
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def tell(self, job: JobId, generation: int, place: str) -> None:
        """Rank 0 is here, and has opened the place."""
        async with self._changed:
            self._known = (job, generation, place)
            self._changed.notify_all()

    async def wait(self, job: JobId, generation: int) -> str | None:
        """The place, as soon as it is known here; ``None``: it is not, after a while."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WAIT_S), self._changed:
                while (place := self.known(job, generation)) is None:
                    await self._changed.wait()
                return place
        return None

    def known(self, job: JobId, generation: int) -> str | None:
        """The place, if it is known here."""
        known = self._known
        return known[2] if known is not None and known[:2] == (job, generation) else None

    async def ask(self, agent: str, job: JobId, generation: int) -> str | None:
        """Ask the agent of rank 0's node for the place; ``None``: it does not say."""
        path = f"/v1/meeting/{job}/{generation}"
        with contextlib.suppress(CallFailed, UnicodeDecodeError):
            status, answer = await self.peers.call(agent, "GET", path, timeout_s=WAIT_S + ANSWER_S)
            if status == 200:
                return answer.decode()
        return None
