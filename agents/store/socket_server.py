"""Serves a store of this process to other processes of the machine, over a Unix socket.

The permissions of the socket's file are the only access control.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable
from pathlib import Path

from agents.daemon.named_socket import named_socket
from agents.protocol.codec import plain
from agents.store import socket_frames
from agents.store.interface import Store, StoreError, StoreRefused
from agents.store.socket_frames import Frame, FrameError


async def serve(store: Store, path: Path, *, mode: int = 0o600) -> Server:
    """Serve the store on a socket, which replaces any file of that name.

    The caller must know that no other process serves there: the lock of the store's file proves it.
    """
    server = Server(store)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        with named_socket(path, mode) as early:
            await server.start(early)
    except OSError as error:
        await server.close()
        raise StoreRefused(
            f"{path} cannot be used as a socket: {error.strerror or error}"
        ) from None
    return server


class Server:
    """The connections to one store."""

    def __init__(self, store: Store) -> None:
        """Serve this store, which the caller closes."""
        self._store = store
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self, path: Path) -> None:
        """Listen."""
        umask = os.umask(0o177)
        try:
            self._server = await asyncio.start_unix_server(self._connect, path, backlog=4096)
        finally:
            os.umask(umask)

    async def close(self) -> None:
        """Close all connections; the socket's file stays, and refuses connections."""
        if self._server is None:
            return
        self._server.close()
        for task in tuple(self._connections):
            task.cancel()
        if self._connections:
            await asyncio.wait(self._connections)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await Connection(self._store, reader, writer).run()
        except asyncio.CancelledError:
            pass  # Asked for by `close`; asyncio's server would log it as an error.
        finally:
            self._connections.discard(task)
            writer.close()
            with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                await writer.wait_closed()


class Connection:
    """One client's connection; each request is a task, so that none blocks another."""

    def __init__(
        self, store: Store, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Use this connection."""
        self._store, self._reader, self._writer = store, reader, writer
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Answer requests until the client disconnects or sends an invalid frame."""
        try:
            while (frame := await socket_frames.read_frame(self._reader)) is not None:
                self._begin(frame)
        except FrameError:
            pass  # No later frame could be read either.
        finally:
            tasks = tuple(self._tasks.values())
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)

    def _begin(self, frame: Frame) -> None:
        id_ = frame.get("id")
        if type(id_) is not int:
            raise FrameError("a request without an id")
        if frame.get("do") == "unwatch":
            if id_ in self._tasks:
                self._tasks[id_].cancel()
            return
        if id_ in self._tasks:
            raise FrameError("two requests with the same id")
        task = self._tasks[id_] = asyncio.create_task(self._answer(id_, frame))
        task.add_done_callback(lambda _: self._tasks.pop(id_, None))

    async def _answer(self, id_: int, frame: Frame) -> None:
        try:
            if frame.get("do") == "watch":
                await self._watch(id_, str(frame["prefix"]), after=int(frame["after"]))
            else:
                await self._send(id_, result=plain(await self._call(frame)))
        except StoreError as error:
            await self._send(id_, error=socket_frames.pack_error(error))
        except (KeyError, TypeError, ValueError) as error:
            refused = StoreRefused(f"invalid request: {error!r}")
            await self._send(id_, error=socket_frames.pack_error(refused))

    def _call(self, frame: Frame) -> Awaitable[object]:
        match frame:
            case {"do": "get", "key": str(key)}:
                return self._store.get(key)
            case {"do": "snapshot", "prefix": str(prefix)}:
                return self._store.snapshot(prefix)
            case {"do": "transact"}:
                return self._store.transact(*socket_frames.read_transaction(frame))
            case {"do": "grant", "ttl_s": int(ttl_s) | float(ttl_s)}:
                return self._store.grant(ttl_s)
            case {"do": "keep", "lease": int(lease)}:
                return self._store.keep(lease)
            case {"do": "revoke", "lease": int(lease)}:
                return self._store.revoke(lease)
            case _:
                raise StoreRefused(f"unknown request: {str(frame.get('do'))[:40]}")

    async def _watch(self, id_: int, prefix: str, *, after: int) -> None:
        async with contextlib.aclosing(self._store.watch(prefix, after=after)) as news:
            async for each in news:
                await self._send(id_, result=plain(each))

    async def _send(self, id_: int, **answer: object) -> None:
        with contextlib.suppress(ConnectionError):
            socket_frames.write_frame(self._writer, {"id": id_, **answer})
            await self._writer.drain()
