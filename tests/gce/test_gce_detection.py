"""A real sailord reacts to the metadata server's notice, and detects silent deaths.

``python -m benchmarks.notices`` measures the times; they are also checked here if
``SAILOR_EXAMPLES`` is set, since on a busy machine they mean nothing.
"""

from __future__ import annotations

import asyncio
import os

import pytest

from tests.gce.detection_cluster import (
    DECIDED_S,
    MISSED_S,
    DetectionCluster,
    detection_cluster,
    is_lost,
    is_noticed,
    is_stopping,
)
from tests.processes import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.chaos]
EXAMPLES = os.environ.get("SAILOR_EXAMPLES")


def has_stored_the_loss(here: DetectionCluster) -> bool:
    """Events are sent at once; the history shows them once they are stored."""
    return any(line.startswith("b is lost: its lease expired") for line in here.cluster.history())


def test_a_notice_drains_the_node_and_dead_nodes_are_lost(tmp_path):
    async def play() -> None:
        async with detection_cluster(tmp_path) as here:
            _, decided_s = await here.event_delays_s(
                lambda: here.flip("TRUE"), is_noticed, is_stopping
            )
            await asyncio.to_thread(here.wait_until_moved)
            lines = here.cluster.history()
            assert any("0 steps lost): a is preempted" in line for line in lines), lines
            idle_s = await here.until_gone(here.taken.kill_node)
            (busy_s,) = await here.event_delays_s(here.kept.kill_node, is_lost)
            await asyncio.to_thread(wait_until, lambda: has_stored_the_loss(here))
            print(f"decided after {decided_s:.2f} s, missed after {idle_s:.2f} and {busy_s:.2f} s")
            if EXAMPLES:
                assert decided_s < DECIDED_S
                assert max(idle_s, busy_s) < MISSED_S

    asyncio.run(play())


def test_three_signals_of_one_preemption_cause_one_reconfiguration(tmp_path):
    async def play() -> None:
        async with detection_cluster(tmp_path) as here:
            before = len([one for one in here.events() if is_stopping(one)])
            await here.flip("TRUE")
            # The agent's notice first: it tells when the node leaves, which would be news later.
            await asyncio.to_thread(wait_until, lambda: any(map(is_noticed, here.events())))
            await asyncio.to_thread(here.post_notice)
            here.shut_down()
            await asyncio.to_thread(here.wait_until_moved)
            events = here.events()
            assert len([one for one in events if is_noticed(one)]) == 1, events
            assert len([one for one in events if is_stopping(one)]) == before + 1, events
            _, *moves = (line for line in here.cluster.history() if " lost): " in line)
            assert len(moves) == 1, moves
            assert "0 steps lost): a is preempted" in moves[0]

    asyncio.run(play())
