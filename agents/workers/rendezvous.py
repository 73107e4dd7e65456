"""The address where the ranks of a generation meet: rank 0's node knows it, others ask for it."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

from agents.protocol.records import JobId
from agents.rpc.client import CallFailed, SignedClient, agent_of

WAIT_S = 5.0
"""How long an agent that does not know the address yet delays its answer."""
ANSWER_S = 2.0
"""How long the answer may take beyond that."""


@dataclass(eq=False)
class Rendezvous:
    """The address of the newest generation, and the request for it."""

    client: SignedClient
    _known: tuple[JobId, int, str] | None = None
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def publish(self, job: JobId, generation: int, address: str) -> None:
        """Set the address, which rank 0 on this node has opened, and wake all that wait for it."""
        async with self._changed:
            self._known = (job, generation, address)
            self._changed.notify_all()

    async def wait(self, job: JobId, generation: int) -> str | None:
        """Return the address as soon as it is known here; ``None`` after ``WAIT_S``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WAIT_S), self._changed:
                while (address := self.known(job, generation)) is None:
                    await self._changed.wait()
                return address
        return None

    def known(self, job: JobId, generation: int) -> str | None:
        """Return the address if it is known here."""
        known = self._known
        return known[2] if known is not None and known[:2] == (job, generation) else None

    async def ask(self, address: str, name: str, job: JobId, generation: int) -> str | None:
        """Ask the agent of rank 0's node, which has this name; ``None``: it gave no address."""
        path = f"/v1/meeting/{job}/{generation}"
        with contextlib.suppress(CallFailed, UnicodeDecodeError):
            status, answer = await self.client.call(
                address, "GET", path, to=agent_of(name), timeout_s=WAIT_S + ANSWER_S
            )
            if status == 200:
                return answer.decode()
        return None
