"""A real sailord hears the metadata server's notice, and misses who says nothing (``gce``).

How long that takes is measured by ``python -m benchmarks.notices``.
"""

from __future__ import annotations

import asyncio

import pytest

from tests.gce.detecting import is_going, is_lost, is_stopping, scene

pytestmark = pytest.mark.slow


def test_gce_a_notice_moves_the_job_and_silent_deaths_are_noticed(tmp_path):
    async def play() -> None:
        async with scene(tmp_path) as here:
            await here.hear(lambda: here.flip("TRUE"), is_going, is_stopping)
            await asyncio.to_thread(here.wait_until_spared)
            lines = here.cluster.history()
            assert any("0 steps lost): a is leaving" in line for line in lines), lines
            await here.until_gone(here.taken.kill_node)
            await here.hear(here.spared.kill_node, is_lost)
            assert here.cluster.history()[-1].startswith("b is lost: its lease is gone")

    asyncio.run(play())
