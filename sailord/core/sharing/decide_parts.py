"""The controller's decision where jobs share the cluster: ``decide`` for each part, then the deal.

Each event goes to the parts that it is about. With one part, which has all nodes, this is
``decide``. Whose a node is, is written in the records of the jobs (``JobRecord.part``): a new
leader reads it there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import assert_never

from agents.protocol.records import LIVE, JobId, JobRecord, NodeId, Order
from sailord.core import invariants
from sailord.core.decide import decide
from sailord.core.learn import lives_by_name
from sailord.core.model import events
from sailord.core.model.commands import Command, Note, WriteJob
from sailord.core.model.rule import state_note
from sailord.core.model.state import State
from sailord.core.sharing.deal import job_to_recall, next_handover
from sailord.core.sharing.handover import announced, begin, continue_handover, joined
from sailord.core.sharing.parts import Parts, PartsChange, nodes_in_all, whole

NODE_ORDERS = ("preempt", "drain", "withdraw", "cordon", "uncordon", "quarantine")
Routed = Iterator[tuple[JobId | None, events.Event]]
LOOK_S = 1.0
"""Seconds between two searches for what should change hands: with 2,000 nodes each takes 40 ms."""


def decide_parts(parts: Parts, event: events.Event) -> PartsChange:
    """Return the parts after ``event``, and the commands to carry out; checks the invariants.

    First each part decides for itself, since what changes hands follows from that. Then a job may
    be recalled, so that the deal finds no job without a plan; then nodes are dealt; and last,
    agents are told of what the deal has begun or ended.
    """
    if not parts.first.options.share:
        first, commands = _decide_checked(parts.first, event)
        return PartsChange(replace(parts, first=first), commands)
    commands = ()
    if isinstance(event, events.Elected):
        parts = _read_parts(parts, event)
    for key, each in [*_route(parts, event)]:
        parts, told = _decide_in_part(parts, key, each)
        commands += told
    if parts.first.term is None:
        return PartsChange(Parts(parts.first), commands)
    is_due = _is_due(parts)
    for step in (_recall, _deal, announced):
        parts, told = step(parts)
        commands += told
    return PartsChange(replace(parts, looked_at=parts.first.now) if is_due else parts, commands)


def _is_due(parts: Parts) -> bool:
    """Whether to look for what should change hands: that takes longer than all other decisions."""
    return parts.first.now >= parts.looked_at + LOOK_S


def _decide_checked(state: State, event: events.Event) -> tuple[State, tuple[Command, ...]]:
    after, commands = decide(state, event)
    invariants.check(state, after, commands)
    return after, commands


def _decide_in_part(parts: Parts, key: JobId | None, event: events.Event) -> PartsChange:
    """Decide in one part; one whose job has left the cluster ends."""
    before = parts.of_job(key)
    # Answers of the planner name the number of their question alone.
    asked = max(part.requests for part in parts.all())
    after, commands = _decide_checked(replace(before, requests=asked), event)
    if key is None and _has_ended(before, after):
        parts = replace(parts, too_few={})
    if key is None or after.active is not None or after.term is None:
        parts = _without_settled_recall(parts.with_part(key, after), key)
        return PartsChange(parts, commands)
    others = {id_: part for id_, part in parts.others.items() if id_ != key}
    left = _put_back_in_line(parts, before, after.jobs[key])
    first = joined(parts.first, replace(after, jobs={key: left}))
    is_queued = left.state == "queued"
    too_few = {**parts.too_few, key: nodes_in_all(parts)} if is_queued else {}
    rest = tuple(each for each in commands if not _tells_of(each, key))
    recalled = _leave_out(parts.recalled, key)
    parts = replace(parts, first=first, others=others, recalled=recalled, too_few=too_few)
    ended = [each.settled for each in commands if isinstance(each, Note) and _tells_of(each, key)]
    told = replace(state_note(left), settled=next(filter(None, ended), None))
    return PartsChange(parts, (WriteJob(left), told, *rest))


def _without_settled_recall(parts: Parts, key: JobId | None) -> Parts:
    """Forget a recall whose pause a resume has taken back."""
    if key is None or key not in parts.recalled:
        return parts
    active, recall = parts.of_job(key).active, parts.recalled[key]
    is_open = active is not None and any(each.id == recall for each in active.orders)
    return parts if is_open else replace(parts, recalled=_leave_out(parts.recalled, key))


def _has_ended(before: State, after: State) -> bool:
    """Whether the job that had the part leaves it, so that others may get what it had."""
    was, now = before.active, after.active
    return was is not None and (now is None or now.job != was.job)


def _put_back_in_line(parts: Parts, before: State, job: JobRecord) -> JobRecord:
    """Return the record of a job whose part ends; one that was recalled is queued."""
    orders = () if before.active is None else before.active.orders
    recall = parts.recalled.get(job.id)
    is_ordered = any(each.kind == "pause" and each.id != recall for each in orders)
    if recall is None or job.state != "paused" or is_ordered:
        return replace(job, part=None, coming=())
    return replace(job, part=None, coming=(), state="queued")


def _tells_of(command: Command, job: JobId) -> bool:
    """Whether this tells of the job's last state, which is told anew."""
    if isinstance(command, Note):
        return command.is_transition and command.job == job
    return isinstance(command, WriteJob) and command.job.id == job


