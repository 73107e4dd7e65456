"""Reports what happened: to the log, the event feed, the job's stored history and the outbox."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, get_args

import structlog

from agents.daemon.backoff import Backoff
from agents.protocol.records import (
    ENDED,
    PREPARING,
    Evaluation,
    JobId,
    Order,
    OrderKind,
)
from agents.store.interface import Operation, StoreError, WriteRejected
from sailord.cluster_records import HISTORY_MAX, Gateway, Transition
from sailord.core.model.commands import Note, Settled
from sailord.core.model.state import Active, State
from sailord.core.queries.forecast import BUDGET, DEADLINE, at_risk
from sailord.core.queries.reconfiguration_timing import (
    ReconfigurationTiming,
    Reconfiguring,
    follow,
)
from sailord.notify.changes import changes_of_job, changes_of_nodes, event_at, where
from sailord.notify.feed import EventKind, Feed, FeedEvent
from sailord.notify.message_formats import WORDS
from sailord.notify.outbox import Message, Outbox, job_stopped
from sailord.notify.summaries import summary_of
from sailord.notify.telemetry import TraceSender
from sailord.text.units import duration

log = structlog.get_logger("sailord")

_EVALUATION = "evaluation after"
_UNFIT = "cannot run it"
ORDERS: dict[OrderKind, str] = {
    "preempt": "preempting {}",
    "withdraw": "withdrawing the notice or drain of {}",
    "drain": "draining {}",
    "cordon": "cordoning {}",
    "uncordon": "uncordoning {}",
    "quarantine": "quarantining {}",
    "cancel": "cancelling {}",
    "pause": "pausing {}",
    "resume": "resuming {}",
    "budget": "a budget for {}",
    "priority": "a priority for {}",
    "replan": "a new plan for {}",
    "checkpoint": "a checkpoint of {}",
    "rollback": "a rollback of {}",
}
"""What each order asks for, of a job or node."""
_ORDERED = re.compile(
    rf"({'|'.join(get_args(OrderKind))}) \S+ was ordered"
    r"|the checkpoint of step \d+ was (un)?pinned"
)
RISKS: tuple[EventKind, ...] = (BUDGET, DEADLINE)
_OF_HISTORY: tuple[EventKind, ...] = ("transition", "order", "reconfigured", *RISKS)
"""Kinds of events that are also written to a job's history, each of them; some notes are, too."""
WAITING_MAX = 1_000
"""History lines that wait for the store; beyond this the oldest without a message are dropped."""
BACKOFF_S, BACKOFF_S_MAX = 0.3, 30.0
"""First and longest pause between two attempts to write a history line."""

PartChange = tuple[JobId | None, State, State]
"""Whose part it is (``None``: the first one, which is all without sharing), before and after."""


