"""How generations are numbered."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agents.protocol.records import Point, Restore
from sailord.core.model.commands import AbortGeneration, WakeAgents, WriteGeneration
from sailord.core.model.events import DurableChecked, GenerationWritten, PlanFound
from sailord.core.model.state import Check
from sailord.core.queries.generation_record import next_record
from sailord.core.queries.replan_triggers import RECOVERY_S, replan_trigger
from tests.sailord.core.states import (
    FROM_NOTHING,
    JOB,
    KEPT,
    NOW,
    WAITING,
    A,
    B,
    C,
    G,
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


@pytest.mark.parametrize(
    ("of_b", "fallback"),
    [((39, 40, 41), 41), ((39, 40), 40), ((39,), 39)],
    ids=["both nodes have it", "one step less", "two steps less"],
)
def test_record_names_the_point_that_one_more_loss_would_leave(of_b, fallback) -> None:
    nodes = node(A, report(A, "broken", sealed=(39, 40, 41))), node(B, report(B, sealed=of_b))
    known = state(None, *nodes)
    restore = Restore(Point(41, 3), "memory")
    record = next_record(known, active_of(known), proposal(), restore, "a reason")
    assert record.fallback == Point(fallback, 3)


def test_all_points_are_needed_where_the_loss_of_a_zone_must_be_survived() -> None:
    """Step 41 is on one node, step 40 on two of one zone, and step 39 in two zones."""
    sealed = {A: (39, 40, 41), B: (39, 40), C: (39,)}
    known = state(None, *(node(id_, report(id_, sealed=steps)) for id_, steps in sealed.items()))
    far = known.with_job(replace(known.job, saving=replace(known.job.saving, survive="zone")))
    restore = Restore(Point(41, 3), "memory")
    assert next_record(known, active_of(known), proposal(), restore, "").fallback == Point(40, 3)
    assert next_record(far, active_of(far), proposal(), restore, "").fallback is None


def test_generation_from_a_checkpoint_needs_what_is_in_memory_if_that_cannot_be_read() -> None:
    nodes = (node(id_, report(id_, sealed=(39, 40))) for id_ in (A, B))
    known = replace(state(None, *nodes), durables={JOB: durable(41)})
    restore = Restore(Point(41, 3), "durable")
    assert next_record(known, active_of(known), proposal(), restore, "").fallback == Point(40, 3)


@pytest.mark.parametrize("before", [None, Point(39, 3)])
def test_where_no_point_is_on_two_nodes_the_fallback_of_before_stays(before: Point | None) -> None:
    """An older leader named none: then no point is given up."""
    nodes = node(A, report(A, "broken", sealed=(39, 40, 41))), node(B, report(B, sealed=()))
    known = state(None, *nodes, generation=replace(G, fallback=before))
    restore = Restore(Point(41, 3), "memory")
    assert next_record(known, active_of(known), proposal(), restore, "").fallback == before


def test_a_checkpoint_that_cannot_be_read_is_no_fallback() -> None:
    """Step 41 is on one node, and of what its loss leaves step 20 is the newest."""
    broken, older = durable(30), durable(12)
    nodes = node(A, report(A, "broken", sealed=(20, 41))), node(B, report(B, sealed=(20,)))
    known = state(FROM_NOTHING, *nodes, job=job(saving=KEPT), check=Check(broken, older))
    known = replace(known, durables={JOB: broken})
    _, commands = act(known, PlanFound(NOW, 4, proposal()))
    (write,) = (each for each in commands if isinstance(each, WriteGeneration))
    assert (write.record.restore.point.step, write.lowers) == (41, older)
    assert write.record.fallback == Point(20, 3)
