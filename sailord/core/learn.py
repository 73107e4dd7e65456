"""Folds an event into the state, before any rule is asked.

Nodes and reports arrive as whole snapshots: a lost event is made good by the next one of its kind,
and one that comes twice changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import assert_never

from agents.protocol.records import (
    ENDED,
    LIVE,
    Durable,
    GenerationRecord,
    JobId,
    JobRecord,
    JobState,
    NodeId,
    Order,
    OrderKind,
)
from sailord.core.model import events
from sailord.core.model.commands import (
    Command,
    GiveOrder,
    Note,
    Settled,
    SettleOrder,
    WriteGeneration,
)
from sailord.core.model.nodes import UNTROUBLED, Node
from sailord.core.model.phases import Closing, Held, Opening, Phase, Starting, Stopping, Waiting
from sailord.core.model.rule import Step, state_note, write_job
from sailord.core.model.state import Active, LastQuestion, Progress, State
from sailord.core.node_lifecycle import (
    give_up_nodes,
    grant_grace,
    mark,
    observe_nodes,
    probe_failed,
    take_reports,
)
from sailord.core.queries.job_cost import charge, why_unpaid
from sailord.core.queries.job_queue import queue_order
from sailord.core.queries.straggler_queries import watched
from sailord.core.queries.timeouts import adopted_start_s, scaled_step_s, stop_s
from sailord.core.rules.checkpoint_rules import take_storage_outcome
from sailord.text.units import dollars

MARKS_MAX = 4096
"""Nodes whose orders are remembered; beyond it lost ones are forgotten, the oldest first."""
_ORDERED: dict[tuple[JobState, OrderKind], JobState] = {
    ("queued", "cancel"): "cancelled",
    ("queued", "pause"): "paused",
    ("paused", "cancel"): "cancelled",
    ("paused", "resume"): "queued",
    ("failed", "resume"): "queued",
}
"""The state that an order gives to a job that does not have the cluster."""


def learn(state: State, event: events.Event) -> Step:
    """Fold the event into the state; the commands are its immediate consequences, no decisions."""
    # If no event at all arrived, we were stopped ourselves: silence says nothing about the nodes.
    stood_still = event.at > state.now + state.options.still_s
    leases_since = event.at if stood_still else state.leases_since
    woken_at = event.at if event.at > state.now + state.options.nap_s else state.woken_at
    before = state = replace(
        state, now=max(state.now, event.at), leases_since=leases_since, woken_at=woken_at
    )
    if state.term is None and not isinstance(event, events.Elected):
        return Step(state)  # Only the leader follows events; a new one reads the whole store.
    commands: tuple[Command, ...] = ()
    match event:
        case events.Elected():
            state, commands = _take_over(state, event)
        case events.Deposed() | events.WriteRefused():
            return Step(State(options=state.options, now=state.now, requests=state.requests))
        case events.NodesObserved():
            state = observe_nodes(state, event.nodes, event.unreadable, event.elsewhere)
            if not before.nodes.keys() >= state.nodes.keys():
                state = replace(state, unpaid={})  # The new node may be cheaper.
        case events.Reported():
            state = take_reports(state, (event.report, *event.others))
        case events.ProbeFailed():
            state = probe_failed(state, event.node)
        case events.OrderGiven():
            state, commands = _note_orders(state, (event.order, *event.others))
        case events.JobSubmitted():
            state, commands = _queue(state, event.job, event.durable)
        case events.JobsForgotten():
            state = _forget_jobs(state, event.jobs)
        case events.PlanFound() | events.PlanRefused():
            state = _answer(state, event)
        case events.GenerationWritten():
            state = _take_record(state, event.record)
        case events.JobWriteRejected():
            if state.active is not None and state.active.job == event.job:
                state = replace(state, active=replace(state.active, rejected=event.why))
        case events.StoreReturned():
            state = replace(state, leases_since=state.now)
        case events.Ticked():
            state = watched(state)
        case _:
            state = take_storage_outcome(state, event)
    state, billed = charge(before, give_up_nodes(state))
    return Step(state, (*billed, *commands))


def _take_over(state: State, event: events.Elected) -> Step:
    """Start from what the store holds; nothing is kept from an earlier term."""
    jobs = {job.id: job for job in event.jobs}
    generations = {record.job: record for record in event.generations}
    live = sorted((job for job in event.jobs if job.state in LIVE), key=queue_order)
    active = _adopt(live[0], generations.pop(live[0].id, None), state, event) if live else None
    taken = State(
        options=state.options,
        now=state.now,
        term=event.term,
        led_since=event.at,
        leases_since=event.at,
        jobs=jobs,
        generations=generations,
        durables=dict(event.durables),
        active=active,
        requests=state.requests,
        unreadable=event.unreadable,
    )
    taken = observe_nodes(taken, event.nodes)
    if active is not None and active.generation is not None:
        taken = grant_grace(taken, active.generation.members)
    commands: list[Command] = []
    for other in live[1:]:  # An older version, or one whose jobs share, leaves several.
        taken, written = _requeue(taken, other, f"{live[0].id} has the cluster")
        commands += written
    for job in [*taken.jobs.values()]:
        if not (state.options.share and job.state in LIVE):  # Its part has ended.
            taken, written = write_job(taken, replace(job, part=None, coming=()))
            commands += written
    taken, heard = _note_orders(taken, event.orders)
    # The last leader may have told of what these orders did.
    kept = (each for each in heard if not isinstance(each, Note))
    return Step(_keep_held(taken), (*commands, *kept))


def _requeue(state: State, job: JobRecord, why: str) -> Step:
    """Queue a job again and close its generation, so that its workers leave their nodes."""
    job = replace(job, state="queued", part=None, coming=(), reason=why)
    state, written = write_job(state, job)
    last = state.generations.get(job.id)
    if last is None or last.state == "closed":
        return Step(state, written)
    assert state.term is not None, "only the leader queues a job"
    closed = replace(last, state="closed", term=state.term, reason=why)
    state = replace(state, generations={**state.generations, job.id: closed})
    return Step(state, (*written, WriteGeneration(closed, replaces=last)))


def _keep_held(state: State) -> State:
    """Keep a held job held: a rollback in the store may be older than the hold."""
    active = state.active
    if active is None or not isinstance(active.phase, Held):
        return state
    tried = tuple(order.id for order in active.orders if order.kind == "rollback")
    return replace(state, active=replace(active, phase=replace(active.phase, tried=tried)))


def _forget_jobs(state: State, ids: Iterable[JobId]) -> State:
    """Forget ended jobs; one that was submitted again meanwhile stays."""
    gone = {id_ for id_ in ids if id_ in state.jobs and state.jobs[id_].state in ENDED}
    return replace(
        state,
        jobs={id_: job for id_, job in state.jobs.items() if id_ not in gone},
        generations={id_: each for id_, each in state.generations.items() if id_ not in gone},
        durables={id_: each for id_, each in state.durables.items() if id_ not in gone},
    )


def _adopt(
    job: JobRecord, record: GenerationRecord | None, state: State, event: events.Elected
) -> Active:
    at = event.at
    phase: Phase = Waiting("a new leader took over", at)
    step = 0
    if job.state == "held":
        phase = Held(job.reason, at if job.past.held_at is None else min(at, job.past.held_at))
    elif record is not None and record.state != "closed":
        # Reports will tell whether it runs; if it was told to stop, it is replanned.
        trained_since = dict(event.trained_since).get(job.id)
        deadline = at + adopted_start_s(state.options, record)
        phase = Starting(at, deadline, move_s=0.0, trained_since=trained_since)
    if record is not None:
        step = record.restore.point.step
    # The previous leader considered what runs; it need not be reconsidered at once.
    return Active(
        job=job.id,
        phase=phase,
        generation=record,
        progress=Progress(step, at),
        asked=LastQuestion(at=at),
    )


def _note_orders(state: State, orders: Collection[Order]) -> Step:
    """Take in orders, each once and in order; the nodes are replaced once for all of them."""
    heard, marked = set(state.known_orders), dict[NodeId, Node]()
    marks, commands = dict(state.marks), list[Command]()
    lives = lives_by_name(state)
    for order in orders:
        if order.id in heard:
            continue
        heard.add(order.id)
        match order.kind:
            case "preempt" | "drain" | "withdraw" | "cordon" | "uncordon" | "quarantine":
                id_ = NodeId(order.life) or lives.get(order.target, NodeId(order.target))
                if id_ != order.life and (id_ != order.target or id_ not in state.nodes):
                    # Fixed also if no node has the name: a later node with it must not drain.
                    commands.append(GiveOrder(replace(order, life=id_)))
                marks[id_] = (*marks.get(id_, ()), order)
                node = marked.get(id_) or state.nodes.get(id_)
                if node is not None and not node.is_lost:
                    marked[id_] = mark(node, order, state.now)
                    if node.is_draining and not marked[id_].is_draining:
                        commands.append(_effect(order, f"{node.record.name} drains no longer"))
            case "budget":
                state, settled = _set_budget(state, order)
                commands += settled
            case "priority":
                state, settled = _set_priority(state, order)
                commands += settled
            case "cancel" | "pause" | "resume" | "replan" | "checkpoint" | "rollback":
                state, settled = _order(state, order)
                commands += settled
            case _:
                assert_never(order.kind)
    nodes = state.nodes.with_(marked) if marked else state.nodes
    named = {order.target for order in orders}
    unpaid = {id_: at for id_, at in state.unpaid.items() if id_ not in named}
    state = replace(state, nodes=nodes, known_orders=frozenset(heard), marks=marks, unpaid=unpaid)
    state, forgotten = _forget_old_marks(state)
    return Step(state, (*commands, *forgotten))


def lives_by_name(state: State) -> dict[str, NodeId]:
    """Return the node id that each name means now: the newest that is not lost."""
    living = (node for node in state.nodes.values() if not node.is_lost)
    # A node with a lease wins over one without.
    in_order = sorted(living, key=lambda node: (node.absent_since is None, node.since))
    return {node.record.name: node.record.id for node in in_order}


def _forget_old_marks(state: State) -> Step:
    """Forget the oldest orders about lost nodes, here and in the store."""
    too_many = len(state.marks) - MARKS_MAX
    if too_many <= 0:
        return Step(state)
    old = dict.fromkeys([id_ for id_ in state.marks if id_ not in state.nodes][:too_many])
    settled = tuple(SettleOrder(order.id) for id_ in old for order in state.marks[id_])
    marks = {id_: said for id_, said in state.marks.items() if id_ not in old}
    return Step(replace(state, marks=marks), settled)


def _order(state: State, order: Order) -> Step:
    """Queue an order about the active job for the rules; apply one about another job at once."""
    active = state.active
    if active is not None and active.job == order.target:
        return Step(replace(state, active=replace(active, orders=(*active.orders, order))))
    settle = SettleOrder(order.id)
    job = state.jobs.get(JobId(order.target))
    if job is not None and order.kind == "rollback" and job.state in ("paused", "queued"):
        before = state.rollbacks.get(job.id)
        kept = replace(state, rollbacks={**state.rollbacks, job.id: order})
        return Step(kept, () if before is None else (SettleOrder(before.id),))
    to = None if job is None else _ORDERED.get((job.state, order.kind))
    if job is None or to is None or (to == "queued" and why_unpaid(job.bill)):
        return Step(state, (settle,))
    job = replace(job, state=to, reason=order.reason or f"{order.kind} was ordered")
    state, commands = write_job(state, job)
    if to == "cancelled" and job.id in state.rollbacks:
        rollbacks = dict(state.rollbacks)
        commands = (*commands, SettleOrder(rollbacks.pop(job.id).id))
        state = replace(state, rollbacks=rollbacks)
    return Step(state, (*commands, settle))


def _set_budget(state: State, order: Order) -> Step:
    """Change a job's total budget at once; one without a plan that waits asks for a plan again."""
    settle = SettleOrder(order.id)
    job = state.jobs.get(JobId(order.target))
    if job is None or job.state in ("done", "cancelled") or order.usd_max is None:
        return Step(state, (settle,))
    state, written = write_job(state, replace(job, bill=replace(job.bill, usd_max=order.usd_max)))
    active = state.active
    if active is not None and active.job == job.id and active.asked.is_refused:
        asked = replace(active.asked, nodes=frozenset(), is_refused=False)
        state = replace(state, active=replace(active, asked=asked))
    text = f"the budget of {job.id} is {dollars(order.usd_max)} now"
    return Step(state, (*written, settle, _effect(order, text, job.id)))


