"""When an agent that was asked to exit does so."""

from __future__ import annotations

from dataclasses import replace

from agents.core.model import Exit, SnapshotsChanged, Ticked
from agents.protocol.records import Point, Restore
from tests.agents.core.life import JOB, NOW, PEER, G, act, idle

NEXT = replace(G, number=4, members=(PEER,), restore=Restore(Point(40, 3), "memory"))


def test_a_stopped_agent_stays_while_other_nodes_fetch_from_it() -> None:
    """The next generation restores from its memory."""
    leaving = idle(record=NEXT, is_leaving=True, idle_since=NOW)
    after, commands = act(leaving, Ticked(NOW + 59))
    assert (commands, after.is_leaving) == ((), True)
    assert act(after, SnapshotsChanged(NOW + 59, (), JOB))[1] == (Exit(),)
    assert act(after, Ticked(NOW + 60))[1] == (Exit(),), "not forever"
    elsewhere = replace(NEXT, restore=Restore(Point(40, 3), "durable"))
    assert act(replace(leaving, record=elsewhere), Ticked(NOW + 1))[1] == (Exit(),)
