"""A pause of a job that lost a node, or has just begun: what memory alone holds is kept first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agents.protocol.records import GenerationRecord, JobRecord, Point, Report
from sailord.core.model.commands import SettleOrder
from sailord.core.model.events import GenerationWritten, PlanFound, Ticked
from sailord.core.model.phases import Closing, Opening, Phase, Starting, Stopping, Waiting
from sailord.core.model.state import LastQuestion, Securing, State
from tests.sailord.core.states import (
    JOB,
    KEPT,
    NOW,
    STARTING,
    STOPPED,
    A,
    B,
    G,
    act,
    active_of,
    durable,
    job,
    node,
    order,
    phase,
    proposal,
    report,
    state,
)

PAUSING = Stopping("paused", "lunch", NOW + 20)
WAITING = Waiting("b is lost", NOW - 0.2)
LAST = report(A, "stopped", sealed=(40,))
"""A survivor that holds all of step 40."""


def after_a_loss(
    before: Phase,
    *kinds: str,
    said: Report = LAST,
    record: GenerationRecord = G,
    of: JobRecord | None = None,
) -> State:
    """B is lost; only A's memory holds steps 31 to 40; orders of these kinds are open."""
    lost = node(B, report(B, sealed=(40,)), lost_at=NOW - 1, why_lost="gone")
    orders = tuple(order(kind, id_=kind) for kind in kinds)
    saved = of or job(saving=KEPT)
    made = state(before, node(A, said), lost, orders=orders, job=saved, generation=record)
    return replace(made, durables={JOB: durable(30)})


@pytest.mark.parametrize(
    ("before", "record"),
    [(PAUSING, STOPPED), (WAITING, G), (STARTING, G)],
    ids=["stopping", "waiting", "starting"],
)
def test_pause_waits_until_the_last_steps_can_be_made_durable(
    before: Phase, record: GenerationRecord
) -> None:
    """Instances may be returned after a pause, and only a generation that runs can commit."""
    first, _ = act(after_a_loss(before, "pause", record=record), Ticked(NOW))
    asking, _ = act(first, Ticked(NOW + 0.2))
    assert isinstance(active_of(asking).phase, Waiting)
    wanted = active_of(asking).checkpointing.securing
    assert wanted is not None
    assert wanted.point == Point(40, 3)
    question = active_of(asking).question
    assert question is not None
    opened, _ = act(asking, PlanFound(NOW + 1, question.request, proposal(A)))
    opening = phase(opened)
    assert isinstance(opening, Opening)
    begun, _ = act(opened, GenerationWritten(NOW + 1, opening.record))
    assert isinstance(phase(begun), Starting), "not stopped before its members have joined"
    of = opening.record.number
    runs = report(A, "running", step=40, of=of, number=6)
    held = replace(runs, sealed=LAST.sealed)
    there = replace(begun, nodes=begun.nodes.with_({A: node(A, held)}))
    stopping = phase(act(there, Ticked(NOW + 2))[0])
    assert isinstance(stopping, Stopping)
    assert stopping.then == "paused"


@pytest.mark.parametrize(
    ("before", "at"),
    [
        (after_a_loss(WAITING, "pause", of=job()), NOW),
        (after_a_loss(WAITING, "pause", said=replace(LAST, sealed=())), NOW),
        (replace(after_a_loss(WAITING, "pause"), durables={JOB: durable(40)}), NOW),
        (after_a_loss(replace(WAITING), "pause"), NOW + 601),
    ],
    ids=["no place for checkpoints", "nothing in memory", "all durable", "secure_s has passed"],
)
def test_pause_after_a_loss_is_carried_out_at_once_where_nothing_can_be_kept(
    before: State, at: float
) -> None:
    first, _ = act(before, Ticked(NOW))
    assert isinstance(phase(act(first, Ticked(at))[0]), Closing)


def test_pause_does_not_wait_for_a_plan_that_there_is_not() -> None:
    before = after_a_loss(WAITING, "pause")
    active = active_of(before)
    asked = LastQuestion(frozenset((A,)), at=NOW, is_refused=True)
    refused = replace(before, active=replace(active, asked=asked))
    assert isinstance(phase(act(refused, Ticked(NOW))[0]), Closing)


def test_resume_takes_a_pause_back_that_still_waits() -> None:
    wanted = Securing(Point(40, 3), NOW + 600)
    before = after_a_loss(WAITING, "pause", "resume")
    active = active_of(before)
    errands = replace(active.checkpointing, securing=wanted)
    asked = replace(before, active=replace(active, checkpointing=errands))
    after, commands = act(asked, Ticked(NOW))
    assert active_of(after).checkpointing.securing is None, "it would keep old snapshots"
    assert isinstance(active_of(after).phase, Waiting)
    assert active_of(after).orders == ()
    assert [c.id for c in commands if isinstance(c, SettleOrder)] == ["pause", "resume"]


def test_pause_stops_a_generation_that_trains_though_a_new_leader_took_it_for_starting() -> None:
    """Its last step is durable at this moment; closed at once, its workers would be aborted."""
    runs = [node(id_, report(id_, "running", step=40, sealed=(40,))) for id_ in (A, B)]
    before = state(STARTING, *runs, orders=(order("pause"),), job=job(saving=KEPT))
    after, _ = act(replace(before, durables={JOB: durable(40)}), Ticked(NOW))
    assert isinstance(phase(after), Stopping)


def test_pause_counts_the_snapshots_that_survivors_of_a_loss_seal() -> None:
    """They have a moment to say so."""
    just = replace(WAITING, since=NOW - 0.05)
    durable_now = replace(after_a_loss(just, "pause"), durables={JOB: durable(40)})
    assert isinstance(phase(act(durable_now, Ticked(NOW))[0]), Waiting)
    assert isinstance(phase(act(durable_now, Ticked(NOW + 0.1))[0]), Closing)