def _set_priority(state: State, order: Order) -> Step:
    """Change a job's place in the queue at once; the job that has the cluster keeps it."""
    settle = SettleOrder(order.id)
    job = state.jobs.get(JobId(order.target))
    if job is None or job.state in ("done", "cancelled"):
        return Step(state, (settle,))
    state, written = write_job(state, replace(job, priority=order.priority))
    text = f"the priority of {job.id} is {order.priority} now"
    return Step(state, (*written, settle, _effect(order, text, job.id)))


def _effect(order: Order, text: str, job: JobId | None = None) -> Note:
    """Tell what an order changed at once, and who gave it."""
    who = order.reason.removeprefix(f"{order.kind} was ordered")
    between = ": " if who and who == order.reason else ""
    return Note(f"{text}{between}{who}", job, settled=Settled((order.id,), None))


def _queue(state: State, job: JobRecord, durable: Durable | None) -> Step:
    """Take in a job that was submitted; its record is in the store already."""
    if job.id in state.jobs:
        return Step(state)
    if durable is not None:  # It was submitted to continue from this checkpoint.
        state = replace(state, durables={**state.durables, job.id: durable})
    return Step(state.with_job(job), (state_note(job),))


def _answer(state: State, event: events.PlanFound | events.PlanRefused) -> State:
    active = state.active
    if active is None or active.question is None:
        return state
    if active.question.request != event.request:
        return state  # The answer to a question that is no longer open.
    if isinstance(event, events.PlanFound):
        answered = replace(active.question, answer=event.proposal)
    elif event.is_known:
        answered = replace(active.question, answer=event.why, is_unpaid=event.is_unpaid)
    else:
        answered = replace(active.question, deadline=event.at, trouble=event.why)
    unanswered = active.unanswered if answered.answer is None else 0
    return replace(state, active=replace(active, question=answered, unanswered=unanswered))


