"""Single decisions of the agent: one event, its commands and the next state."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agents.core.model import (
    AbortGang,
    AbortReceived,
    Command,
    DeviceFailed,
    Event,
    Exit,
    FreeMemoryMeasured,
    Gang,
    GangExited,
    GangReported,
    GenerationRead,
    GenerationUnreadable,
    JoinGeneration,
    KillGang,
    LeaseEnded,
    NoticeGiven,
    NoticeWithdrawn,
    Register,
    Registered,
    SelfTested,
    SendStop,
    State,
    StopRequested,
    StoreFailed,
    StoreOrder,
    Ticked,
    UnfitChanged,
)
from agents.protocol.records import Fence, Order
from tests.agents.core.life import (
    CLOSED,
    FAILED,
    G4,
    JOB,
    ME,
    NODE,
    NOW,
    OTHER,
    PEER,
    RUNS,
    TERM,
    WITHOUT_US,
    G,
    aborted,
    act,
    idle,
    said,
    state,
)

STOPPING = replace(G, state="stopping", stop_at=41)
JOINING = replace(NODE, state="joining")
LEAVING = replace(NODE, state="draining", leaves_at=NOW + 30)
PREEMPTED = Order("n1", "preempt", ME, NOW + 30, "the machine announced its end")
KEPT = Order("n1-withdrawn", "withdraw", ME, None, "notice withdrawn", of_notice=True)


Row = tuple[str, State, Event, Gang | None, tuple[Command, ...]]

JOINS: list[Row] = [
    (
        "an open generation with this node is joined at its restore point",
        idle(),
        GenerationRead(NOW, G4),
        Gang(4, "fetching", step=40, advanced_at=NOW),
        (JoinGeneration(G4),),
    ),
    (
        "a generation without this node is not joined",
        idle(),
        GenerationRead(NOW, WITHOUT_US),
        None,
        (),
    ),
    (
        "a stopping generation is not joined",
        idle(),
        GenerationRead(NOW, replace(G4, state="stopping")),
        None,
        (),
    ),
    (
        "a generation that was left is not joined again",
        idle(record=None),
        GenerationRead(NOW, G),
        None,
        (),
    ),
    (
        "a generation below the highest fence is not joined",
        idle(heard=Fence(TERM, 5), left=0),
        GenerationRead(NOW, G4),
        None,
        (),
    ),
    (
        "no generation is joined while the store is silent",
        idle(record=G4, store_silent_since=NOW - 1),
        Ticked(NOW),
        None,
        (),
    ),
    (
        "generations are counted per job",
        idle(record=CLOSED),
        GenerationRead(NOW, replace(G, job=OTHER, number=1)),
        Gang(1, "fetching", step=10, advanced_at=NOW),
        (JoinGeneration(replace(G, job=OTHER, number=1)),),
    ),
]

ENDS: list[Row] = [
    ("workers of the present generation go on", state(), GenerationRead(NOW, G), RUNS, ()),
    (
        "a newer generation aborts them",
        state(),
        GenerationRead(NOW, G4),
        aborted(),
        (AbortGang(3),),
    ),
    (
        "a closed generation aborts them",
        state(),
        GenerationRead(NOW, CLOSED),
        aborted(),
        (AbortGang(3),),
    ),
    ("an unreadable record changes nothing", state(), GenerationUnreadable(NOW), RUNS, ()),
    (
        "an unreadable record after the store was silent shows that the store answers",
        state(replace(RUNS, advanced_at=NOW - 500), store_silent_since=NOW - 500),
        GenerationUnreadable(NOW),
        replace(RUNS, advanced_at=NOW - 500),
        (),
    ),
    ("a missing job aborts them", state(), GenerationRead(NOW, None), aborted(), (AbortGang(3),)),
    (
        "a late read of an older generation changes nothing",
        state(),
        GenerationRead(NOW, replace(G4, number=2)),
        RUNS,
        (),
    ),
    (
        "workers that were found go on until the store is read",
        state(record=None, has_read_store=False),
        Ticked(NOW + 100),
        RUNS,
        (),
    ),
    (
        "aborted workers are not killed before abort_s",
        state(aborted(NOW - 1.9), record=G4),
        Ticked(NOW),
        aborted(NOW - 1.9),
        (),
    ),
    (
        "aborted workers are killed after abort_s",
        state(aborted(NOW - 2), record=G4),
        Ticked(NOW),
        replace(aborted(NOW - 2), kill_sent_at=NOW),
        (KillGang(3),),
    ),
    (
        "killed workers are not killed again before kill_s",
        state(replace(aborted(NOW - 9), kill_sent_at=NOW - 4.9), record=G4),
        Ticked(NOW),
        replace(aborted(NOW - 9), kill_sent_at=NOW - 4.9),
        (),
    ),
    (
        "killed workers are killed again after kill_s",
        state(replace(aborted(NOW - 9), kill_sent_at=NOW - 5), record=G4),
        Ticked(NOW),
        replace(aborted(NOW - 9), kill_sent_at=NOW),
        (KillGang(3),),
    ),
    (
        "the next generation is joined when the workers are idle",
        state(aborted(NOW - 1), record=G4),
        GangReported(NOW, 3, "idle"),
        Gang(4, "fetching", step=40, advanced_at=NOW),
        (JoinGeneration(G4),),
    ),
    (
        "the next generation is joined when the workers have ended",
        state(aborted(NOW - 1), record=G4),
        GangExited(NOW, 3),
        Gang(4, "fetching", step=40, advanced_at=NOW),
        (JoinGeneration(G4),),
    ),
    (
        "a status of another generation is ignored",
        state(aborted(NOW - 1), record=G4),
        GangExited(NOW, 2),
        aborted(NOW - 1),
        (),
    ),
]

WORDS: list[Row] = [
    (
        "the step to stop at is sent once",
        state(),
        GenerationRead(NOW, STOPPING),
        replace(RUNS, stop_at=41),
        (SendStop(3, 41),),
    ),
    (
        "the step to stop at is not sent twice",
        state(replace(RUNS, stop_at=41)),
        GenerationRead(NOW, STOPPING),
        replace(RUNS, stop_at=41),
        (),
    ),
    (
        "the workers' status is taken over",
        state(),
        GangReported(NOW, 3, "broken", 41, (PEER,)),
        replace(RUNS, taking="broken", step=41, advanced_at=NOW, broken_peers=(PEER,)),
        (),
    ),
    ("a repeated step is no progress", state(), GangReported(NOW, 3, "running", 40), RUNS, ()),
    (
        "failed workers are aborted although the generation is open",
        state(),
        GangReported(NOW, 3, "failed", 40, failure="no memory", is_bug=True),
        replace(FAILED, is_bug=True, abort_sent_at=NOW),
        (AbortGang(3),),
    ),
    (
        "a failed gang does not recover",
        state(replace(FAILED, abort_sent_at=NOW - 1)),
        GangReported(NOW, 3, "running", 41),
        replace(FAILED, abort_sent_at=NOW - 1),
        (),
    ),
]

FENCES: list[Row] = [
    (
        "an abort is obeyed before the store shows it",
        state(),
        AbortReceived(NOW, JOB, Fence(TERM, 3)),
        replace(aborted(), taking="failed", failure="aborted by the leader"),
        (AbortGang(3),),
    ),
    (
        "an abort of an earlier generation is ignored",
        state(),
        AbortReceived(NOW, JOB, Fence(TERM, 2)),
        RUNS,
        (),
    ),
    (
        "an abort of another job is ignored",
        state(),
        AbortReceived(NOW, OTHER, Fence(TERM, 9)),
        RUNS,
        (),
    ),
    (
        "an abort by a deposed leader is ignored",
        state(),
        AbortReceived(NOW, JOB, Fence(TERM - 1, 3)),
        RUNS,
        (),
    ),
]

SILENCE: list[Row] = [
    (
        "workers that make progress go on while the store is silent",
        state(replace(RUNS, advanced_at=NOW - 29.9), store_silent_since=NOW - 500),
        Ticked(NOW),
        replace(RUNS, advanced_at=NOW - 29.9),
        (),
    ),
    (
        "workers without progress are parked while the store is silent",
        state(replace(RUNS, advanced_at=NOW - 30), store_silent_since=NOW - 500),
        Ticked(NOW),
        replace(
            RUNS,
            advanced_at=NOW - 30,
            taking="failed",
            failure="cut off from the store, and no step was done",
            abort_sent_at=NOW,
        ),
        (AbortGang(3),),
    ),
    (
        "workers are not parked before the time of three steps",
        state(
            replace(RUNS, advanced_at=NOW - 59.9),
            store_silent_since=NOW - 500,
            record=replace(G, step_s=20.0),
        ),
        Ticked(NOW),
        replace(RUNS, advanced_at=NOW - 59.9),
        (),
    ),
    (
        "a short silence of the store changes nothing",
        state(replace(RUNS, advanced_at=NOW - 500), store_silent_since=NOW - 29),
        Ticked(NOW),
        replace(RUNS, advanced_at=NOW - 500),
        (),
    ),
    (
        "an answer ends the silence of the store",
        state(replace(RUNS, advanced_at=NOW - 500), store_silent_since=NOW - 500),
        GenerationRead(NOW, G),
        replace(RUNS, advanced_at=NOW - 500),
        (),
    ),
    (
        "the silence counts from the first failure",
        state(store_silent_since=NOW - 29),
        StoreFailed(NOW),
        RUNS,
        (),
    ),
]


@pytest.mark.parametrize(
    ("before", "event", "then", "orders"),
    [pytest.param(*row[1:], id=row[0]) for row in (*JOINS, *ENDS, *WORDS, *FENCES, *SILENCE)],
)
def test_decision(
    before: State, event: Event, then: Gang | None, orders: tuple[Command, ...]
) -> None:
    after, commands = act(before, event)
    assert after.gang == then
    assert commands == orders


# ---- the node ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "event", "orders"),
    [
        (idle(node=JOINING), SelfTested(NOW), (Register(NODE),)),
        (idle(node=LEAVING), SelfTested(NOW), (Register(LEAVING),)),
        (idle(), SelfTested(NOW, "a device is gone"), ()),
        (idle(), DeviceFailed(NOW, "device 0 is gone"), (Register(JOINING),)),
        (idle(node=LEAVING), DeviceFailed(NOW, "device 0 is gone"), (Register(LEAVING),)),
        (idle(node=JOINING, is_healthy=False, fault="gone"), SelfTested(NOW), (Register(NODE),)),
        (idle(), LeaseEnded(NOW), (Register(NODE),)),
        (idle(), NoticeGiven(NOW, "n1", NOW + 30), (Register(LEAVING), StoreOrder(PREEMPTED))),
        (idle(node=LEAVING, notices=frozenset(["n1"])), NoticeGiven(NOW, "n1", NOW + 30), ()),
        (
            idle(node=LEAVING, notices=frozenset(["n1"])),
            NoticeGiven(NOW, "n1", NOW + 9),
            (Register(replace(LEAVING, leaves_at=NOW + 9)),),
        ),
        (
            idle(node=LEAVING, notices=frozenset(["n1"])),
            NoticeWithdrawn(NOW, "n1"),
            (Register(NODE), StoreOrder(KEPT)),
        ),
        (
            idle(node=LEAVING, notices=frozenset(["n1"]), is_healthy=False),
            NoticeWithdrawn(NOW, "n1"),
            (Register(replace(JOINING, leaves_at=None)), StoreOrder(KEPT)),
        ),
        (idle(node=LEAVING, notices=frozenset(["n1", "n2"])), NoticeWithdrawn(NOW, "n1"), ()),
        (idle(), NoticeWithdrawn(NOW, "n1"), ()),
    ],
    ids=[
        "the self-test passes",
        "the self-test passes while draining",
        "the self-test fails",
        "a device fails",
        "a device fails while draining",
        "a device was repaired",
        "the lease expires",
        "a notice is given",
        "the same notice is given twice",
        "a notice moves the departure forward",
        "a notice is withdrawn",
        "a notice is withdrawn on a node that failed its self-test",
        "one of two notices is withdrawn",
        "no notice to withdraw",
    ],
)
def test_node_decision(before: State, event: Event, orders: tuple[Command, ...]) -> None:
    assert act(before, event)[1] == orders


def test_workers_on_a_broken_device_are_aborted_and_the_fault_is_reported() -> None:
    after, orders = act(state(), DeviceFailed(NOW, "device 0 is gone"))
    assert orders == (Register(JOINING), AbortGang(3))
    assert after.gang == replace(aborted(), taking="failed", failure="device 0 is gone")
    (report,) = said(state(), DeviceFailed(NOW, "device 0 is gone"))
    assert (report.failure, report.fault, report.is_bug) == ("device 0 is gone",) * 2 + (False,)
    left, _ = act(after, GangExited(NOW, 3))
    named, orders = act(left, GenerationRead(NOW, G4))
    assert named.gang is not None
    assert (named.gang.generation, named.gang.taking) == (4, "failed")
    (report,) = said(left, GenerationRead(NOW, G4))
    assert (report.generation, report.taking, report.failure) == (4, "failed", "device 0 is gone")
    sound, _ = act(left, SelfTested(NOW))
    assert said(sound, Ticked(NOW + 1))[0].fault == ""


TOO_SMALL = GangReported(NOW, 3, "failed", failure="rank 0: no room", room_needed=100)


def test_a_resumed_agent_reads_from_its_workers_before_it_parks_them() -> None:
    before = state(replace(RUNS, advanced_at=NOW - 29.9), store_silent_since=NOW - 500)
    woken, _ = act(before, Ticked(NOW + 2))
    assert woken.gang is not None
    assert woken.gang.taking == RUNS.taking
    heard, _ = act(woken, GangReported(NOW + 2.1, 3, RUNS.taking, RUNS.step + 9))
    assert heard.gang is not None
    assert heard.gang.advanced_at == NOW + 2.1
    at = NOW + 2
    while at < NOW + 32:
        at = min(at + 1, NOW + 32)
        woken, _ = act(woken, Ticked(at))
    assert woken.gang is not None
    assert woken.gang.taking == "failed", "it counts anew after the agent resumed"


def test_what_fails_is_reported_with_its_job() -> None:
    (report,) = said(state(), UnfitChanged(NOW, "setup `exit 3` exited with 3", OTHER))
    assert (report.unfit, report.unfit_for) == ("setup `exit 3` exited with 3", OTHER)


def test_a_shortage_of_memory_is_reported_for_short_s_at_least() -> None:
    (report,) = said(state(), TOO_SMALL)
    assert (report.failure, report.unfit, report.is_bug) == ("rank 0: no room",) * 2 + (False,)
    short, _ = act(state(), TOO_SMALL)
    left, _ = act(short, GangExited(NOW, 3))
    assert left.gang is None or left.gang.taking == "failed"

    def unfit(at: float, free_bytes: int) -> str:
        (report,) = said(act(left, FreeMemoryMeasured(at, free_bytes))[0], Ticked(at + 1))
        return report.unfit

    assert unfit(NOW + 60, 99) == "rank 0: no room"
    assert unfit(NOW + 59.9, 100) == "rank 0: no room", "memory comes and goes"
    assert unfit(NOW + 60, 100) == ""


def test_a_shortage_ends_with_the_job() -> None:
    short, _ = act(state(), TOO_SMALL)
    free = replace(short, gang=None, left=3, record=CLOSED)
    after, _ = act(free, GenerationRead(NOW, replace(WITHOUT_US, job=OTHER, number=1)))
    assert (after.job, after.shortage) == (OTHER, None)


def test_a_write_of_an_older_node_record_does_not_count_as_registered() -> None:
    after, _ = act(idle(is_registered=False), Registered(NOW, LEAVING))
    assert not after.is_registered
    assert act(after, Registered(NOW, NODE))[0].is_registered


def test_a_stopped_agent_exits_when_its_workers_have_ended() -> None:
    leaving, orders = act(state(), StopRequested(NOW))
    assert [type(order) for order in orders] == [Register, StoreOrder]
    assert leaving.gang == RUNS
    closed, _ = act(leaving, GenerationRead(NOW, CLOSED))
    _, orders = act(closed, GangExited(NOW, 3))
    assert orders == (Exit(),)
    unused = idle(record=CLOSED, notices=frozenset(["n1"]))
    assert act(unused, StopRequested(NOW))[1] == (Exit(),)
