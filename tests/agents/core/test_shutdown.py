"""When an agent that was asked to exit does so."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agents.core.model import Exit, SnapshotsChanged, StopRequested, Ticked
from agents.protocol.records import GenerationRecord, Point, Restore
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


@pytest.mark.parametrize(
    "record",
    [replace(G, state="stopping"), replace(G, state="stopping", members=(PEER,)), G],
    ids=["the workers parked", "a spare node with replicas", "the workers failed"],
)
def test_a_stopped_agent_stays_until_it_knows_the_next_generation(record: GenerationRecord) -> None:
    """What it holds may be all that is left of the last steps."""
    leaving = idle(record=record, is_leaving=True, idle_since=NOW)
    assert act(leaving, Ticked(NOW + 59))[1] == ()
    assert act(leaving, Ticked(NOW + 60))[1] == (Exit(),), "not forever"
    ended = replace(leaving, record=replace(record, state="closed"))
    assert act(ended, Ticked(NOW + 1))[1] == (Exit(),)


def test_an_idle_node_counts_from_the_moment_when_it_was_stopped() -> None:
    """A spare node's replica may be what the next generation begins from."""
    spare = idle(record=NEXT, left=0, idle_since=0.0)
    leaving, _ = act(spare, StopRequested(NOW))
    assert leaving.is_leaving
    assert act(leaving, Ticked(NOW + 59))[1] == ()