def _recall(parts: Parts) -> PartsChange:
    """Pause a job whose nodes others need, or that has no plan for them."""
    if parts.handover is not None or parts.recalled or not _is_due(parts):
        return PartsChange(parts)
    job = job_to_recall(parts)
    if job is None or next_handover(parts) is not None:
        return PartsChange(parts)
    now, reason = parts.first.now, "there is no plan for each of the jobs beside the others"
    order = Order(f"recall-{job}-{now}", "pause", job, reason=reason)
    parts = replace(parts, recalled={**parts.recalled, job: order.id})
    return _decide_in_part(parts, job, events.OrderGiven(now, order))


def _deal(parts: Parts) -> PartsChange:
    """Carry on with the handover, or begin the next one."""
    first = parts.first
    if parts.handover is not None:
        was = parts.others.keys()
        parts, commands = continue_handover(parts, parts.handover)
        for key in parts.others.keys() - was:
            parts, told = _decide_in_part(parts, key, events.Ticked(first.now))
            commands += told
        return PartsChange(parts, commands)
    is_calm = first.now >= parts.dealt_at + first.options.additions_gather_s
    is_time = is_calm and _is_due(parts) and not parts.recalled
    wanted = next_handover(parts) if is_time else None
    return PartsChange(parts) if wanted is None else begin(parts, *wanted)


# ---- whom an event is about ---------------------------------------------------------------------


def _route(parts: Parts, event: events.Event) -> Routed:
    """Yield the event for each part that it is about; ``None``: the first part."""
    match event:
        case events.Elected():
            yield from _route_election(parts, event)
        case events.NodesObserved():
            owners = parts.owners()  # Of thousands of nodes, looked up once for each.
            for key in (None, *parts.others):
                nodes = tuple(each for each in event.nodes if owners.get(each.id) == key)
                rest = tuple(each for each in event.nodes if owners.get(each.id) != key)
                unreadable = frozenset(id_ for id_ in event.unreadable if owners.get(id_) == key)
                yield key, replace(event, nodes=nodes, unreadable=unreadable, elsewhere=rest)
        case events.Reported():
            owners, reports = parts.owners(), (event.report, *event.others)
            for key in (None, *parts.others):
                own = tuple(each for each in reports if owners.get(each.node) == key)
                if own:
                    yield key, events.Reported(event.at, own[0], own[1:])
        case events.OrderGiven():
            names, orders = lives_by_name(whole(parts)), (event.order, *event.others)
            for key in (None, *parts.others):
                own_orders = tuple(_orders_for(parts, key, orders, names))
                if own_orders:
                    yield key, events.OrderGiven(event.at, own_orders[0], own_orders[1:])
        case events.ProbeFailed():
            yield parts.key_of(event.node), event
        case events.PlanFound() | events.PlanRefused():
            yield _find_asker(parts, event.request), event
        case events.GenerationWritten():
            yield _key(parts, event.record.job), event
        case (
            events.JobWriteRejected()
            | events.ManifestWritten()
            | events.CheckpointCommitted()
            | events.CommitFailed()
            | events.DurableChecked()
        ):
            yield _key(parts, event.job), event
        case events.JobSubmitted():
            if event.job.id not in parts.others:
                yield None, event
        case events.StoreReturned() | events.Ticked():
            for key in (None, *parts.others):
                yield key, event
        case events.JobsForgotten() | events.Deposed() | events.WriteRefused():
            yield None, event
        case _:
            assert_never(event)


def _read_parts(parts: Parts, event: events.Elected) -> Parts:
    """Return the parts that the records name, before anything is known of them."""
    first = parts.first
    blank = State(options=first.options, now=first.now, requests=first.requests)
    shared = [job for job in event.jobs if job.state in LIVE and job.part is not None]
    others = {job.id: replace(blank, jobs={job.id: job}) for job in shared}
    return Parts(first, others, dealt_at=event.at)


def _route_election(parts: Parts, event: events.Elected) -> Routed:
    """Give each part what the store has of its job and its nodes; the first one has the rest."""
    names = {node.name: node.id for node in event.nodes}
    for key in (None, *parts.others):
        own = replace(
            event,
            nodes=tuple(each for each in event.nodes if parts.key_of(each.id) == key),
            jobs=tuple(each for each in event.jobs if _key(parts, each.id) == key),
            generations=tuple(each for each in event.generations if _key(parts, each.job) == key),
            durables=tuple(each for each in event.durables if _key(parts, each[0]) == key),
            orders=tuple(_orders_for(parts, key, event.orders, names)),
            unreadable=event.unreadable if key is None else frozenset(),
        )
        yield key, own


def _orders_for(
    parts: Parts, key: JobId | None, orders: Iterable[Order], names: Mapping[str, NodeId]
) -> Iterator[Order]:
    """Yield a part's orders: about its job, and about all nodes, which it may get some day."""
    for order in orders:
        if order.kind not in NODE_ORDERS:
            if _key(parts, JobId(order.target)) == key:
                yield order
            continue
        id_ = NodeId(order.life) or names.get(order.target, NodeId(order.target))
        # The part that has the node stores which life of it is meant.
        yield order if parts.key_of(id_) == key else replace(order, life=id_)


def _leave_out(recalled: Mapping[JobId, str], job: JobId) -> Mapping[JobId, str]:
    return {key: order for key, order in recalled.items() if key != job}


def _key(parts: Parts, job: JobId) -> JobId | None:
    return job if job in parts.others else None


def _find_asker(parts: Parts, request: int) -> JobId | None:
    """Return whose question has this number."""
    for key, part in parts.others.items():
        question = None if part.active is None else part.active.question
        if question is not None and question.request == request:
            return key
    return None