def _take_record(state: State, record: GenerationRecord) -> State:
    active = state.active
    if active is None or active.job != record.job:
        return state
    match active.phase:
        case Opening() if record == active.phase.record:
            # Trouble of workers belonged to the generation before; failed attempts count on.
            cleared = {
                id_: replace(state.nodes[id_], workers=UNTROUBLED) for id_ in state.nodes.notable
            }
            step = record.restore.point.step
            opened = replace(
                active,
                generation=record,
                progress=Progress(step, state.now, _expected_step_s(state, active, record)),
                checkpointing=replace(active.checkpointing, commit=None, securing=None, check=None),
            )
            durables = dict(state.durables)
            if active.phase.lowers is not None:
                durables[record.job] = active.phase.lowers
            nodes = state.nodes.with_(cleared)
            return replace(state, nodes=nodes, active=opened, durables=durables)
        case Stopping() if _is_later(record, active.generation):
            # The members learn of the stop only now: their time to stop starts here.
            deadline = state.now + stop_s(state.options, active)
            told = replace(active.phase, deadline=deadline)
            return replace(state, active=replace(active, generation=record, phase=told))
        case Closing() if _is_later(record, active.generation):
            return replace(state, active=replace(active, generation=record))
        case _:
            return state


def _expected_step_s(state: State, active: Active, record: GenerationRecord) -> float | None:
    """Return the seconds of a step as measured before, or ``None`` if a straggler was left out."""
    last = () if active.generation is None else active.generation.members
    left = set(last).difference(record.members)
    if any(id_ in state.nodes and state.nodes[id_].exclusion.slow for id_ in left):
        return None
    return scaled_step_s(active, record.predicted_s)


def _is_later(record: GenerationRecord, than: GenerationRecord | None) -> bool:
    return than is not None and record.number == than.number and record.state != "open"
