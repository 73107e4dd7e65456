"""The embedded store's client in other processes, over sailord's Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from agents.protocol import codec
from agents.store import socket_frames
from agents.store.interface import (
    Changed,
    Compacted,
    Compare,
    Entry,
    Lease,
    Operation,
    Outcome,
    Snapshot,
    Store,
    StoreRefused,
    StoreUnavailable,
    WriteUnknown,
    check_transaction,
)
from agents.store.socket_frames import FrameError

RETRY_S = 0.05
"""Seconds between two attempts to connect."""


T = TypeVar("T")


def read(kind: type[T], raw: object) -> T:
    """Decode an answer; one of a later protocol is an error of the store."""
    try:
        return codec.read(kind, raw)
    except codec.WireError as error:
        raise StoreRefused(f"the store's answer cannot be read: {error}") from None


class ConnectionLost(Exception):  # noqa: N818 - names what happened to the connection
    """The connection was lost before an answer came."""


class SocketConnection:
    """One connection: sends requests, and passes each answer to its caller."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Use this connection."""
        self._reader, self._writer = reader, writer
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Queue[Any]] = {}
        self.is_up = True
        self._task = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        try:
            while (frame := await socket_frames.read_frame(self._reader)) is not None:
                if frame.get("id") in self._answers:
                    self._answers[frame["id"]].put_nowait(frame)
        except FrameError:
            pass  # Handled like a lost connection.
        finally:
            self.is_up = False
            self._writer.close()
            for answers in self._answers.values():
                answers.put_nowait(None)

    async def close(self) -> None:
        """Close the connection; pending requests fail with ``ConnectionLost``."""
        self._task.cancel()
        await asyncio.wait([self._task])
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()

    async def ask(self, **question: object) -> Any:
        """Return the result; raises the store's error, or ``ConnectionLost``."""
        async with contextlib.aclosing(self.follow(**question)) as results:
            async for result in results:
                return result
        raise ConnectionLost

    async def follow(self, **question: object) -> AsyncGenerator[Any, None]:
        """Yield each result; raises the store's error, or ``ConnectionLost``."""
        id_ = next(self._ids)
        answers = self._answers[id_] = asyncio.Queue()
        try:
            if not self.is_up:
                raise ConnectionLost
            try:
                socket_frames.write_frame(self._writer, {"id": id_, **question})
                await self._writer.drain()
            except ConnectionError:
                self.is_up = False
                raise ConnectionLost from None
            while (frame := await answers.get()) is not None:
                if "error" in frame:
                    raise socket_frames.read_error(frame["error"])
                yield frame["result"]
            raise ConnectionLost
        finally:
            del self._answers[id_]
            if question["do"] == "watch" and self.is_up:
                socket_frames.write_frame(self._writer, {"id": id_, "do": "unwatch"})


class SocketStore(Store):
    """A store behind a Unix socket."""

    def __init__(self, path: Path, *, timeout_s: float) -> None:
        """Connect on first use; each call ends within ``timeout_s``."""
        self._path, self._timeout_s = path, timeout_s
        self._line: SocketConnection | None = None
        self._connecting = asyncio.Lock()
        self._is_closed = False

    async def close(self) -> None:
        """Close the connection; watches end."""
        self._is_closed = True
        async with self._connecting:  # A pending attempt to connect ends first.
            if self._line is not None:
                await self._line.close()

    async def get(self, key: str) -> Entry | None:
        packed = await self._repeat(do="get", key=key)
        return None if packed is None else read(Entry, packed)

    async def snapshot(self, prefix: str) -> Snapshot:
        return read(Snapshot, await self._repeat(do="snapshot", prefix=prefix))

    async def transact(self, compares: Sequence[Compare], orders: Sequence[Operation]) -> Outcome:
        check_transaction(orders)
        packed = socket_frames.pack_transaction(compares, orders)
        sent = False
        try:
            async with asyncio.timeout(self._timeout_s):
                line = await self._connect()
                sent = True
                return read(Outcome, await line.ask(do="transact", **packed))
        except (ConnectionLost, TimeoutError):
            raise self._silence(WriteUnknown if sent else StoreUnavailable) from None

    async def grant(self, ttl_s: float) -> Lease:
        return read(Lease, await self._repeat(do="grant", ttl_s=ttl_s))

    async def keep(self, lease: int) -> bool:
        return bool(await self._repeat(do="keep", lease=lease))

    async def revoke(self, lease: int) -> None:
        await self._repeat(do="revoke", lease=lease)

    async def watch(self, prefix: str, *, after: int) -> AsyncGenerator[Changed | Compacted, None]:
        while not self._is_closed:
            try:
                line = await self._connect()
                question = {"do": "watch", "prefix": prefix, "after": after}
                async with contextlib.aclosing(line.follow(**question)) as results:
                    async for result in results:
                        news: Changed | Compacted
                        is_change = "changes" in result
                        news = read(Changed, result) if is_change else read(Compacted, result)
                        after = news.revision
                        yield news
                        if isinstance(news, Compacted):
                            return
            except (ConnectionLost, StoreUnavailable):
                await asyncio.sleep(RETRY_S)

    async def _repeat(self, **question: object) -> Any:
        """Send an idempotent request until there is an answer, or until the timeout."""
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    line = await self._connect()
                    with contextlib.suppress(ConnectionLost):
                        return await line.ask(**question)
                    await asyncio.sleep(RETRY_S)
        except TimeoutError:
            raise self._silence(StoreUnavailable) from None

    async def _connect(self) -> SocketConnection:
        """Return a connection; waits until there is one, under the caller's timeout."""
        async with self._connecting:
            while not self._is_closed:
                if self._line is not None and self._line.is_up:
                    return self._line
                try:
                    self._line = SocketConnection(*await asyncio.open_unix_connection(self._path))
                except PermissionError:
                    raise StoreRefused(
                        f"{self._path}: no permission to connect to the store"
                    ) from None
                except OSError:
                    await asyncio.sleep(RETRY_S)
        raise StoreUnavailable("the store is closed")

    def _silence(
        self, kind: type[StoreUnavailable] | type[WriteUnknown]
    ) -> StoreUnavailable | WriteUnknown:
        return kind(f"no answer from the store at {self._path} within {self._timeout_s:g} s")
