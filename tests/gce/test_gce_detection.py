"""A real sailord hears the metadata server's notice, and misses who says nothing (``gce``).

How long that takes is measured by ``python -m benchmarks.notices``.
"""

from __future__ import annotations

import asyncio

import pytest

from tests.daemon.running import wait_until
from tests.gce.detecting import Scene, is_going, is_lost, is_stopping, scene

pytestmark = pytest.mark.slow


def has_stored_the_loss(here: Scene) -> bool:
    """Events are told at once, the history when the store has taken it."""
    return any(line.startswith("b is lost: its lease is gone") for line in here.cluster.history())


def test_gce_a_notice_moves_the_job_and_silent_deaths_are_noticed(tmp_path):
    async def play() -> None:
        async with scene(tmp_path) as here:
            await here.hear(lambda: here.flip("TRUE"), is_going, is_stopping)
            await asyncio.to_thread(here.wait_until_spared)
            lines = here.cluster.history()
            assert any("0 steps lost): a is leaving" in line for line in lines), lines
            await here.until_gone(here.taken.kill_node)
            await here.hear(here.spared.kill_node, is_lost)
            await asyncio.to_thread(wait_until, lambda: has_stored_the_loss(here))

    asyncio.run(play())
