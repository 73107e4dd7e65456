"""Brings snapshots to the durable store, each object once and under a name for ever.

The name holds the generation, the step, the rank and the node's life, so that no two writers ever
mean the same object. On a local folder the file is written under another name, brought to the
disk, and renamed; elsewhere an object appears as a whole or not at all, and only where none is if
the store can tell.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from agents.daemon.failpoints import reached
from agents.protocol.records import JobId, NodeId, Uploaded
from agents.snapshots.memory import Snapshot, head_checksum, holdings
from agents.snapshots.partial_file import excerpt
from worker.checkpoint import snapshot_file

RETRY_S = 2.0
RETRY_S_MAX = 60.0
THREADS = 2


@dataclass(eq=False)
class Uploading:
    """What is yet to be brought to the durable store."""

    node: Callable[[], NodeId]
    uri: Callable[[JobId], str | None]
    is_wanted: Callable[[Snapshot], bool]
    """Its generation is the present one, and it is not there yet."""
    is_held_back: Callable[[], bool]
    """This node is about to go, and others can hold the bytes: nothing is begun."""
    done: Callable[[Snapshot, Uploaded | None], None]
    """It is there, or not wanted any more; the file is not needed for that."""
    failed: Callable[[Snapshot, str], None]
    retry_s: float = RETRY_S
    _waiting: asyncio.Queue[Snapshot] = field(default_factory=asyncio.Queue)
    _pool: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(THREADS, thread_name_prefix="upload")
    )

    def add(self, snapshot: Snapshot) -> None:
        """Have it brought there."""
        self._waiting.put_nowait(snapshot)

    async def run(self) -> None:
        """Bring, for ever; several are on their way at once."""
        async with asyncio.TaskGroup() as group:
            for _ in range(THREADS):
                group.create_task(self._work())

    async def _work(self) -> None:
        while True:
            snapshot = await self._waiting.get()
            self.done(snapshot, await self._upload(snapshot))

    async def _upload(self, snapshot: Snapshot) -> Uploaded | None:
        target = self.target(snapshot)
        keys = [piece.key for piece in snapshot.header.pieces if piece.is_written]
        if target is None or not keys:
            return None
        copy = snapshot_file.partial_header(snapshot.header, keys)
        pause_s = self.retry_s
        while self.is_wanted(snapshot):
            if self.is_held_back():
                await asyncio.sleep(self.retry_s)
                continue
            loop = asyncio.get_running_loop()
            try:
                await loop.run_in_executor(self._pool, write_object, target, snapshot.path, copy)
            except snapshot_file.SnapshotError as error:
                self.failed(snapshot, str(error))
                return None
            except Exception as error:
                # Each kind of store has errors of its own kind; none of them ends an agent.
                self.failed(snapshot, f"{target}: {reason_of(error)}")
            else:
                held = holdings([snapshot], lambda piece: piece.is_written)
                checksum = head_checksum(copy)
                return Uploaded(snapshot.point, target, copy.total_bytes, checksum, held)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RETRY_S_MAX)
        return None

    def target(self, snapshot: Snapshot) -> str | None:
        """The one name under which this node may ever write the file; ``None``: nowhere."""
        uri = self.uri(snapshot.job)
        if uri is None:
            return None
        point, rank = snapshot.point, snapshot.header.rank
        folder = f"{snapshot.job}/{point.generation}-{point.step}"
        return f"{uri.rstrip('/')}/{folder}/{rank}-{self.node()}{snapshot_file.SUFFIX}"

    def close(self) -> None:
        """Begin nothing more."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def write_object(uri: str, path: Path, copy: snapshot_file.Header) -> None:
    """Write some pieces of a sealed file as an object, which is there as a whole or not at all."""
    system, target = fsspec.core.url_to_fs(uri)
    if isinstance(system, LocalFileSystem):
        _write_file(Path(target), path, copy)
        return
    system.makedirs(target.rpartition("/")[0], exist_ok=True)
    try:
        _create(system, target, path, copy, "xb")
    except FileExistsError:
        # An earlier try whose answer was lost, or another writer: what is there is looked at.
        if _is_begun(system, target, copy):
            system.rm_file(target)  # It would be in the way for ever.
            raise OSError("half of it stood there, and is removed") from None
        if not _is_there(system, target, copy):
            raise OSError("another object stands there") from None
    except Exception as error:
        if not _knows_no_creation(error):
            raise
        _create(system, target, path, copy, "wb")


def _create(system: Any, target: str, path: Path, copy: snapshot_file.Header, mode: str) -> None:
    """Write the object; with ``xb`` where none is, if the store can tell."""
    out = system.open(target, mode, autocommit=False)
    try:
        _fill(out, path, copy)
        out.close()
        out.commit()
        if not _is_there(system, target, copy):
            raise OSError("less stands there than was written")
    except FileExistsError:
        with contextlib.suppress(Exception):
            out.discard()
        raise
    except BaseException:
        with contextlib.suppress(Exception):
            out.discard()
        with contextlib.suppress(Exception):
            # What is half there is ours alone, and no vote names it; what is whole may have one.
            if not _is_there(system, target, copy):
                system.rm_file(target)
        raise
    finally:
        # fsspec keeps what is committed later for a transaction, which nobody here ends.
        with contextlib.suppress(AttributeError, ValueError):
            system.transaction.files.remove(out)


def _knows_no_creation(error: Exception) -> bool:
    """The store's client or its server does not tell whether an object is there already."""
    is_refused = isinstance(error, OSError) and error.errno in (errno.ENOSYS, errno.EOPNOTSUPP)
    return is_refused or isinstance(error, NotImplementedError) or type(error) is ValueError


def _is_there(system: Any, target: str, copy: snapshot_file.Header) -> bool:
    """Read back: the size, and the header, which has the checksums of all pieces."""
    system.invalidate_cache()
    head = snapshot_file.head_bytes(copy)
    size = system.info(target)["size"]
    is_same = system.cat_file(target, start=0, end=len(head)) == head
    return bool(size == copy.total_bytes and is_same)


def _is_begun(system: Any, target: str, copy: snapshot_file.Header) -> bool:
    """Only the beginning of this very object is there: a try that ended in the middle."""
    system.invalidate_cache()
    head = snapshot_file.head_bytes(copy)
    size = system.info(target)["size"]
    found = system.cat_file(target, start=0, end=min(len(head), size)) if size else b""
    return bool(size < copy.total_bytes and head.startswith(found))


def _fill(out: IO[bytes], path: Path, copy: snapshot_file.Header) -> None:
    for chunk in excerpt(path, copy):
        out.write(chunk)
        reached("uploading", copy.generation)


def _write_file(target: Path, path: Path, copy: snapshot_file.Header) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    early = target.with_name(f".{target.name}.part")
    try:
        with early.open("wb") as out:
            _fill(out, path, copy)
            out.flush()
            os.fsync(out.fileno())
        early.rename(target)
    except BaseException:
        early.unlink(missing_ok=True)
        raise
    for folder in (target.parent, *target.parent.parents[:2]):
        _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    """A name is on the disk once its folder is."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


_CURES = {
    errno.ENOSPC: "the storage is full: make room there",
    errno.EDQUOT: "the quota is used up: have it raised, or make room there",
    errno.EROFS: "the file system is read-only: mount it for writing on this node",
    errno.EACCES: "the permission is missing: let the agent's user write there",
}


def reason_of(error: Exception) -> str:
    """Why something was not brought there, and what helps if that is known."""
    if isinstance(error, OSError) and error.errno in _CURES:
        return _CURES[error.errno]
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).partition("\n")[0] or type(error).__name__
