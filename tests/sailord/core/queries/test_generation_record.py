"""How generations are numbered."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agents.protocol.records import Restore
from sailord.core.model.commands import AbortGeneration, WakeAgents, WriteGeneration
from sailord.core.model.events import DurableChecked, GenerationWritten, PlanFound
from sailord.core.queries.replan_triggers import RECOVERY_S, replan_trigger
from tests.sailord.core.states import (
    FROM_NOTHING,
    JOB,
    KEPT,
    NOW,
    WAITING,
    A,
    B,
    act,
    active_of,
    durable,
    job,
    node,
    proposal,
    report,
    state,
)


def test_first_generation_waits_until_nodes_that_know_of_another_were_asked() -> None:
    def due(heard: int) -> float:
        nodes = [node(each, report(each, "idle", sealed=(), of=heard)) for each in (A, B)]
        known = state(WAITING, *nodes, generation=None)
        trigger = replan_trigger(known, active_of(known))
        assert trigger is not None
        return trigger.due

    assert due(9) == due(0) + RECOVERY_S


@pytest.mark.parametrize(
    ("before", "first"),
    [(0, 8), (7, 8), (9, 10)],
    ids=["a record of before", "the newest checkpoint", "an older checkpoint than others"],
)
def test_first_generation_follows_those_of_the_checkpoint_storage(before: int, first: int) -> None:
    """Otherwise the checkpoints of another store would stay the newest, whatever the job
    commits."""
    kept = durable(700, of=7)
    nodes = [node(each, report(each, "idle", sealed=(), of=0)) for each in (A, B)]
    submitted = job(saving=KEPT, generations_before=before)
    known = state(FROM_NOTHING, *nodes, job=submitted, generation=None)
    asked, _ = act(replace(known, durables={JOB: kept}), PlanFound(NOW, 4, proposal()))
    opening, commands = act(asked, DurableChecked(NOW, JOB, kept, kept))
    (write,) = (each for each in commands if isinstance(each, WriteGeneration))
    assert write.record.number == first
    assert write.record.restore == Restore(kept.point, "durable")
    _, commands = act(opening, GenerationWritten(NOW, write.record))
    assert not any(isinstance(each, AbortGeneration) for each in commands)
    assert WakeAgents((A, B)) in commands
