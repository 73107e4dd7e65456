"""Sends signed requests to agents and checks that their answers are signed with the same key."""

from __future__ import annotations

from dataclasses import dataclass, field

import aiohttp

from agents.protocol.codec import WireError, decode, encode
from agents.protocol.records import Abort, KnownGeneration, NodeRecord, Report
from agents.rpc.client import TIMEOUT_S, CallFailed, SignedClient, agent_of
from agents.rpc.signing import ClusterKey
from agents.rpc.tls import Tls

PROBE_S = 0.2
ANSWER_BYTES_MAX = 16 << 20


@dataclass(eq=False)
class AgentClient:
    """One HTTP session for all agents."""

    key: ClusterKey
    tls: Tls | None = None
    _session: aiohttp.ClientSession | None = field(default=None)

    async def abort(self, node: NodeRecord, word: Abort) -> None:
        """Tell the agent to stop every generation of a job up to the given one."""
        await self.call(node, "POST", "/v1/abort", encode(word))

    async def wake(self, node: NodeRecord) -> None:
        """Ask the agent to read the store now."""
        await self.call(node, "POST", "/v1/wake")

    async def report(self, node: NodeRecord) -> Report:
        """Ask the agent for its report; the call times out after ``PROBE_S``."""
        body = await self.call(node, "GET", "/v1/report", timeout_s=PROBE_S)
        try:
            return decode(Report, body)
        except WireError as error:
            raise CallFailed(str(error)) from None

    async def known_generation(self, node: NodeRecord) -> KnownGeneration:
        """Ask the agent for what it knows of its job's newest generation."""
        try:
            return decode(KnownGeneration, await self.call(node, "GET", "/v1/generation"))
        except WireError as error:
            raise CallFailed(str(error)) from None

    async def call(
        self,
        node: NodeRecord,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        timeout_s: float = TIMEOUT_S,
    ) -> bytes:
        """Send a signed request; raises ``CallFailed`` unless the node's agent answers."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=256), auto_decompress=False
            )
        peers = SignedClient(self._session, self.key, ANSWER_BYTES_MAX, self.tls)
        status, answer = await peers.call(
            node.address, method, path, body, to=agent_of(node.name), timeout_s=timeout_s
        )
        if status >= 400:
            raise CallFailed(f"{node.address}{path} answered {status}")
        return answer

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
