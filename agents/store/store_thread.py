"""A store on an event loop and a thread of its own, so that a busy service delays no lease."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from agents.store.factory import open_store
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
    StoreError,
)
from agents.store.socket_server import serve
from agents.store.sqlite_store import EmbeddedStore

T = TypeVar("T")


@dataclass(eq=False)
class StoreThread(Store):
    """The store that a URL names; its calls may come from any event loop."""

    inner: Store = field(init=False)
    """Used on the thread's loop alone."""
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.SelectorEventLoop)
    _close: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)
    _thread: threading.Thread = field(init=False)

    @classmethod
    async def open(cls, url: str, *, socket: Path) -> StoreThread:
        """Open the store; an embedded one is served to other processes at ``socket``."""
        found = cls()
        found._thread = threading.Thread(target=found._loop.run_forever, name="store", daemon=True)
        found._thread.start()
        try:
            await found.run(found._open(url, socket))
        except BaseException:
            found._end()
            raise
        return found

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the thread's loop, where it may use ``inner``."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def get(self, key: str) -> Entry | None:
        return await self.run(self.inner.get(key))

    async def snapshot(self, prefix: str) -> Snapshot:
        return await self.run(self.inner.snapshot(prefix))

    async def transact(self, compares: Sequence[Compare], orders: Sequence[Operation]) -> Outcome:
        return await self.run(self.inner.transact(compares, orders))

    async def grant(self, ttl_s: float) -> Lease:
        return await self.run(self.inner.grant(ttl_s))

    async def keep(self, lease: int) -> bool:
        return await self.run(self.inner.keep(lease))

    async def revoke(self, lease: int) -> None:
        await self.run(self.inner.revoke(lease))

    async def watch(self, prefix: str, *, after: int) -> AsyncGenerator[Changed | Compacted, None]:
        here = asyncio.get_running_loop()
        news: asyncio.Queue[Changed | Compacted | StoreError | None] = asyncio.Queue()

        async def follow() -> None:
            last: StoreError | None = None
            try:
                async with contextlib.aclosing(self.inner.watch(prefix, after=after)) as changes:
                    async for each in changes:
                        here.call_soon_threadsafe(news.put_nowait, each)
            except StoreError as error:
                last = error
            finally:
                with contextlib.suppress(RuntimeError):  # The service has ended meanwhile.
                    here.call_soon_threadsafe(news.put_nowait, last)

        following = asyncio.run_coroutine_threadsafe(follow(), self._loop)
        try:
            while (each := await news.get()) is not None:
                if isinstance(each, StoreError):
                    raise each
                yield each
        finally:
            following.cancel()

    async def close(self) -> None:
        await self.run(self._close_all())
        self._end()

    async def _open(self, url: str, socket: Path) -> None:
        self.inner = await open_store(url)
        self._close.push_async_callback(self.inner.close)
        if isinstance(self.inner, EmbeddedStore):
            try:
                server = await serve(self.inner, socket)
            except BaseException:
                await self._close.aclose()
                raise
            self._close.push_async_callback(server.close)

    async def _close_all(self) -> None:
        await self._close.aclose()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
