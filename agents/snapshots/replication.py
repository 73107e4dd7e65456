"""Copies of what only this node holds go to another one, whose loss is another event.

A worker's snapshot names, piece by piece, the node that is to hold a copy, or leaves it to us to
find one that stands by. One file after the other is sent, not faster than the set rate as long as
training needs the network too; a node that is about to go sends its newest first, and as fast as
it can.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import aiohttp

from agents.protocol.records import JobId, NodeId, NodeRecord
from agents.rpc.client import read_answer
from agents.rpc.signing import (
    REPLY_HEADER,
    REQUEST_HEADER,
    SignatureError,
    check_reply,
    sign_request,
)
from agents.snapshots.memory import Snapshot, head_checksum
from agents.snapshots.partial_file import excerpt
from worker.checkpoint import snapshot_file
from worker.checkpoint.snapshot_file import ANY_NODE

CONNECT_S = 2.0
SILENT_S = 30.0
"""Who takes nothing for so long does not take it."""
RETRY_S = 0.3
PATIENCE_S = 20.0
LOOK_S = 0.1
"""So soon a transfer that is held back sees that the node is about to go."""
OTHERS_S = 1.0
"""How old the list of nodes may be; a copy for each step must not ask the store each time."""
ANSWER_BYTES_MAX = 1 << 16


class Refused(Exception):  # noqa: N818 - an answer like any other: it was not taken
    """A node did not take a copy; the text says why."""


@dataclass(eq=False)
class Buddies:
    """What is yet to be copied, and the way to do it."""

    session: aiohttp.ClientSession
    key: bytes
    node: Callable[[], NodeRecord]
    """As this node stands in the store."""
    find: Callable[[NodeId], NodeRecord | None]
    others: Callable[[], Awaitable[tuple[NodeRecord, ...]]]
    """All nodes, as they stand in the store now."""
    rate_bytes_s: float
    is_present: Callable[[Snapshot], bool]
    """The generation goes on that it is of."""
    done: Callable[[Snapshot, str], None]
    """A snapshot needs no more copies; the text says what could not be copied, and why."""
    patience_s: float = PATIENCE_S
    outlives_zone: Callable[[JobId], bool] = lambda _: False
    """A job's copies are to stand in another zone."""
    _has_given_up: bool = False
    _waiting: list[Snapshot] = field(default_factory=list)
    _seen: tuple[NodeRecord, ...] = ()
    _seen_at: float = float("-inf")
    _woken: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_idle(self) -> bool:
        """Nothing is on its way."""
        return not self._waiting

    def add(self, snapshot: Snapshot) -> None:
        """Have it copied where its pieces say."""
        self._waiting.append(snapshot)
        self._woken.set()

    async def run(self) -> None:
        """Copy, for ever."""
        while True:
            await self._woken.wait()
            while self._waiting:
                snapshot = self._next()
                trouble = await self._insist(snapshot)
                self._waiting.remove(snapshot)
                self.done(snapshot, trouble)
            self._woken.clear()

    def _next(self) -> Snapshot:
        choose = max if self._is_leaving() else min
        return choose(self._waiting, key=lambda each: (each.point, -each.header.rank))

    def _is_leaving(self) -> bool:
        return self.node().state == "draining"

    async def _insist(self, snapshot: Snapshot) -> str:
        """Try for a while, as an agent may just be starting anew; return what is wrong still.

        Training does not wait for what nobody can take, and not again for each snapshot.
        """
        deadline = time.monotonic() + (0.0 if self._has_given_up else self.patience_s)
        while True:
            missing, remark = await self._replicate(snapshot)
            if not missing or time.monotonic() > deadline or not self.is_present(snapshot):
                break
            await asyncio.sleep(RETRY_S)
        self._has_given_up = bool(missing)
        return missing or remark

    async def _replicate(self, snapshot: Snapshot) -> tuple[str, str]:
        """Return what could not be copied, and what is to be said of the rest."""
        wanted: dict[NodeId, list[tuple[int, int]]] = {}
        for piece in snapshot.header.pieces:
            if piece.buddy is not None:
                wanted.setdefault(NodeId(piece.buddy), []).append(piece.key)
        missing, remarks = [], set()
        for buddy, keys in wanted.items():
            reason, remark = await self._place(snapshot, buddy, keys)
            if reason:
                name, step = snapshot.path.name, snapshot.point.step
                missing.append(f"no copy of snapshot {name} of step {step}: {reason}")
            remarks.add(remark)
        return "; ".join(missing), "; ".join(sorted(remarks - {""}))

    async def _place(
        self, snapshot: Snapshot, buddy: NodeId, keys: list[tuple[int, int]]
    ) -> tuple[str, str]:
        copy = snapshot_file.partial_header(snapshot.header, keys)
        reasons = []
        for node in await self._candidates(snapshot.job, buddy):
            try:
                await self._send(snapshot, copy, node)
            except Refused as refusal:
                reasons.append(f"{node.name} {refusal}")
            except (OSError, snapshot_file.SnapshotError):
                return "", ""  # It was let go, or written over: a newer one is there or to come.
            else:
                return "", self._remark(snapshot.job, node)
        if not reasons and buddy == ANY_NODE:
            return "", self._remark(snapshot.job, None)  # Nobody stands by: it must do without.
        return ", ".join(reasons) or "there is no other node", ""

    def _remark(self, job: JobId, taker: NodeRecord | None) -> str:
        """Where no other zone has anybody who takes them, copies in this one must do."""
        zone = self.node().zone
        if not self.outlives_zone(job) or (taker is not None and taker.zone != zone):
            return ""
        return f"copies stay in {zone}: no node in another zone stands by"

    async def _candidates(self, job: JobId, buddy: NodeId) -> list[NodeRecord]:
        """The one that was chosen, then those of the same zone, as what leaves it costs money.

        If the job is to outlive its zone, all others come before one of this zone, and of these
        none does but the chosen one.
        """
        own, chosen = self.node(), None if buddy == ANY_NODE else self.find(buddy)
        is_far = self.outlives_zone(job)
        found = [] if chosen is None else [chosen]
        for node in sorted(await self._others(), key=lambda n: (n.zone != own.zone, n.id)):
            is_too_near = is_far and node.zone == own.zone
            is_there = node.state == "ready" and node.address
            if is_there and not is_too_near and node.id not in {own.id, buddy}:
                found.append(node)
        return sorted(found, key=lambda node: is_far and node.zone == own.zone)

    async def _others(self) -> tuple[NodeRecord, ...]:
        """All nodes, as they stood in the store of late."""
        if time.monotonic() > self._seen_at + OTHERS_S:
            self._seen = await self.others() or self._seen
            self._seen_at = time.monotonic()
        return self._seen

    async def _send(self, snapshot: Snapshot, copy: snapshot_file.Header, node: NodeRecord) -> None:
        point = snapshot.point
        path = (
            f"/v1/memory/{snapshot.job}/{point.generation}-{point.step}/{copy.file_name}"
            f"?header={head_checksum(copy)}"
        )
        header, nonce = sign_request(self.key, "PUT", path, b"", at=time.time())
        lost: list[Exception] = []
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENT_S)
        try:
            async with self.session.put(
                f"http://{node.address}{path}",
                data=self._stream(snapshot, copy, lost),
                headers={REQUEST_HEADER: header, "Content-Length": str(copy.total_bytes)},
                timeout=timeout,
                allow_redirects=False,
            ) as reply:
                answer = await read_answer(reply, ANSWER_BYTES_MAX)
                signature = reply.headers.get(REPLY_HEADER)
                check_reply(self.key, nonce, reply.status, answer, signature)
                if reply.status != 200:
                    raise Refused(f"says: {answer.decode(errors='replace').strip()}")
        except (aiohttp.ClientError, TimeoutError, SignatureError, ValueError) as error:
            if lost:
                raise lost[0] from None  # The session makes an error of its own of it.
            raise Refused(f"was not reached ({error})") from None

    async def _stream(
        self, snapshot: Snapshot, copy: snapshot_file.Header, lost: list[Exception]
    ) -> AsyncIterator[bytes]:
        sent, begun = 0, time.monotonic()
        try:
            for chunk in excerpt(snapshot.path, copy):
                yield chunk
                sent += len(chunk)
                due = begun + sent / self.rate_bytes_s
                while not self._is_leaving() and (ahead_s := due - time.monotonic()) > 0:
                    await asyncio.sleep(min(ahead_s, LOOK_S))
        except (OSError, snapshot_file.SnapshotError) as error:
            lost.append(error)
            raise
