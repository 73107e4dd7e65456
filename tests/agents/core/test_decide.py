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
    StoreIntent,
    Ticked,
)
from agents.protocol.records import Fence, Holding, Intent, Point, Restore, Uploaded
from tests.agents.core.life import (
    JOB,
    ME,
    NODE,
    NOW,
    OTHER,
    PEER,
    RUNS,
    TERM,
    G,
    act,
    idle,
    said,
    state,
)

G4 = replace(G, number=4, restore=Restore(Point(40, 3), "memory"))
WITHOUT_US = replace(G4, members=(PEER,))
CLOSED = replace(G, state="closed")
STOPPING = replace(G, state="stopping", stop_at=41)
FAILED = replace(RUNS, taking="failed", failure="no memory")
JOINING = replace(NODE, state="joining")
LEAVING = replace(NODE, state="draining", leaves_at=NOW + 30)
PREEMPTED = Intent("n1", "preempt", ME, NOW + 30, "the machine said so")
KEPT = Intent("n1-withdrawn", "withdraw", ME, None, "the machine stays")


def aborted(at: float = NOW) -> Gang:
    return replace(RUNS, abort_sent_at=at)


def vote(step: int, of: int = 3) -> Uploaded:
    return Uploaded(Point(step, of), f"{of}-{step}", 1, "", (Holding(0, 0, 1),))


Row = tuple[str, State, Event, Gang | None, tuple[Command, ...]]

JOINS: list[Row] = [
    (
        "a generation that counts on this node is joined from its restore point",
        idle(),
        GenerationRead(NOW, G4),
        Gang(4, "fetching", step=40, advanced_at=NOW),
        (JoinGeneration(G4),),
    ),
    ("one of others is not", idle(), GenerationRead(NOW, WITHOUT_US), None, ()),
    (
        "one that is told to stop is not",
        idle(),
        GenerationRead(NOW, replace(G4, state="stopping")),
        None,
        (),
    ),
    ("one that was left is not gone back to", idle(record=None), GenerationRead(NOW, G), None, ()),
    (
        "one below what was heard of is not",
        idle(heard=Fence(TERM, 5), left=0),
        GenerationRead(NOW, G4),
        None,
        (),
    ),
    (
        "none is joined while the store is silent",
        idle(record=G4, store_silent_since=NOW - 1),
        Ticked(NOW),
        None,
        (),
    ),
    (
        "another job counts its generations from one",
        idle(record=CLOSED),
        GenerationRead(NOW, replace(G, job=OTHER, number=1)),
        Gang(1, "fetching", step=10, advanced_at=NOW),
        (JoinGeneration(replace(G, job=OTHER, number=1)),),
    ),
]

ENDS: list[Row] = [
    ("workers whose generation goes on are let be", state(), GenerationRead(NOW, G), RUNS, ()),
    ("a newer one ends it by word", state(), GenerationRead(NOW, G4), aborted(), (AbortGang(3),)),
    ("so does its end", state(), GenerationRead(NOW, CLOSED), aborted(), (AbortGang(3),)),
    ("and a job that is gone", state(), GenerationRead(NOW, None), aborted(), (AbortGang(3),)),
    (
        "an older one that was read late does not",
        state(),
        GenerationRead(NOW, replace(G4, number=2)),
        RUNS,
        (),
    ),
    (
        "before the store was read, workers that were found are let be",
        state(record=None, has_read_store=False),
        Ticked(NOW + 100),
        RUNS,
        (),
    ),
    (
        "they have some time to go by themselves",
        state(aborted(NOW - 1.9), record=G4),
        Ticked(NOW),
        aborted(NOW - 1.9),
        (),
    ),
    (
        "then they are killed",
        state(aborted(NOW - 2), record=G4),
        Ticked(NOW),
        replace(aborted(NOW - 2), kill_sent_at=NOW),
        (KillGang(3),),
    ),
    (
        "not again at once",
        state(replace(aborted(NOW - 9), kill_sent_at=NOW - 4.9), record=G4),
        Ticked(NOW),
        replace(aborted(NOW - 9), kill_sent_at=NOW - 4.9),
        (),
    ),
    (
        "but again",
        state(replace(aborted(NOW - 9), kill_sent_at=NOW - 5), record=G4),
        Ticked(NOW),
        replace(aborted(NOW - 9), kill_sent_at=NOW),
        (KillGang(3),),
    ),
    (
        "the next generation has the devices only when the last has left them",
        state(aborted(NOW - 1), record=G4),
        GangReported(NOW, 3, "idle"),
        Gang(4, "fetching", step=40, advanced_at=NOW),
        (JoinGeneration(G4),),
    ),
    (
        "or is gone",
        state(aborted(NOW - 1), record=G4),
        GangExited(NOW, 3),
        Gang(4, "fetching", step=40, advanced_at=NOW),
        (JoinGeneration(G4),),
    ),
    (
        "what another generation's workers say is not meant",
        state(aborted(NOW - 1), record=G4),
        GangExited(NOW, 2),
        aborted(NOW - 1),
        (),
    ),
]

