"""The embedded store: runs inside sailord, needs no installation, and survives SIGKILL.

Leases count the time in which this process runs: while it is down or stopped they do not expire,
and after a start each has its full duration.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

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
    StoreRefused,
    StoreUnavailable,
    check_transaction,
)
from agents.store.sqlite_file import (
    HISTORY_BYTES_MAX,
    HISTORY_MAX,
    OpenLease,
    Revoke,
    SqliteFile,
    StoreAnswer,
    StoreWrite,
    Transaction,
)

T = TypeVar("T")

TICK_S = 0.1
"""How often leases are checked."""
TICK_S_MAX = 0.5
"""The most that one check may count: of a longer gap, this process was stopped."""
FILE_MODE = 0o600


class EmbeddedStore(Store):
    """The store in this process; ``serve`` lets other processes use it."""

    def __init__(self, ledger: SqliteFile) -> None:
        """Use an open file; call ``open`` instead."""
        self._ledger = ledger
        # SQLite waits for the disk, in a thread. It is one thread, which keeps the order of calls.
        self._thread = ThreadPoolExecutor(1, "store")
        self._waiting: list[tuple[StoreWrite, asyncio.Future[StoreAnswer]]] = []
        self._is_wanted = asyncio.Event()
        # The last batch, for watches that have seen all before; others read the file.
        self._batch: Sequence[Changed] = ()
        self._before_batch = ledger.revision
        self._change = asyncio.Event()
        self._clock_s = 0.0
        self._leases = {lease.id: lease for lease in ledger.leases()}
        self._ends_s = {lease.id: lease.ttl_s for lease in ledger.leases()}
        self._is_closed = False
        self._tasks = [asyncio.create_task(self._write()), asyncio.create_task(self._run_leases())]

    @classmethod
    async def open(
        cls,
        path: Path,
        *,
        history_max: int = HISTORY_MAX,
        history_bytes_max: int = HISTORY_BYTES_MAX,
    ) -> EmbeddedStore:
        """Open or create the file; ``StoreUnavailable`` if another process has it open."""
        return cls(await asyncio.to_thread(_open_ledger, path, history_max, history_bytes_max))

    async def close(self) -> None:
        """Finish pending writes, end the watches and close the file."""
        if self._is_closed:
            return
        self._is_closed = True
        self._tell_watches()
        self._is_wanted.set()
        self._tasks[1].cancel()
        await asyncio.wait(self._tasks)
        await self._ask(self._ledger.close)
        self._thread.shutdown()

    async def get(self, key: str) -> Entry | None:
        self._check_open()
        return await self._read(partial(self._ledger.get, key))

    async def snapshot(self, prefix: str) -> Snapshot:
        self._check_open()
        return await self._read(partial(self._ledger.snapshot, prefix))

    async def transact(self, compares: Sequence[Compare], orders: Sequence[Operation]) -> Outcome:
        check_transaction(orders)
        answer = await self._put_in(Transaction(tuple(compares), tuple(orders)))
        assert isinstance(answer, Outcome)
        return answer

    async def grant(self, ttl_s: float) -> Lease:
        if not 0 < ttl_s < 1e9:
            raise StoreRefused(f"a lease of {ttl_s} s is not possible")
        answer = await self._put_in(OpenLease(float(ttl_s)))
        assert isinstance(answer, Lease)
        return answer

    async def keep(self, lease: int) -> bool:
        self._check_open()
        if lease not in self._ends_s:
            return False
        self._ends_s[lease] = self._clock_s + self._leases[lease].ttl_s
        return True

    async def revoke(self, lease: int) -> None:
        await self._put_in(Revoke(lease))

    async def watch(self, prefix: str, *, after: int) -> AsyncGenerator[Changed | Compacted, None]:
        while not self._is_closed:
            change = self._change
            seen = after - self._before_batch
            news: Sequence[Changed] | Compacted
            if 0 <= seen <= len(self._batch):
                news = self._batch[seen:]
            else:
                news = await self._read(partial(self._ledger.changes_after, after))
            if isinstance(news, Compacted):
                yield news
                return
            for changed in news:
                after = changed.revision
                below = tuple(each for each in changed.changes if each.key.startswith(prefix))
                if below:
                    yield Changed(changed.revision, below)
            if not news:
                await change.wait()

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreUnavailable("the store is closed")

    async def _ask(self, question: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, question)

    async def _read(self, question: Callable[[], T]) -> T:
        try:
            return await self._ask(question)
        except sqlite3.Error as error:
            raise StoreUnavailable(f"the store's file: {error}") from None

    async def _put_in(self, write: StoreWrite) -> StoreAnswer:
        self._check_open()
        answer: asyncio.Future[StoreAnswer] = asyncio.get_running_loop().create_future()
        self._waiting.append((write, answer))
        self._is_wanted.set()
        # A cancelled caller must not cancel the writer's future.
        result = await asyncio.shield(answer)
        if isinstance(result, StoreError):
            raise result
        return result

    async def _write(self) -> None:
        """Apply the waiting writes in batches, until the store is closed."""
        while not (self._is_closed and not self._waiting):
            await self._is_wanted.wait()
            self._is_wanted.clear()
            batch, self._waiting = self._waiting, []
            if not batch:
                continue
            try:
                applied = await self._ask(partial(self._ledger.apply, [each for each, _ in batch]))
            except Exception as error:  # A bug; it is raised in the callers.
                for _, future in batch:
                    future.set_exception(error)
                continue
            for (write, future), answer in zip(batch, applied.answers, strict=True):
                self._follow_lease(write, answer)
                future.set_result(answer)
            if applied.changed:
                self._batch = applied.changed
                self._before_batch = applied.changed[0].revision - 1
                self._tell_watches()
            if self._is_closed:
                self._is_wanted.set()

    def _follow_lease(self, write: StoreWrite, answer: StoreAnswer) -> None:
        match write, answer:
            case OpenLease(), Lease(id_, ttl_s):
                self._leases[id_] = answer
                self._ends_s[id_] = self._clock_s + ttl_s
            case Revoke(lease), Outcome():
                self._leases.pop(lease, None)
                self._ends_s.pop(lease, None)
            case _:
                pass

    def _tell_watches(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    async def _run_leases(self) -> None:
        loop = asyncio.get_running_loop()
        before_s = loop.time()
        while True:
            await asyncio.sleep(TICK_S)
            now_s = loop.time()
            self._clock_s += min(now_s - before_s, TICK_S_MAX)
            before_s = now_s
            over = [id_ for id_, end_s in self._ends_s.items() if end_s <= self._clock_s]
            for id_ in over:
                del self._ends_s[id_]  # From here on it cannot be renewed.
            # A failed deletion is retried at the next check.
            ended = [id_ for id_ in self._leases if id_ not in self._ends_s]
            await asyncio.gather(*map(self.revoke, ended), return_exceptions=True)


def _open_ledger(path: Path, history_max: int, history_bytes_max: int) -> SqliteFile:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # SQLite creates its other files with this mode.
        path.touch(mode=FILE_MODE)
        return SqliteFile(path, history_max=history_max, history_bytes_max=history_bytes_max)
    except OSError as error:
        raise StoreRefused(f"{path} cannot be used as the store: {error.strerror}") from None