@dataclass(eq=False)
class Announcer:
    """Turns decisions' notes and changes of state into events."""

    gateway: Gateway
    feed: Feed
    outbox: Outbox
    telemetry: TraceSender = field(default_factory=lambda: TraceSender(None, ""))
    keeps_deadline: Callable[[JobId], bool] = lambda _job: False
    """Whether instances are rented for a job's deadline: the capacity loop then warns."""
    _under_way: dict[JobId | None, Reconfiguring | None] = field(default_factory=dict)
    """The timing of the reconfiguration that is under way, by part."""
    _moves: dict[JobId, deque[ReconfigurationTiming]] = field(default_factory=dict)
    _noted: set[tuple[JobId, str]] = field(default_factory=set)
    """The notes in each job's history: evaluations, failed loggers, why nodes cannot run it."""
    _at_risk: set[tuple[JobId, str]] = field(default_factory=set)
    """Jobs whose budget or deadline was already announced to be at risk."""
    _unreadable: set[str] = field(default_factory=set)
    """Records that the feed names as unreadable."""
    _lines: asyncio.Queue[tuple[JobId, Transition, Sequence[Operation]]] = field(
        default_factory=asyncio.Queue
    )

    def note(self, note: Note, state: State, cause: str, at: float) -> None:
        """Log and publish a decision's note; a transition is also written to the history."""
        active = state.active
        about = active if active is not None and active.job == note.job else None
        generation, step = where(about)
        kind: EventKind = "transition" if note.is_transition else "note"
        about_job = {"job": note.job, "generation": generation, "step": step}
        event = replace(
            event_at(kind, note.text, state, **about_job, is_detail=note.is_detail),
            id=self.feed.next_id(at),
            at=at,
            settled=note.settled,
        )
        log.info(event.text, job=event.job, generation=generation, step=step, term=event.term,
                 cause=cause)  # fmt: skip
        self.feed.add(event)
        if note.is_transition and note.job is not None:
            self._keep(note.job, history_line(event))

    def observe(
        self, before: State, after: State, parts: Iterable[PartChange] = ()
    ) -> list[ReconfigurationTiming]:
        """Publish what changed between two states; return the reconfigurations that ended.

        ``parts``: the same for each job that runs, if several do. A new leader sees every state for
        the first time. It publishes nothing to the feed then, and the outbox recognizes facts
        reported before by their ids.
        """
        moves, parts = [], tuple(parts) or ((None, before, after),)
        for key, then, now in parts:
            self._under_way[key], move = follow(self._under_way.get(key), then, now)
            if move is not None and now.active is not None:
                self._report_timing(move, now.active.job, now)
                moves.append(move)
        if after.term is None:
            return moves
        for _, then, now in parts:
            self._report_evaluations(then, now)
            self._report_unfit(then, now)
            self._report_risks(now)
        of_jobs = {now.active.job: now for _, _, now in parts if now.active is not None}
        changes = [*changes_of_nodes(before, after, of_jobs)]
        for _, then, now in parts:
            changes += changes_of_job(then, now)
        is_new = before.term != after.term
        for event, id_ in changes:
            if not is_new:
                self.feed.add(replace(event, id=self.feed.next_id(after.now)))
            if id_ and not (is_new and self._is_long_over(event, after)):
                self.outbox.offer(id_, event)
        return moves

    def _is_long_over(self, event: FeedEvent, state: State) -> bool:
        """Whether a fact is of a job whose end the outbox has forgotten, and with it the fact."""
        job = None if event.job is None else state.jobs.get(JobId(event.job))
        end = None if job is None or job.state not in ENDED else job_stopped(job, 0.0, 0)
        return end is not None and end[0] not in self.outbox.at_of

    def _report_evaluations(self, before: State, after: State) -> None:
        if after.active is None:
            return
        known = () if before.active is None else before.active.evaluations
        for found in after.active.evaluations:
            if found not in known:
                self._report_evaluation(found, after.active, after)
        if after.active.unlogged:
            self._note_once(after.active.unlogged, after.active, after)

    def _report_timing(self, move: ReconfigurationTiming, job: JobId, state: State) -> None:
        """Report what a reconfiguration took and what was predicted."""
        generation = None if state.active is None else state.active.generation
        text = summary_of(move, 0 if generation is None else len(generation.members))
        log.info(text, job=job, generation=move.generation, phases=dict(move.phases))
        about = {"generation": move.generation, "step": move.restored_step}
        event = self._next_event(
            "reconfigured", text, state, job=job, settled=_find_settled(move), **about
        )
        self.feed.add(event)
        self._keep(job, history_line(event, move))
        self._moves.setdefault(job, deque(maxlen=HISTORY_MAX)).append(move)
        self.telemetry.offer(move, job, state)

    def _next_event(self, kind: EventKind, text: str, state: State, **others: Any) -> FeedEvent:
        return replace(event_at(kind, text, state, **others), id=self.feed.next_id(state.now))

    def moves_of(self, job: JobId) -> tuple[ReconfigurationTiming, ...]:
        """A job's last reconfigurations, oldest first: those of earlier leaders, and ours."""
        return tuple(self._moves.get(job, ()))

    def _report_evaluation(self, found: Evaluation, active: Active, state: State) -> None:
        """Keep the metrics of an evaluation in the history, once."""
        figures = ", ".join(
            f"{name} {'not finite' if value is None else f'{value:.5g}'}"
            for name, value in found.metrics
        )
        text = f"{_EVALUATION} {found.step} steps: {figures}"
        self._note_once(text, active, state, step=found.step)

    def _report_unfit(self, before: State, after: State) -> None:
        """Keep in the history why a node cannot run the job, once."""
        for id_ in sorted(after.nodes.notable):
            node, known = after.nodes[id_], before.nodes.get(id_)
            why = "" if node.report is None else node.report.unfit
            # A node that failed in a generation is in the history already.
            if node is known or after.active is None or why in ("", PREPARING):
                continue
            of = None if node.report is None else node.report.unfit_for
            if of not in (None, after.active.job):
                continue  # It has still to prepare for this job.
            text = f"{node.record.name} {_UNFIT}: {why}"
            if node.workers.failed_since is None:
                self._note_once(text, after.active, after, node=node.record.name)

    def _note_once(
        self, text: str, active: Active, state: State, *, step: int | None = None, node: str = ""
    ) -> None:
        """Note a text in a job's history once, also across leaders."""
        if (active.job, text) in self._noted:
            return
        self._noted.add((active.job, text))
        generation, now = where(active)
        about = {"job": active.job, "node": node or None, "generation": generation}
        event = self._next_event("note", text, state, **about, step=now if step is None else step)
        (log.warning if node else log.info)(text, job=active.job, generation=generation)
        self.feed.add(event)
        self._keep(active.job, history_line(event))

    def risks(self, state: State) -> dict[EventKind, str]:
        """Return why the active job's budget or deadline is at risk, without a deadline that the
        capacity loop watches."""
        active = state.active
        known = () if active is None else [r for r in RISKS if (active.job, r) in self._at_risk]
        found = at_risk(state, known)
        is_kept = active is not None and self.keeps_deadline(active.job)
        return {
            kind: found[kind] for kind in RISKS if kind in found and (kind == BUDGET or not is_kept)
        }

    def _report_risks(self, state: State) -> None:
        """Announce once that a job's budget or deadline is at risk."""
        if state.active is not None:
            for kind, text in self.risks(state).items():
                self._report_risk(kind, text, state.active.job, state)

    def _report_risk(self, kind: EventKind, text: str, job: JobId, state: State) -> None:
        """Announce a risk once for each job, across leaders: the history records it."""
        if (job, kind) in self._at_risk:
            return
        self._at_risk.add((job, kind))
        event = event_at(kind, text, state, job=job)
        log.warning(text, job=job)
        told = replace(event, id=self.feed.next_id(state.now), text=f"{WORDS[kind]}: {text}")
        self.feed.add(told)
        # Stored together: a line in the history always has its message in the outbox.
        self._keep(job, history_line(told), (f"{job}.{kind}", event))

    def tell_deadline(self, job: JobId, text: str, state: State, *, is_at_risk: bool) -> None:
        """Tell what is rented for a job's deadline, and once that the deadline is at risk."""
        active = state.active
        if active is None or active.job != job:
            return
        if is_at_risk and (job, DEADLINE) not in self._at_risk:
            self._report_risk(DEADLINE, text, job, state)
        else:
            self.note(Note(text, job, is_transition=True), state, "deadline", state.now)

    def tell_order(self, order: Order, state: State) -> None:
        """Tell who ordered what: in the feed, and in the history of the job that it concerns.

        The reason names who it was.
        """
        default = f"{order.kind} was ordered"
        what = ORDERS[order.kind].format(order.target)
        said = f"{what}{_to_step(order)} was ordered{_end(order, state.now)}"
        if order.reason.startswith(default):
            said += order.reason.removeprefix(default)
        elif order.reason:
            said += f": {order.reason}"
        is_of_job = order.target in state.jobs
        active = None if state.active is None else state.active.job
        job = JobId(order.target) if is_of_job else active
        self.tell_given(said, job, None if is_of_job else order.target, state, order.id)

    def tell_given(
        self, said: str, job: JobId | None, node: str | None, state: State, id_: str = ""
    ) -> None:
        """Tell of an order, in the feed and in the history of the job; without ``id_`` it leaves
        no record."""
        event = self._next_event("order", said, state, job=job, node=node, order=id_)
        self.feed.add(event)
        if job is not None:
            self._keep(job, history_line(event))

    def tell_election(self, text: str, term: int, at: float) -> None:
        """Add an election to the event feed; the caller logs it."""
        self.feed.add(FeedEvent(self.feed.next_id(at), at, "note", text, term=term))

    def tell_unreadable(self, records: Iterable[str], state: State) -> None:
        """Tell once of each record in the store that cannot be read; the log has it already."""
        for name in [name for name in records if name not in self._unreadable]:
            self._unreadable.add(name)
            text = f"{name} cannot be read and is left alone; see sailorctl doctor"
            id_, at = self.feed.next_id(state.now), state.now
            self.feed.add(FeedEvent(id_, at, "note", text, term=state.term or 0))

    def restore(self, job: JobId, history: Iterable[Transition]) -> None:
        """Fill the feed with a job's stored history, after an election."""
        history = tuple(history)
        moves = (line.move for line in history if line.move is not None)
        self._moves[job] = deque(moves, HISTORY_MAX)
        events = [_event_of(line, job) for line in history]
        for event in events:
            if event.kind == "note":
                self._noted.add((job, event.text))
            if event.kind in RISKS:
                self._at_risk.add((job, event.kind))
        self.feed.restore(events)

    def history_in_memory(self, job: JobId) -> tuple[Transition, ...]:
        """Return the lines of a job's history that the feed still has, without timings."""
        return tuple(
            history_line(event)
            for event in self.feed.kept
            if event.job == job and (event.kind in _OF_HISTORY or (job, event.text) in self._noted)
        )

    def _keep(self, job: JobId, line: Transition, message: Message | None = None) -> None:
        """Write a line of the history soon, and with it a message unless it was reported before."""
        if self._lines.qsize() >= WAITING_MAX:
            self._drop_oldest()
        if message is not None and message[0] in self.outbox.at_of:
            message = None
        self._lines.put_nowait((job, line, self.outbox.operations_for(message)))

    def _drop_oldest(self) -> None:
        """Drop the oldest waiting line that has no message: those are never sent again."""
        waiting = [self._lines.get_nowait() for _ in range(self._lines.qsize())]
        dropped = next((n for n, (_, _, has) in enumerate(waiting) if not has), None)
        for number, each in enumerate(waiting):
            if number != dropped:
                self._lines.put_nowait(each)

    async def run(self) -> None:
        """Write history lines to the store; while it is unavailable they wait."""
        while True:
            job, line, operations = await self._lines.get()
            backoff = Backoff(BACKOFF_S, BACKOFF_S_MAX)
            while not await self._is_written(job, line, operations):
                await asyncio.sleep(backoff.next_s())
            if operations:
                self.outbox.ring()

    async def _is_written(
        self, job: JobId, line: Transition, operations: Sequence[Operation]
    ) -> bool:
        try:
            await self.gateway.write_transition(job, line, operations)
        except WriteRejected as error:
            log.error("the store rejects a line of the history for good", job=job, error=str(error))
            return not operations or await self._is_stored_alone(operations)
        except StoreError:
            return False
        return True

    async def _is_stored_alone(self, operations: Sequence[Operation]) -> bool:
        """Store the message of a line that the store rejects."""
        try:
            await self.gateway.store.transact([], operations)
        except WriteRejected as error:
            log.error("the store rejects its message, too", error=str(error))
        except StoreError:
            return False
        return True


