"""Changes of state become events, each once."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import pytest

from agents.protocol.codec import decode, encode
from agents.protocol.records import (
    PREPARING,
    Evaluation,
    JobId,
    Order,
    OrderKind,
    Taking,
)
from agents.protocol.store_keys import Keys
from agents.store.interface import StoreUnavailable
from agents.store.sqlite_store import EmbeddedStore
from sailord.cluster_records import Gateway, Transition
from sailord.core.model.commands import Note, Settled
from sailord.core.model.events import NodesObserved, OrderGiven, Reported
from sailord.core.model.nodes import Nodes
from sailord.core.model.phases import Running, Starting
from sailord.core.model.state import State
from sailord.core.queries.reconfiguration_timing import ReconfigurationTiming
from sailord.notify import announcer
from sailord.notify.announcer import Announcer
from sailord.notify.feed import EventKind, Feed, FeedEvent
from sailord.notify.outbox import Outbox
from tests.sailord.core.states import (
    BEGAN,
    G4,
    JOB,
    NOW,
    QUESTION,
    WAITING,
    A,
    B,
    C,
    Planning,
    act,
    changed,
    durable,
    job,
    node,
    order,
    proposal,
    record,
    report,
    state,
)
from tests.sailord.notify.published import Published

OTHER = JobId("other")
STARTS, RUNS = state(Starting(NOW - 1, NOW + 30, 1.0)), state(Running(BEGAN))
ASKS = state(replace(QUESTION, before=Running(BEGAN), is_forced=False))


def test_generation_that_continues_after_a_plan_request_is_announced_once() -> None:
    published = Published()
    for before, after in ((STARTS, RUNS), (RUNS, ASKS), (ASKS, RUNS), (RUNS, ASKS)):
        published.announcer.observe(before, after)
    assert published.texts("generation_running") == ["generation 3 runs"]


def test_generation_replanned_as_soon_as_it_runs_is_announced_too() -> None:
    published = Published()
    published.announcer.observe(STARTS, ASKS)
    assert published.texts("generation_running") == ["generation 3 runs"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (order("drain", "machine-b", reason="bolts (by eve)"),
         "draining machine-b was ordered: bolts (by eve)"),
        (order("cordon", "machine-b", reason="cordon was ordered (by eve)"),
         "cordoning machine-b was ordered (by eve)"),
        (order("pause"), "pausing job was ordered"),
        (order("preempt", "machine-b", leaves_at=NOW + 30),
         "preempting machine-b was ordered (ends in 30.0 s)"),
        (order("rollback", durable=durable(20), reason="loss jumped (by eve)"),
         "a rollback of job to step 20 was ordered: loss jumped (by eve)"),
    ],
    ids=["reason", "none", "by a daemon", "preempt", "rollback"],
)  # fmt: skip
def test_events_of_orders_name_who_gave_them(given: Order, said: str) -> None:
    published = Published()
    published.announcer.tell_order(given, RUNS)
    assert published.texts("order") == [said]
    (kept,) = published.announcer.feed.kept
    assert (kept.job, kept.node) == (JOB, None if given.target == JOB else "machine-b")
    assert kept.order == given.id
    _, line, _ = published.announcer._lines.get_nowait()
    later = Published()
    later.announcer.restore(JOB, [line])
    assert list(later.announcer.feed.kept) == [kept], "a later leader shows it, too"


def test_each_kind_of_order_is_told_in_words() -> None:
    assert set(announcer.ORDERS) == set(get_args(OrderKind))


def test_an_order_without_a_record_is_an_event_and_in_its_jobs_history() -> None:
    published = Published()
    published.announcer.tell_given("the checkpoint of step 5 was pinned (by eve)", JOB, None, RUNS)
    published.announcer.tell_given("a measurement of all links was ordered", None, None, RUNS)
    (pinned, measured) = published.announcer.feed.kept
    assert (pinned.kind, pinned.job, measured.kind, measured.job) == ("order", JOB, "order", None)
    job, line, _ = published.announcer._lines.get_nowait()
    assert (job, line.text) == (JOB, "the checkpoint of step 5 was pinned (by eve)")
    assert published.announcer._lines.empty()
    later = Published()
    later.announcer.restore(JOB, [line])
    assert later.texts("order") == [pinned.text], "a later leader shows it, too"


def evaluated(step: int, loss: float | None) -> State:
    """A running job of which a member has reported an evaluation."""
    found = Evaluation(step, (("loss", loss), ("accuracy", 0.625)))
    return act(RUNS, Reported(NOW, report(A, number=9, step=step, evaluation=found)))[0]


def test_an_evaluation_is_kept_in_the_history_once() -> None:
    published = Published()
    first, second = evaluated(20, 2.25), evaluated(40, None)
    for before, after in ((RUNS, first), (first, first), (first, second), (second, second)):
        published.announcer.observe(before, after)
    told = [
        "evaluation after 20 steps: loss 2.25, accuracy 0.625",
        "evaluation after 40 steps: loss not finite, accuracy 0.625",
    ]
    assert published.texts("note") == told
    lines = [published.announcer._lines.get_nowait()[1] for _ in told]
    assert [(line.step, line.text) for line in lines] == list(zip((20, 40), told, strict=True))
    # A new leader knows from the history which one was kept.
    other = Published()
    other.announcer.restore(RUNS.active.job, lines)
    other.announcer.observe(RUNS, second)
    assert other.texts("note") == told, "restored, with their kind, and not told again"
    assert other.announcer._lines.empty()
    assert [line.text for line in other.announcer.history_in_memory(JOB)] == told


def test_failed_logger_is_told_in_the_history_once() -> None:
    published, text = Published(), "WandB is not used any more: OSError: no space left"
    before = act(RUNS, Reported(NOW, report(A, number=8, step=10, unlogged=text)))[0]
    after = act(before, Reported(NOW, report(A, number=9, step=20, unlogged=text)))[0]
    published.announcer.observe(RUNS, before)
    published.announcer.observe(before, after)
    assert published.texts("note") == [text]
    line = published.announcer._lines.get_nowait()[1]
    assert published.announcer._lines.empty()
    # A new leader hears of it again, and knows from the history that it was told.
    other = Published()
    other.announcer.restore(JOB, [line])
    other.announcer.observe(RUNS, after)
    assert other.texts("note") == [text], "restored, and not told again"


def test_several_evaluations_of_one_report_are_all_kept() -> None:
    """A report that replaces others holds what they held, and what is known already."""
    published = Published()
    first, second, third = (Evaluation(step, (("loss", step / 8),)) for step in (10, 20, 30))
    told = report(A, number=9, step=30, evaluation=third, earlier_evaluations=(first, second))
    before = act(RUNS, Reported(NOW, report(A, number=8, step=10, evaluation=first)))[0]
    after = act(before, Reported(NOW, told))[0]
    published.announcer.observe(RUNS, before)
    published.announcer.observe(before, after)
    assert published.texts("note") == [
        f"evaluation after {step} steps: loss {step / 8:g}" for step in (10, 20, 30)
    ]


def unfit(why: str, number: int = 9, taking: Taking = "idle") -> State:
    """A job of which one node reports that it cannot run it."""
    said = report(A, taking, number=number, unfit=why)
    return act(RUNS, Reported(NOW, said))[0]


def test_error_of_the_job_before_is_not_reported_of_the_job_that_has_the_cluster() -> None:
    published = Published()
    said = report(A, "idle", number=9, unfit="setup `exit 3` exited with 3", unfit_for="other")
    published.announcer.observe(RUNS, act(RUNS, Reported(NOW, said))[0])
    assert published.texts("note") == []
    said = replace(said, number=10, unfit_for=JOB)
    published.announcer.observe(RUNS, act(RUNS, Reported(NOW, said))[0])
    assert published.texts("note") == ["machine-a cannot run it: setup `exit 3` exited with 3"]


def test_why_a_node_cannot_run_the_job_is_kept_in_the_history_once() -> None:
    published = Published()
    prepares, fails = unfit(PREPARING), unfit("setup `make` exited with 2: no make")
    for before, after in ((RUNS, prepares), (prepares, fails), (fails, fails), (prepares, fails)):
        published.announcer.observe(before, after)
    told = ["machine-a cannot run it: setup `make` exited with 2: no make"]
    assert published.texts("note") == told
    lines = [published.announcer._lines.get_nowait()[1]]
    other = Published()
    other.announcer.restore(RUNS.active.job, lines)
    other.announcer.observe(RUNS, fails)
    assert other.texts("note") == told, "restored, with its kind, and not told again"
    assert [event.node for event in other.announcer.feed.kept] == ["machine-a"]


@pytest.mark.parametrize("kind", get_args(EventKind))
def test_an_event_keeps_all_that_it_has_in_the_history(kind: EventKind) -> None:
    event = FeedEvent(
        7,
        NOW,
        kind,
        "why",
        job=JOB,
        node="machine-a",
        generation=3,
        step=40,
        term=2,
        is_detail=True,
    )
    line = decode(Transition, encode(announcer.history_line(event)))
    later = Published()
    later.announcer.restore(JOB, [line])
    assert [*later.announcer.feed.kept] == [event]


@pytest.mark.parametrize("kind", ["", "of a later version"])
@pytest.mark.parametrize(
    ("text", "guessed"),
    [
        ("evaluation after 20 steps: loss 2.25", "note"),
        ("machine-a cannot run it: no make", "note"),
        ("budget at risk: it will cost $7", "budget_at_risk"),
        ("drain machine-b was ordered: bolts", "order"),
        ("held: no plan", "transition"),
    ],
)
def test_the_kind_of_a_line_without_a_known_one_is_guessed(
    text: str, guessed: str, kind: str
) -> None:
    later = Published()
    later.announcer.restore(JOB, [Transition(7, NOW, text, kind=kind)])
    assert [event.kind for event in later.announcer.feed.kept] == [guessed]


def test_an_election_is_an_event_after_the_restored_history() -> None:
    later = Published()
    later.announcer.restore(JOB, [Transition(7, NOW - 60, "running", kind="transition")])
    later.announcer.tell_election("sailord on head-2 was elected leader, term 8", 8, NOW)
    last = later.announcer.feed.kept[-1]
    assert (last.text[:18], last.term, last.kind) == ("sailord on head-2 ", 8, "note")


def test_a_node_that_failed_in_a_generation_is_reported_by_its_transition() -> None:
    published = Published()
    published.announcer.observe(RUNS, unfit("no memory", taking="failed"))
    assert published.texts("note") == []


def test_next_generation_is_announced() -> None:
    published = Published()
    published.announcer.observe(RUNS, state(Running(NOW), generation=G4))
    assert published.texts("generation_running") == ["generation 4 runs"]


def test_generation_closed_before_a_pause_is_not_announced_as_opened_on_resume() -> None:
    published = Published()
    paused = replace(RUNS, active=None)
    closed = state(Running(NOW), generation=replace(G4, state="closed"))
    published.announcer.observe(paused, closed)
    assert published.texts("generation_opened") == []
    published.announcer.observe(paused, state(Running(NOW), generation=G4))
    assert len(published.texts("generation_opened")) == 1


def test_the_end_of_a_job_is_an_event_also_in_the_queue_and_where_another_follows() -> None:
    published, waits = Published(), replace(job(), id=OTHER, state="queued")
    before = RUNS.with_job(waits)
    cancelled, _ = act(before, OrderGiven(NOW, order("cancel", OTHER)))
    published.announcer.observe(before, cancelled)
    done = replace(job(), state="done", reason="all 9 steps are done")
    turn = replace(cancelled.active, job=OTHER, generation=G4, phase=WAITING)  # type: ignore[type-var] # it is active
    follows = replace(before.with_job(done).with_job(replace(waits, state="running")), active=turn)
    published.announcer.observe(before, follows)
    published.announcer.observe(follows, follows)
    ends = [each for each in published.announcer.feed.kept if each.kind == "job_finished"]
    assert [(each.job, each.text, each.generation) for each in ends] == [
        (OTHER, "cancelled: cancel was ordered", None),
        (JOB, "done: all 9 steps are done", None),
    ]


def test_plan_request_during_the_start_does_not_announce_a_running_generation() -> None:
    published = Published()
    asks = Planning(4, (A, B), "b leaves", True, NOW + 9, proposal(), before=STARTS.active.phase)  # type: ignore[union-attr, arg-type] # it starts
    published.announcer.observe(STARTS, state(asks))
    assert published.texts("generation_running") == []


def test_each_lost_node_is_announced_once() -> None:
    published = Published()
    known = ASKS.nodes[B]
    lost = replace(ASKS, nodes=ASKS.nodes.with_({B: changed(known, lost_at=NOW, why_lost="gone")}))
    published.announcer.observe(ASKS, lost)
    heard = replace(lost.nodes[B], heard_at=NOW)
    published.announcer.observe(lost, replace(lost, nodes=lost.nodes.with_({B: heard})))
    assert published.texts("node_lost") == ["machine-b is lost: gone"]


def test_node_that_leaves_without_a_job_on_it_is_reported() -> None:
    """A preempted node ends at its deadline, when the job has moved off it long ago."""
    published = Published()
    nodes = Nodes({**ASKS.nodes, C: node(C, draining_since=NOW - 30)})
    before = replace(ASKS, nodes=nodes)
    after, _ = act(before, NodesObserved(NOW, (record(A), record(B))))
    assert C not in after.nodes
    published.announcer.observe(before, after)
    told = "machine-c left: its lease ended, as it was announced"
    assert published.texts("note") == [told]
    assert published.announcer.feed.kept[-1].node == "machine-c"


MOVE = ReconfigurationTiming(
    1, NOW, "start", "", is_planned=False, source="start", restored_step=0, steps_lost=0,
    downtime_s=0.0, total_s=10.19, predicted_s=0.0, phases=(("plan", 9.0),),
)  # fmt: skip


def test_start_is_announced_without_and_reconfiguration_with_its_cost() -> None:
    published = Published()
    reason = "b is lost: its lease expired; c is lost: the same; d is draining"
    moved = replace(MOVE, generation=2, kind="loss", reason=reason, source="memory")
    moved = replace(moved, downtime_s=3.04, steps_lost=1, predicted_s=2.5, orders=("drain-d",))
    for move in (MOVE, moved):
        published.announcer._report_timing(move, RUNS.active.job, RUNS)  # type: ignore[union-attr] # it has a job
    assert published.texts("reconfigured") == [
        "started on 2 nodes from step 0, 10.2 s",
        "b, c lost; d drained → moved to 2 nodes, 1 step lost, 3.0 s downtime",
    ]
    started, ended = published.announcer.feed.kept
    assert (started.settled, ended.settled) == (None, Settled(("drain-d",), 0))
    lines = [published.announcer._lines.get_nowait()[1] for _ in (started, ended)]
    later = Published()
    later.announcer.restore(JOB, lines)
    assert list(later.announcer.feed.kept) == [started, ended], "a later leader knows it, too"


@dataclass
class Away:
    """A store that fails the first writes."""

    store: EmbeddedStore
    refusals: int

    async def transact(self, *said: Any) -> Any:
        if self.refusals:
            self.refusals -= 1
            raise StoreUnavailable("by the test")
        return await self.store.transact(*said)

    async def snapshot(self, prefix: str) -> Any:
        return await self.store.snapshot(prefix)


async def test_history_lines_wait_for_the_store_and_are_written_after_their_term(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcer, "BACKOFF_S", 0.001)
    monkeypatch.setattr(announcer, "BACKOFF_S_MAX", 0.002)
    store = await EmbeddedStore.open(tmp_path / "store")
    gateway = Gateway(Away(store, refusals=20), Keys("test"))  # type: ignore[arg-type] # its half
    announcing = Announcer(gateway, Feed(), Outbox(gateway))
    job = RUNS.active.job  # type: ignore[union-attr] # it has a job
    # The term of these lines is over.
    for text in ("a rank failed", "no plan"):
        announcing.note(Note(text, job, is_transition=True), RUNS, "Reported", NOW)
    task = asyncio.create_task(announcing.run())
    async with asyncio.timeout(20):
        while len(await gateway.read_history(job)) < 2:
            await asyncio.sleep(0.01)
    assert [line.text for line in await gateway.read_history(job)] == ["a rank failed", "no plan"]
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await store.close()


def test_each_drain_of_a_node_is_announced_once_across_leaders() -> None:
    published, now, told = Published(), RUNS, list[str]()
    steps = (
        order("drain", A, "one"),
        order("preempt", A, "notice", leaves_at=NOW + 30),
        order("preempt", A, "notice again", leaves_at=NOW + 30),
        order("withdraw", A, "back"),
        order("drain", A, "two"),
    )
    for number, each in enumerate(steps):
        before, (now, _) = now, act(now, OrderGiven(NOW + number, each))
        published.announcer.observe(before, now)
        told += [id_ for id_ in published.announcer.outbox.at_of if id_ not in told]
        # A new leader tells the same again, if at all: it is stored once.
        later = Published()
        later.announcer.observe(state(Running(BEGAN)), now)
        assert set(later.announcer.outbox.at_of) <= set(told)
    assert told == [f"{A}.leaves.one", f"{A}.leaves.{int(NOW + 30)}.one", f"{A}.leaves.two"]
