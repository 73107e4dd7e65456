"""Background tasks and their failures."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agents.daemon.tasks import Tasks, is_set_within


async def _ends() -> None:
    return


async def _fails() -> None:
    raise RuntimeError("a bug")


async def _waits() -> None:
    await asyncio.Event().wait()


def test_a_failed_task_is_reported_and_a_finished_one_is_not():
    told: list[dict[str, Any]] = []

    async def play() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, about: told.append(about))
        tasks = Tasks()
        for work in (_ends(), _fails(), _waits()):
            tasks.start(work)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        tasks.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1, "what was cancelled has ended"

    asyncio.run(play())
    assert [str(about["exception"]) for about in told] == ["a bug"]


@pytest.mark.parametrize("turns", range(5))
def test_a_cancellation_that_comes_with_the_event_ends_the_waiter(turns):
    async def waits(event: asyncio.Event) -> None:
        while True:
            await is_set_within(event, 60.0)
            event.clear()

    async def play() -> bool:
        event = asyncio.Event()
        task = asyncio.create_task(waits(event))
        await asyncio.sleep(0.01)
        event.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task], timeout=1.0)
        return task.cancelled()

    assert asyncio.run(play())


def test_waiting_for_an_event_times_out():
    async def play() -> tuple[bool, bool]:
        event = asyncio.Event()
        early = await is_set_within(event, 0.01)
        event.set()
        return early, await is_set_within(event, 0.01)

    assert asyncio.run(play()) == (False, True)