def _to_step(order: Order) -> str:
    """Say which step a rollback goes to."""
    return "" if order.durable is None else f" to step {order.durable.point.step}"


def _end(order: Order, now: float) -> str:
    """Say when a node ends."""
    return "" if order.leaves_at is None else f" (ends in {duration(order.leaves_at - now)})"


_SHARED = tuple(each.name for each in fields(Transition) if each.name not in ("move", "kind"))
"""What an event and its line in a history both have, under the same names."""


def history_line(event: FeedEvent, move: ReconfigurationTiming | None = None) -> Transition:
    """Return an event as a line of a job's history."""
    shared: dict[str, Any] = {name: getattr(event, name) for name in _SHARED}
    return Transition(**shared, kind=event.kind, move=move)


def _event_of(line: Transition, job: JobId) -> FeedEvent:
    """Return the event that a line of the job's history was written for."""
    shared: dict[str, Any] = {name: getattr(line, name) for name in _SHARED}
    kinds = (kind for kind in get_args(EventKind) if kind == line.kind)
    settled = None if line.move is None else _find_settled(line.move)
    return FeedEvent(**shared, kind=next(kinds, _guess_kind(line)), job=job, settled=settled)


def _find_settled(move: ReconfigurationTiming) -> Settled | None:
    """The orders that a reconfiguration carried out, if there are any."""
    return Settled(move.orders, move.restored_step) if move.orders else None


def _guess_kind(line: Transition) -> EventKind:
    """The kind of a line by a version that wrote none, or one that only later versions know."""
    if line.move is not None:
        return "reconfigured"
    for kind in RISKS:
        if line.text.startswith(f"{WORDS[kind]}: "):
            return kind
    if line.text.startswith(_EVALUATION) or f" {_UNFIT}: " in line.text:
        return "note"
    return "order" if _ORDERED.match(line.text) else "transition"
