"""Background tasks and their failures."""

from __future__ import annotations

import asyncio
from typing import Any

from agents.daemon.tasks import Tasks


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
