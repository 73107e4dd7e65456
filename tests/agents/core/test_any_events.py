"""Properties of an agent's decisions over any order of events."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from agents.core.decide import decide
from agents.core.model import (
    AbortGang,
    AbortReceived,
    Command,
    Event,
    GangExited,
    GangReported,
    GenerationRead,
    JoinGeneration,
    KillGang,
    NoticeGiven,
    NoticeWithdrawn,
    SendReport,
    SendStop,
    SnapshotsChanged,
    State,
    StoreFailed,
    StoreOrder,
    Ticked,
)
from agents.protocol.records import Fence, GenerationState, Point, Restore, Taking
from tests.agents.core.life import JOB, ME, NODE, OTHER, PEER, SEALED, G

numbers = st.integers(1, 4)
moves = st.one_of(
    st.tuples(
        st.just("read"), numbers, st.sampled_from(("open", "open", "stopping", "closed")),
        st.booleans(), st.booleans(),
    ),
    st.tuples(
        st.just("workers"), st.sampled_from(("running", "stopped", "broken", "failed", "idle")),
        st.integers(0, 2),
    ),
    st.tuples(st.just("exited"), st.integers(0, 1)),
    st.tuples(st.just("abort"), numbers, st.integers(1, 2)),
    st.tuples(st.just("tick"), st.sampled_from((0.1, 1.0, 2.5, 6.0, 31.0))),
    st.tuples(st.just("silent")),
    st.tuples(st.just("notice"), st.booleans()),
    st.tuples(st.just("sealed")),
)  # fmt: skip
lives = st.lists(moves, min_size=5, max_size=50)


class Life:
    """An agent, and the results of its commands."""

    def __init__(self) -> None:
        self.state = State(NODE)
        self.now = 0.0
        self.given: list[Command] = []

    def feed(self, event: Event) -> tuple[Command, ...]:
        self.state, commands = decide(self.state, event)
        self.given += commands
        return commands

    def event(self, move: tuple[object, ...]) -> Event:
        """Turn a drawn move into an event that is possible now."""
        self.now += 0.01
        gang = self.state.gang
        present = 0 if gang is None else gang.generation
        match move:
            case ("read", int() as number, str() as state, bool() as is_ours, bool() as is_other):
                # While it has workers, it sees their job only.
                job = self.state.job if gang is not None else (OTHER if is_other else JOB)
                record = replace(
                    G,
                    job=job or JOB,
                    number=number,
                    state=cast("GenerationState", state),
                    term=number,
                    members=(ME, PEER) if is_ours else (PEER,),
                    restore=Restore(Point(number, number - 1), "memory"),
                    stop_at=number + 1 if state == "stopping" else None,
                )
                return GenerationRead(self.now, record)
            case ("workers", str() as taking, int() as more):
                step = more + (0 if gang is None else gang.step)
                return GangReported(self.now, present, cast("Taking", taking), step)
            case ("exited", int() as before):
                return GangExited(self.now, present - before)
            case ("abort", int() as number, int() as term):
                return AbortReceived(self.now, JOB, Fence(term, number))
            case ("tick", float() as more):
                self.now += more
                return Ticked(self.now)
            case ("silent",):
                return StoreFailed(self.now)
            case ("notice", bool() as is_real):
                return NoticeGiven(self.now, "n") if is_real else NoticeWithdrawn(self.now, "n")
            case _:
                return SnapshotsChanged(self.now, SEALED, self.state.job)


@given(lives)
def test_equal_histories_give_equal_decisions(history: list[tuple[object, ...]]) -> None:
    one, other = Life(), Life()
    for move in history:
        one.feed(one.event(move))
        other.feed(other.event(move))
    assert (one.state, one.given) == (other.state, other.given)


@given(lives)
def test_a_repeated_event_changes_nothing(history: list[tuple[object, ...]]) -> None:
    life = Life()
    for move in history:
        event = life.event(move)
        life.feed(event)
        once = life.state
        assert life.feed(event) == (), event
        assert life.state == once, event


@given(lives)
def test_devices_have_one_generation_and_no_node_returns_to_an_earlier_one(
    history: list[tuple[object, ...]],
) -> None:
    life = Life()
    held: tuple[object, int] | None = None
    joined: set[tuple[object, int]] = set()
    last: dict[object, int] = {}
    for move in history:
        event = life.event(move)
        before = life.state
        for command in life.feed(event):
            match command:
                case JoinGeneration(record=record):
                    is_free = before.gang is None or (
                        isinstance(event, GangExited)
                        or (isinstance(event, GangReported) and event.taking == "idle")
                        or before.gang.is_free
                    )
                    assert is_free, f"{record} while {before.gang} has the devices"
                    if before.job == record.job:
                        assert record.number > last.get(record.job, 0), "it went back"
                    held, last = (record.job, record.number), {record.job: record.number}
                    joined.add(held)
                case AbortGang() | SendStop() | KillGang():
                    assert held is not None
                    assert command.generation == held[1]
                case _:
                    pass
        assert life.state.heard.term >= before.heard.term


@given(lives)
def test_workers_are_aborted_before_they_are_killed(history: list[tuple[object, ...]]) -> None:
    life = Life()
    for move in history:
        life.feed(life.event(move))
    told: set[int] = set()
    for command in life.given:
        match command:
            case AbortGang():
                assert command.generation not in told, "told twice"
                told.add(command.generation)
            case KillGang():
                assert command.generation in told, "killed without a word"
            case JoinGeneration():
                told.clear()
            case _:
                pass


@given(lives)
def test_report_numbers_grow_and_each_notice_is_stored_once(
    history: list[tuple[object, ...]],
) -> None:
    life = Life()
    for move in history:
        life.feed(life.event(move))
    sent = [each.report.number for each in life.given if isinstance(each, SendReport)]
    assert sent == sorted(set(sent))
    raised = [each.order for each in life.given if isinstance(each, StoreOrder)]
    kinds = [order.kind for order in raised]
    assert all(one != other for one, other in pairwise(kinds))
