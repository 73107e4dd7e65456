"""After replicas differed, a job goes back to the newest checkpoint from before that."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from agents.protocol.records import Bill, NodeId, Restore
from sailord.core.decide import decide
from sailord.core.model.commands import (
    CheckDurable,
    Command,
    CommitCheckpoint,
    GiveOrder,
    Note,
    RequestPlan,
    WriteGeneration,
    WriteManifest,
)
from sailord.core.model.events import (
    CheckpointCommitted,
    DurableChecked,
    GenerationWritten,
    ManifestWritten,
    OrderGiven,
    PlanFound,
    Reported,
    Ticked,
)
from sailord.core.model.phases import Closing, Held, Running, Starting, Stopping
from sailord.core.model.state import State
from sailord.core.queries.replan_triggers import next_order
from sailord.core.queries.restore_choice import restore_now
from tests.sailord.core.states import (
    BEGAN,
    JOB,
    KEPT,
    NOW,
    STOPPED,
    A,
    B,
    C,
    act,
    active_of,
    durable,
    generation,
    job,
    node,
    order,
    phase,
    proposal,
    report,
    state,
    uploaded,
)

G = generation(A, B, C)
AGREED = 38
ID = "differs-job-3"


def failed(by: NodeId = A, *, number: int = 6, **others: Any) -> Reported:
    said = {"failure": "piece 2 differs", "is_bug": True, **others}
    return Reported(NOW, report(by, "failed", number=number, agreed_at=AGREED, **said))


def running(newest: int | None = 30, **others: Any) -> State:
    known = {"generation": G, "job": job(saving=KEPT), "considered": frozenset((A, B, C))}
    made = state(Running(BEGAN), *map(node, (A, B, C)), **known, **others)
    return made if newest is None else replace(made, durables={JOB: durable(newest)})


def found(step: int | None, *, newest: int = 30, **others: Any) -> DurableChecked:
    readable = None if step is None else durable(step)
    why = "" if step is not None else "none can be read"
    return DurableChecked(NOW, JOB, durable(newest), readable, why, step_max=AGREED, **others)


def of_kind(kind: type, commands: tuple[Command, ...]) -> list[Any]:
    return [each for each in commands if isinstance(each, kind)]


@pytest.mark.parametrize("newest", [30, 40])
def test_job_rolls_back_to_the_newest_readable_checkpoint_before_the_difference(
    newest: int,
) -> None:
    """The newest one may have been made of the wrong state before that was noticed."""
    looks, commands = act(running(newest), failed())
    assert of_kind(CheckDurable, commands) == [
        CheckDurable(job(saving=KEPT), durable(newest), is_thorough=False, step_max=AGREED)
    ]
    waits, commands = act(looks, Ticked(NOW + 5))
    assert commands == (), "no plan is asked for, and nothing is committed"
    ordered, commands = act(waits, found(30, newest=newest))
    (given,) = of_kind(GiveOrder, commands)
    assert (given.order.id, given.order.kind, given.order.durable) == (ID, "rollback", durable(30))
    asked, commands = act(ordered, Ticked(NOW + 30))
    (question,) = of_kind(RequestPlan, commands)
    opening, commands = act(asked, PlanFound(NOW + 30, question.request, proposal(A, B, C)))
    (write,) = of_kind(WriteGeneration, commands)
    assert write.record.restore == Restore(durable(30).point, "durable")
    assert (write.lowers, write.settles) == (durable(30), ID)
    assert active_of(opening).checkpointing.check is None


GOES_ON = "steps after 38 may be wrong, since replicas differed, and the job goes on from them: "


def test_without_a_readable_earlier_checkpoint_the_job_goes_on_and_says_so() -> None:
    looks, _ = decide(running(), failed())
    after, commands = decide(looks, found(None))
    assert Note(f"{GOES_ON}none can be read", JOB, is_transition=True) in commands
    assert not of_kind(GiveOrder, commands)
    again, commands = decide(after, failed(B, number=7))
    assert not of_kind(CheckDurable, commands), "it is decided once"
    assert not active_of(again).orders


@pytest.mark.parametrize("is_away", [False, True])
def test_storage_that_does_not_answer_delays_the_job_by_a_minute(is_away: bool) -> None:
    """A state that may be wrong is better than to wait for ever."""
    waits, _ = decide(running(), failed())
    if is_away:
        waits, commands = decide(waits, found(None, is_away=True))
        assert not of_kind(CheckDurable, commands), "it is tried again a little later"
        waits, commands = decide(waits, Ticked(NOW + waits.options.commit_pause_s))
        assert of_kind(CheckDurable, commands)
    waits, commands = decide(waits, Ticked(NOW + 59))
    assert not of_kind(RequestPlan, commands)
    _, commands = decide(waits, Ticked(NOW + 61))
    why = "its storage has not answered for 60 s"
    assert Note(f"{GOES_ON}{why}", JOB, is_transition=True) in commands


def test_checkpoint_of_right_steps_that_is_on_its_way_is_awaited() -> None:
    """The first one too: without it the job would go on from the wrong steps."""
    begun, commands = act(
        running(newest=None), Reported(NOW, report(A, number=6, uploaded=(uploaded(A, 38),)))
    )
    assert of_kind(WriteManifest, commands)
    waits, commands = act(begun, failed(number=7))
    assert not of_kind(CheckDurable, commands)
    stored, commands = act(waits, ManifestWritten(NOW, JOB, durable(38)))
    assert of_kind(CommitCheckpoint, commands)
    _, commands = act(stored, CheckpointCommitted(NOW, JOB, durable(38)))
    (looked,) = of_kind(CheckDurable, commands)
    assert looked.durable == durable(38)


def test_checkpoint_of_wrong_steps_that_is_on_its_way_is_dropped() -> None:
    begun, commands = act(
        running(), Reported(NOW, report(A, number=6, uploaded=(uploaded(A, 40),)))
    )
    assert of_kind(WriteManifest, commands)
    waits, _ = act(begun, failed(number=7, uploaded=(uploaded(A, 40),)))
    _, commands = act(waits, ManifestWritten(NOW, JOB, durable(40)))
    assert not of_kind(CommitCheckpoint, commands)


def test_job_that_is_held_by_the_difference_goes_back_when_it_is_resumed() -> None:
    """Even if its budget is spent and raised in between."""
    options = replace(running().options, failures_until_held=1)
    looks, _ = act(replace(running(), options=options), failed())
    closing, commands = act(looks, found(30))
    (closed,) = of_kind(WriteGeneration, commands)
    held, _ = act(closing, GenerationWritten(NOW, closed.record))
    assert isinstance(phase(held), Held)
    spent = replace(held, jobs={JOB: replace(held.job, bill=Bill(9.0, until=NOW, usd_max=1.0))})
    refused, _ = act(spent, OrderGiven(NOW, order("resume", id_="too-early")))
    assert [each.id for each in active_of(refused).orders] == [ID]
    raised = replace(refused, jobs={JOB: replace(held.job, bill=Bill(until=NOW))})
    resumed, commands = act(raised, OrderGiven(NOW, order("resume", id_="again")))
    commands += act(resumed, Ticked(NOW + 30))[1]
    assert restore_now(resumed, active_of(resumed))[0] == Restore(durable(30).point, "durable")


def test_what_was_uploaded_of_the_wrong_state_is_not_committed() -> None:
    looks, commands = act(running(), failed(uploaded=(uploaded(A, 40),)))
    assert not of_kind(WriteManifest, commands)
    _, commands = act(looks, Ticked(NOW + 5))
    assert not of_kind(WriteManifest, commands)
    assert not of_kind(CommitCheckpoint, commands)


def test_difference_at_a_stop_is_not_what_the_next_plan_begins_from() -> None:
    stopping = state(
        Stopping(proposal(A, B), "a reason", NOW + 20),
        *map(node, (A, B)),
        generation=STOPPED,
        job=job(saving=KEPT),
    )
    looks, commands = act(replace(stopping, durables={JOB: durable(30)}), failed())
    assert of_kind(CheckDurable, commands)
    assert isinstance(phase(looks), Stopping)
    _, commands = act(looks, found(30))
    (write,) = of_kind(WriteGeneration, commands)
    assert write.record.restore == Restore(durable(30).point, "durable")


def test_pause_that_was_ordered_meanwhile_follows_the_rollback() -> None:
    looks, _ = act(running(), failed())
    pausing, _ = act(looks, OrderGiven(NOW, order("pause")))
    ordered, _ = act(pausing, found(30))
    following = next_order(active_of(ordered))
    assert following is not None
    assert following.kind == "rollback", "under any leader: it may have read them in another order"


def test_cancel_does_not_wait_for_the_storage() -> None:
    looks, _ = act(running(), failed())
    cancelled, _ = act(looks, OrderGiven(NOW, order("cancel")))
    assert isinstance(phase(cancelled), Closing)


def test_operators_rollback_is_not_replaced() -> None:
    back = order("rollback", durable=durable(10, 2))
    _, commands = act(running(orders=(back,)), failed())
    assert not of_kind(CheckDurable, commands)


def test_job_without_checkpoints_goes_on_and_says_so() -> None:
    after, commands = decide(running(newest=None), failed())
    assert not of_kind(CheckDurable, commands)
    assert not isinstance(phase(after), Held | Starting)
    assert Note(f"{GOES_ON}there is no checkpoint", JOB, is_transition=True) in commands


def test_answer_to_an_earlier_check_is_not_taken_for_this_one() -> None:
    looks, _ = act(running(40), failed())
    earlier = DurableChecked(NOW, JOB, durable(40), durable(40))
    after, commands = act(looks, earlier)
    assert not of_kind(GiveOrder, commands)
    assert active_of(after).checkpointing.check == active_of(looks).checkpointing.check
