"""Uploads snapshots to the durable store: one object for each file, under a name used once.

The name holds the generation, the step, the rank and the node's id, so that no two writers use
the same name.
"""

from __future__ import annotations

import asyncio
import errno
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import fsspec

from agents.daemon.backoff import Backoff
from agents.daemon.failpoints import failpoint
from agents.object_store import ObjectContent, write_once
from agents.protocol.records import JobId, NodeId, Uploaded
from agents.snapshots.memory import SnapshotFile, head_checksum, holdings
from agents.snapshots.partial_file import read_pieces
from worker.checkpoint import snapshot_file

RETRY_S = 2.0
RETRY_S_MAX = 60.0
SILENT_S = 300.0
"""An upload without progress for so long is reported; it goes on."""
THREADS = 2
END_S = 1.0
"""How long an agent that ends waits until the store has deleted what is incomplete."""


@dataclass(eq=False, kw_only=True)
class Uploader:
    """The queue of snapshots to upload."""

    node: Callable[[], NodeId]
    uri: Callable[[JobId], str | None]
    """The durable store of a job; ``None``: it has none."""
    is_wanted: Callable[[SnapshotFile], bool]
    """Whether its generation is the present one, and it is not uploaded yet."""
    is_paused: Callable[[], Awaitable[bool]]
    """Whether to start nothing: this node is about to leave, and others can hold the bytes."""
    done: Callable[[SnapshotFile, Uploaded | None], None]
    """Called when it is uploaded, or with ``None`` when it is not wanted any more."""
    failed: Callable[[SnapshotFile, str], None]
    """Called with the reason when an attempt has failed."""
    is_known: Callable[[JobId], bool] = lambda _: True
    """Whether the job was read from the store: an agent that has just started knows none yet."""
    retry_s: float = RETRY_S
    silent_s: float = SILENT_S
    _waiting: asyncio.Queue[SnapshotFile] = field(default_factory=asyncio.Queue)
    _threads: set[threading.Thread] = field(default_factory=set)
    _sending: dict[Path, asyncio.Future[None]] = field(default_factory=dict)
    """Files that are being sent, not those that wait for their turn or for a retry."""

    def add(self, snapshot: SnapshotFile) -> None:
        """Queue a snapshot."""
        self._waiting.put_nowait(snapshot)

    def is_sending(self, snapshot: SnapshotFile) -> bool:
        """Return whether the store is being given this file now."""
        return snapshot.path in self._sending

    def give_up(self, snapshot: SnapshotFile) -> None:
        """End the upload of a file that was deleted: its turn is another one's, even if the store
        hangs."""
        if (sending := self._sending.get(snapshot.path)) is not None:
            sending.cancel()

    async def run(self) -> None:
        """Upload, forever, ``THREADS`` snapshots at a time."""
        async with asyncio.TaskGroup() as group:
            for _ in range(THREADS):
                group.create_task(self._work())

    async def _work(self) -> None:
        while True:
            snapshot = await self._waiting.get()
            self.done(snapshot, await self._upload(snapshot))

    async def _upload(self, snapshot: SnapshotFile) -> Uploaded | None:
        """Retry until it is uploaded, or not wanted any more."""
        keys = [piece.key for piece in snapshot.header.pieces if piece.is_written]
        if not keys:
            return None
        part = snapshot_file.partial_header(snapshot.header, keys)
        backoff = Backoff(self.retry_s, RETRY_S_MAX)
        while self.is_wanted(snapshot):
            if not self.is_known(snapshot.job) or await self.is_paused():
                await asyncio.sleep(self.retry_s)
                continue
            target = self.target(snapshot)
            if target is None:
                return None
            pause_s = backoff.next_s()
            try:
                await self._send(snapshot, target, part)
            except snapshot_file.SnapshotError as error:
                self._report(snapshot, str(error))
                return None
            except Exception as error:
                # Each backend of fsspec raises errors of its own; none of them may end the agent.
                tried = f"tried at {time.strftime('%H:%M:%S %Z')}, again in {pause_s:g} s"
                self._report(snapshot, f"{target}: {reason_of(error)}; {tried}")
            else:
                held = holdings([snapshot], lambda piece: piece.is_written)
                checksum = head_checksum(part)
                return Uploaded(snapshot.point, target, part.total_bytes, checksum, held)
            if self.is_wanted(snapshot):
                await asyncio.sleep(pause_s)
        return None

    def _report(self, snapshot: SnapshotFile, reason: str) -> None:
        """Report a failure, unless it is of a past generation: nothing would end that trouble."""
        if self.is_wanted(snapshot):
            self.failed(snapshot, reason)

    async def _send(self, snapshot: SnapshotFile, target: str, part: snapshot_file.Header) -> None:
        """Upload in a thread, and report when the store takes nothing more: it may hang.

        An upload that is not wanted any more is given up then, so that it does not hold up others.
        """
        taken: list[bool] = []
        given_up = threading.Event()

        def advanced() -> None:
            if given_up.is_set():
                raise OSError("the upload was given up")
            taken.append(True)

        sending = self._start(lambda: upload_pieces(target, snapshot.path, part, advanced))
        self._sending[snapshot.path] = sending
        try:
            while not (await asyncio.wait([sending], timeout=self.silent_s))[0]:
                if not taken:
                    text = f"the storage has taken nothing for {self.silent_s:g} s"
                    if not self.is_wanted(snapshot):
                        raise OSError(text)
                    self.failed(snapshot, f"{target}: {text}")
                taken.clear()
            if sending.cancelled():
                raise OSError("the upload was given up")
            await sending
        finally:
            self._sending.pop(snapshot.path, None)
            given_up.set()
            sending.cancel()

    def _start(self, work: Callable[[], None]) -> asyncio.Future[None]:
        """Start a thread for which the end of the process does not wait, unlike an executor's."""
        ended: Future[None] = Future()
        ended.set_running_or_notify_cancel()

        def run() -> None:
            try:
                work()
            except BaseException as error:
                ended.set_exception(error)
            else:
                ended.set_result(None)
            self._threads.discard(thread)

        thread = threading.Thread(target=run, name="upload", daemon=True)
        self._threads.add(thread)
        thread.start()
        return asyncio.wrap_future(ended)

    def target(self, snapshot: SnapshotFile) -> str | None:
        """Return the only URI under which this node writes the file; ``None``: no store is set."""
        uri = self.uri(snapshot.job)
        if uri is None:
            return None
        point, rank = snapshot.point, snapshot.header.rank
        folder = f"{snapshot.job}/{point.generation}-{point.step}"
        return f"{uri.rstrip('/')}/{folder}/{rank}-{self.node()}{snapshot_file.SUFFIX}"

    def close(self) -> None:
        """Wait for a moment until the uploads that were given up have ended."""
        by = time.monotonic() + END_S
        for thread in list(self._threads):
            thread.join(max(0.0, by - time.monotonic()))


def upload_pieces(
    uri: str,
    path: Path,
    part: snapshot_file.Header,
    advanced: Callable[[], object] = lambda: None,
) -> None:
    """Write the pieces of ``part``, a part of the sealed file at ``path``, as one object.

    ``advanced`` is called whenever the store has taken some bytes.
    """

    def chunks() -> Iterator[bytes]:
        for chunk in read_pieces(path, part):
            yield chunk
            advanced()
            failpoint("uploading", part.generation)

    system, target = fsspec.core.url_to_fs(uri)
    head = snapshot_file.head_bytes(part)
    write_once(system, target, ObjectContent(chunks, part.total_bytes, head))


_CURES = {
    errno.ENOSPC: "the storage is full: make room there",
    errno.EDQUOT: "the quota is used up: raise it, or make room there",
    errno.EROFS: "the file system is read-only: mount it for writing on this node",
    errno.EACCES: "the permission is missing: let the agent's user write there",
}


def reason_of(error: Exception) -> str:
    """Say why an upload failed, and the cure if that is known."""
    if isinstance(error, OSError) and error.errno in _CURES:
        return _CURES[error.errno]
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).partition("\n")[0] or type(error).__name__
