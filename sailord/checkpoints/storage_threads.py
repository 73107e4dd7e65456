"""Threads for checkpoint storage alone: one that hangs blocks nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sailord.checkpoints.object_storage import Away

T = TypeVar("T")

THREADS = 8
WAITING_MAX = 32
PATIENCE_S = 60.0


@dataclass(eq=False)
class StorageThreads:
    """A few threads, with a limited queue of operations."""

    patience_s: float | None = PATIENCE_S
    """How long a caller waits; the operation itself goes on. ``None``: forever."""
    waiting_max: int = WAITING_MAX
    _open: int = 0
    _pool: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(THREADS, thread_name_prefix="storage")
    )

    async def run(self, act: Callable[..., T], *arguments: Any) -> T:
        """Run a blocking operation; raises ``Away`` if too many hang, or this one does."""
        if self._open >= self.waiting_max:
            raise Away(
                f"{self._open} operations wait for checkpoint storage, which does not answer"
            )
        future = asyncio.get_running_loop().run_in_executor(self._pool, act, *arguments)
        self._open += 1
        future.add_done_callback(self._end)
        try:
            async with asyncio.timeout(self.patience_s):
                return await asyncio.shield(future)
        except TimeoutError:
            raise Away(f"checkpoint storage has not answered for {self.patience_s:g} s") from None

    def _end(self, future: asyncio.Future[Any]) -> None:
        self._open -= 1
        if not future.cancelled():
            future.exception()  # The caller may have left.
