"""Replicates the pieces that only this node holds to a buddy node.

A snapshot names the buddy of each such piece (``buddies_of`` in ``worker.checkpoint.placement``) or
leaves the choice to the agent (``_candidates``). Files are sent one after the other, no faster than
the set rate while training needs the network too. A draining node sends its newest snapshot first,
at full speed.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from dataclasses import dataclass, field

import aiohttp

from agents.protocol.records import JobId, NodeId, NodeRecord
from agents.rpc.client import CallFailed, SignedClient, StreamedBody, agent_of
from agents.snapshots.memory import SnapshotFile, head_checksum
from agents.snapshots.partial_file import read_pieces
from worker.checkpoint import snapshot_file
from worker.checkpoint.snapshot_file import ANY_NODE

CONNECT_S = 2.0
SILENT_S = 30.0
"""A transfer fails after so long without progress, ..."""
PREPARED_BYTES_S = 1e9
"""... and the time that the file takes at this rate: its buddy takes no bytes while it makes room
for all of it, and gives no answer while it checks it."""
RETRY_S = 0.3
PATIENCE_S = 20.0
"""How long a replication is retried: an agent may be restarting."""
LOOK_S = 0.1
"""How soon a throttled transfer notices that this node is draining."""
OTHERS_S = 1.0
"""How old the list of nodes may be: with a replica per step, the store is not read each time."""


class CopyRefused(Exception):  # noqa: N818 - names the outcome of a request
    """A node did not store a replica; the text says why."""


@dataclass(eq=False, kw_only=True)
class Replicator:
    """The queue of snapshots to replicate."""

    client: SignedClient
    node: Callable[[], NodeRecord]
    """This node, as it is registered."""
    find: Callable[[NodeId], NodeRecord | None]
    """Looks up a node, also one that left lately."""
    others: Callable[[], Awaitable[tuple[NodeRecord, ...]]]
    """Reads all registered nodes from the store."""
    rate_bytes_s: float
    is_present: Callable[[SnapshotFile], bool]
    """Whether a snapshot belongs to the present generation."""
    done: Callable[[SnapshotFile, str], None]
    """Called when a snapshot is handled; the text says what could not be replicated, and why."""
    patience_s: float = PATIENCE_S
    outlives_zone: Callable[[JobId], bool] = lambda _: False
    """Whether the job's replicas must be in another zone."""
    takes_replicas: Callable[[NodeId, JobId], bool] = lambda _node, _job: True
    """Whether a node is the job's: replicas at another one would never be released."""
    _has_given_up: bool = False
    _waiting: list[SnapshotFile] = field(default_factory=list)
    _sent: tuple[SnapshotFile, asyncio.Timeout] | None = None
    """The snapshot that is being replicated, and the timeout that ends that."""
    _seen: tuple[NodeRecord, ...] = ()
    _seen_at: float = float("-inf")
    _woken: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_idle(self) -> bool:
        """Whether the queue is empty."""
        return not self._waiting

    def add(self, snapshot: SnapshotFile) -> None:
        """Queue a snapshot; give up one of a past generation: training no longer waits for it."""
        self._waiting.append(snapshot)
        self._woken.set()
        if self._sent is not None and self._is_superseded(self._sent[0]):
            with contextlib.suppress(RuntimeError):  # It has just ended.
                self._sent[1].reschedule(asyncio.get_running_loop().time())

    async def run(self) -> None:
        """Replicate, forever."""
        while True:
            await self._woken.wait()
            while self._waiting:
                snapshot = self._next()
                trouble = "" if self._is_superseded(snapshot) else await self._handle(snapshot)
                self._waiting.remove(snapshot)
                self.done(snapshot, trouble)
            self._woken.clear()

    def _is_superseded(self, snapshot: SnapshotFile) -> bool:
        """Return whether its generation is over and the present one waits for replicas."""
        return not self.is_present(snapshot) and any(map(self.is_present, self._waiting))

    async def _handle(self, snapshot: SnapshotFile) -> str:
        """Replicate until it is done, or superseded; return what could not be replicated."""
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._sent = snapshot, limit
                return await self._retry(snapshot)
        except TimeoutError:
            if not limit.expired():
                raise
            return ""
        finally:
            self._sent = None

    def _next(self) -> SnapshotFile:
        choose = max if self._is_draining() else min
        return choose(self._waiting, key=lambda each: (each.point, -each.header.rank))

    def _is_draining(self) -> bool:
        return self.node().state == "draining"

    async def _retry(self, snapshot: SnapshotFile) -> str:
        """Try for ``patience_s``; return what could not be replicated.

        Training waits for this. After a failure, each further snapshot is tried only once.
        """
        deadline = time.monotonic() + (0.0 if self._has_given_up else self.patience_s)
        while True:
            missing, remark = await self._replicate(snapshot)
            if not missing or time.monotonic() > deadline or not self.is_present(snapshot):
                break
            await asyncio.sleep(RETRY_S)
        self._has_given_up = bool(missing)
        return missing or remark

    async def _replicate(self, snapshot: SnapshotFile) -> tuple[str, str]:
        """Return what could not be replicated, and a remark where a retry changes nothing."""
        wanted: dict[NodeId, list[tuple[int, int]]] = {}
        for piece in snapshot.header.pieces:
            if piece.buddy is not None:
                wanted.setdefault(NodeId(piece.buddy), []).append(piece.key)
        missing, remarks = [], set()
        for buddy, keys in wanted.items():
            # Nodes keep one file of each rank: with these pieces a buddy would refuse its own.
            reason, remark = await self._place(snapshot, buddy, keys, spared=wanted.keys())
            if reason:
                name, step = snapshot.path.name, snapshot.point.step
                missing.append(f"no replica of snapshot {name} of step {step}: {reason}")
            remarks.add(remark)
        return "; ".join(missing), "; ".join(sorted(remarks - {""}))

    async def _place(
        self,
        snapshot: SnapshotFile,
        buddy: NodeId,
        keys: list[tuple[int, int]],
        spared: Collection[NodeId],
    ) -> tuple[str, str]:
        part = snapshot_file.partial_header(snapshot.header, keys)
        reasons = []
        for node in await self._candidates(snapshot.job, buddy, spared):
            try:
                await self._send(snapshot, part, node)
            except CopyRefused as refusal:
                reasons.append(f"{node.name} {refusal}")
            except (OSError, snapshot_file.SnapshotError) as error:
                # If it was deleted or reused, a newer snapshot supersedes it.
                return "", f"no replica: {error}" if _is_unchanged(snapshot) else ""
            else:
                return "", self._remark(snapshot.job, node)
        if not reasons and buddy == ANY_NODE:
            return "", self._remark(snapshot.job, None)  # No other node: no replica.
        return ", ".join(reasons) or "there is no other node", ""

    def _remark(self, job: JobId, taker: NodeRecord | None) -> str:
        """Say that a replica stayed in this zone, though the job wants it in another one."""
        zone = self.node().zone
        if not self.outlives_zone(job) or (taker is not None and taker.zone != zone):
            return ""
        return f"replicas stay in {zone}: no node in another zone is ready"

    async def _candidates(
        self, job: JobId, buddy: NodeId, spared: Collection[NodeId]
    ) -> list[NodeRecord]:
        """Order the nodes to try: the named buddy, this zone's, then others, since egress costs.

        ``spared`` are buddies of other pieces of the file, or this one.

        If the job must outlive the zone, nodes of other zones come first, and of this zone only the
        named buddy is tried.
        """
        own, chosen = self.node(), None if buddy == ANY_NODE else self.find(buddy)
        is_far = self.outlives_zone(job)
        found = [] if chosen is None or not self.takes_replicas(chosen.id, job) else [chosen]
        for node in sorted(await self._others(), key=lambda n: (n.zone != own.zone, n.id)):
            is_too_near = is_far and node.zone == own.zone
            is_there = node.state == "ready" and node.address != ""
            is_there = is_there and self.takes_replicas(node.id, job)
            if is_there and not is_too_near and node.id not in {own.id, buddy, *spared}:
                found.append(node)
        return sorted(found, key=lambda node: is_far and node.zone == own.zone)

    async def _others(self) -> tuple[NodeRecord, ...]:
        """Return the registered nodes, at most ``OTHERS_S`` old."""
        if time.monotonic() > self._seen_at + OTHERS_S:
            self._seen = await self.others() or self._seen
            self._seen_at = time.monotonic()
        return self._seen

    async def _send(
        self, snapshot: SnapshotFile, part: snapshot_file.Header, node: NodeRecord
    ) -> None:
        point = snapshot.point
        path = (
            f"/v1/memory/{snapshot.job}/{point.generation}-{point.step}/{part.file_name}"
            f"?header={head_checksum(part)}"
        )
        lost: list[Exception] = []
        silent_s = SILENT_S + part.total_bytes / PREPARED_BYTES_S
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=silent_s)
        headers = {"Content-Length": str(part.total_bytes)}
        try:
            # aiohttp's own limit does not cover the time in which a body is sent.
            async with asyncio.timeout(silent_s) as limit:
                chunks = self._stream(snapshot, part, lost, limit, silent_s)
                stream = StreamedBody(chunks, headers, timeout)
                status, answer = await self.client.call(
                    node.address, "PUT", path, to=agent_of(node.name), stream=stream
                )
        except TimeoutError:
            raise CopyRefused(f"took no bytes for {silent_s:.3g} s") from None
        except CallFailed as error:
            if lost:
                raise lost[0] from None  # The client wraps the error of the stream in its own.
            reason = str(error).removeprefix(f"{node.address}{path}: ")
            raise CopyRefused(f"could not be reached ({reason})") from None
        if status != 200:
            raise CopyRefused(f"answered: {answer.decode(errors='replace').strip()}")

    async def _stream(
        self,
        snapshot: SnapshotFile,
        part: snapshot_file.Header,
        lost: list[Exception],
        limit: asyncio.Timeout,
        silent_s: float,
    ) -> AsyncIterator[bytes]:
        sent, begun, loop = 0, time.monotonic(), asyncio.get_running_loop()
        try:
            for chunk in read_pieces(snapshot.path, part):
                yield chunk
                sent += len(chunk)
                due = begun + sent / self.rate_bytes_s
                while not self._is_draining() and (ahead_s := due - time.monotonic()) > 0:
                    await asyncio.sleep(min(ahead_s, LOOK_S))
                    limit.reschedule(loop.time() + silent_s)
                limit.reschedule(loop.time() + silent_s)
        except (OSError, snapshot_file.SnapshotError) as error:
            lost.append(error)
            raise


def _is_unchanged(snapshot: SnapshotFile) -> bool:
    """Return whether the file has the header it had: a worker that reuses it erases that first."""
    try:
        return snapshot_file.read_header(snapshot.path) == snapshot.header
    except (OSError, snapshot_file.SnapshotError):
        return False
