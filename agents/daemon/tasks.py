"""Background tasks, whose unexpected failure is logged with its trace, and waits for events."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

BEGUN_AT_ONCE = 16


async def run_in_batches(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all works concurrently, but start only a few per turn of the event loop.

    To start a thousand calls in one turn would block the loop for half a second.
    """
    tasks: list[asyncio.Task[None]] = []
    for work in works:
        tasks.append(asyncio.create_task(work))
        if len(tasks) % BEGUN_AT_ONCE == 0:
            await asyncio.sleep(0)
    await asyncio.gather(*tasks)


async def is_set_within(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event; return whether it was set in time.

    ``asyncio.wait_for`` of Python 3.11 would lose a cancellation that comes with the event, so that
    a service told to stop never ends.
    """
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False


@dataclass(eq=False)
class Tasks:
    """The background tasks that have not ended."""

    _running: set[asyncio.Task[None]] = field(default_factory=set)

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task; the caller need not wait for it."""
        task = asyncio.create_task(work)
        self._running.add(task)  # The event loop alone holds no reference to it.
        task.add_done_callback(self._end)
        return task

    def cancel(self) -> None:
        """Cancel all tasks."""
        for task in self._running:
            task.cancel()

    def _end(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and task.exception() is not None:
            # asyncio's own handler logs it. Work that others wait for reports its failures itself.
            asyncio.get_running_loop().call_exception_handler(
                {"message": "a task failed", "exception": task.exception(), "task": task}
            )
