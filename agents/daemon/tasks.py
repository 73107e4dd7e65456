"""Work that runs by itself; a fault in it is our own bug, and ends the process."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

BEGUN_AT_ONCE = 16


async def run_in_batches(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Do all of them at once, but begin a few at each turn of the loop.

    To begin a thousand calls in one turn would hold up everything else for half a second.
    """
    tasks: list[asyncio.Task[None]] = []
    for work in works:
        tasks.append(asyncio.create_task(work))
        if len(tasks) % BEGUN_AT_ONCE == 0:
            await asyncio.sleep(0)
    await asyncio.gather(*tasks)


@dataclass(eq=False)
class Tasks:
    """What was started and has not ended yet."""

    _running: set[asyncio.Task[None]] = field(default_factory=set)

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Let it run; nobody need wait for it."""
        task = asyncio.create_task(work)
        self._running.add(task)  # The loop itself keeps no task alive.
        task.add_done_callback(self._end)
        return task

    def cancel(self) -> None:
        """End all of it."""
        for task in self._running:
            task.cancel()

    def _end(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and task.exception() is not None:
            # The next start reads everything anew.
            asyncio.get_running_loop().call_exception_handler(
                {"message": "a task failed", "exception": task.exception(), "task": task}
            )