WORDS: list[Row] = [
    (
        "they are told once where to stop",
        state(),
        GenerationRead(NOW, STOPPING),
        replace(RUNS, stop_at=41),
        (SendStop(3, 41),),
    ),
    (
        "and not twice",
        state(replace(RUNS, stop_at=41)),
        GenerationRead(NOW, STOPPING),
        replace(RUNS, stop_at=41),
        (),
    ),
    (
        "their word is what counts",
        state(),
        GangReported(NOW, 3, "broken", 41, (PEER,)),
        replace(RUNS, taking="broken", step=41, advanced_at=NOW, broken_peers=(PEER,)),
        (),
    ),
    (
        "a step that comes again does not advance",
        state(),
        GangReported(NOW, 3, "running", 40),
        RUNS,
        (),
    ),
    (
        "workers that failed are ended, whatever the store says",
        state(),
        GangReported(NOW, 3, "failed", 40, failure="no memory", is_bug=True),
        replace(FAILED, is_bug=True, abort_sent_at=NOW),
        (AbortGang(3),),
    ),
    (
        "and do not come back to life",
        state(replace(FAILED, abort_sent_at=NOW - 1)),
        GangReported(NOW, 3, "running", 41),
        replace(FAILED, abort_sent_at=NOW - 1),
        (),
    ),
]

FENCES: list[Row] = [
    (
        "a leader may say that it is over before the store shows it",
        state(),
        AbortReceived(NOW, JOB, Fence(TERM, 3)),
        replace(aborted(), taking="failed", failure="aborted by the leader"),
        (AbortGang(3),),
    ),
    (
        "of an earlier generation it means nothing",
        state(),
        AbortReceived(NOW, JOB, Fence(TERM, 2)),
        RUNS,
        (),
    ),
    (
        "of another job it says nothing",
        state(),
        AbortReceived(NOW, OTHER, Fence(TERM, 9)),
        RUNS,
        (),
    ),
    ("nor from who leads no more", state(), AbortReceived(NOW, JOB, Fence(TERM - 1, 3)), RUNS, ()),
]

SILENCE: list[Row] = [
    (
        "cut off, workers whose steps go on are let be",
        state(replace(RUNS, advanced_at=NOW - 29.9), store_silent_since=NOW - 500),
        Ticked(NOW),
        replace(RUNS, advanced_at=NOW - 29.9),
        (),
    ),
    (
        "and are parked when none is done",
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
        "but not before a few steps could have been done",
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
        "a store that was away for a moment changes nothing",
        state(replace(RUNS, advanced_at=NOW - 500), store_silent_since=NOW - 29),
        Ticked(NOW),
        replace(RUNS, advanced_at=NOW - 500),
        (),
    ),
    (
        "one that answers is not silent",
        state(replace(RUNS, advanced_at=NOW - 500), store_silent_since=NOW - 500),
        GenerationRead(NOW, G),
        replace(RUNS, advanced_at=NOW - 500),
        (),
    ),
    (
        "its first silence is what counts",
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
        (idle(), NoticeGiven(NOW, "n1", NOW + 30), (Register(LEAVING), StoreIntent(PREEMPTED))),
        (idle(node=LEAVING, notices=frozenset(["n1"])), NoticeGiven(NOW, "n1", NOW + 30), ()),
        (
            idle(node=LEAVING, notices=frozenset(["n1"])),
            NoticeGiven(NOW, "n1", NOW + 9),
            (Register(replace(LEAVING, leaves_at=NOW + 9)),),
        ),
        (
            idle(node=LEAVING, notices=frozenset(["n1"])),
            NoticeWithdrawn(NOW, "n1"),
            (Register(NODE), StoreIntent(KEPT)),
        ),
        (
            idle(node=LEAVING, notices=frozenset(["n1"]), is_healthy=False),
            NoticeWithdrawn(NOW, "n1"),
            (Register(replace(JOINING, leaves_at=None)), StoreIntent(KEPT)),
        ),
        (idle(node=LEAVING, notices=frozenset(["n1", "n2"])), NoticeWithdrawn(NOW, "n1"), ()),
        (idle(), NoticeWithdrawn(NOW, "n1"), ()),
    ],
    ids=[
        "tested",
        "tested while it leaves",
        "not ready",
        "a device breaks",
        "a device breaks while it leaves",
        "a device was mended",
        "the lease is gone",
        "a notice",
        "a notice twice",
        "a notice that it goes sooner",
        "a false alarm",
        "a false alarm at a node that failed its self-test",
        "one of two alarms was false",
        "nothing to withdraw",
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


def test_an_agent_that_was_stopped_hears_its_workers_before_it_parks_them() -> None:
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
    assert woken.gang.taking == "failed", "nobody said anything for as long as at any time"


def test_a_shortage_of_memory_is_reported_for_short_s_at_least() -> None:
    (report,) = said(state(), TOO_SMALL)
    assert (report.failure, report.no_room, report.is_bug) == ("rank 0: no room",) * 2 + (False,)
    short, _ = act(state(), TOO_SMALL)
    left, _ = act(short, GangExited(NOW, 3))
    assert left.gang is None or left.gang.taking == "failed"

    def no_room(at: float, free_bytes: int) -> str:
        (report,) = said(act(left, FreeMemoryMeasured(at, free_bytes))[0], Ticked(at + 1))
        return report.no_room

    assert no_room(NOW + 60, 99) == "rank 0: no room"
    assert no_room(NOW + 59.9, 100) == "rank 0: no room", "memory comes and goes"
    assert no_room(NOW + 60, 100) == ""


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
    assert [type(order) for order in orders] == [Register, StoreIntent]
    assert leaving.gang == RUNS
    closed, _ = act(leaving, GenerationRead(NOW, CLOSED))
    _, orders = act(closed, GangExited(NOW, 3))
    assert orders == (Exit(),)
    assert act(idle(notices=frozenset(["n1"])), StopRequested(NOW))[1] == (Exit(),)
