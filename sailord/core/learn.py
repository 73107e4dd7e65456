"""What the controller learns from an event: the facts change, nothing is decided yet.

The world arrives as whole snapshots, so that a lost event is made good by the next one of its
kind, and one that comes twice changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import assert_never

from agents.protocol.records import (
    LIVE,
    Durable,
    GenerationRecord,
    Intent,
    IntentKind,
    JobId,
    JobRecord,
    JobState,
    NodeId,
    NodeRecord,
    Report,
)
from sailord.core.checkpoint_records import (
    CheckpointCommitted,
    CommitFailed,
    DurableChecked,
    ManifestWritten,
)
from sailord.core.checkpoint_rules import hear_of_storage
from sailord.core.job_cost import charge
from sailord.core.nodes import Node, Nodes
from sailord.core.rule import Step, state_note, write_job
from sailord.core.state import (
    Active,
    Closing,
    Command,
    Deposed,
    Elected,
    Event,
    GenerationWritten,
    GiveIntent,
    Held,
    IntentGiven,
    JobSubmitted,
    NodesObserved,
    Opening,
    Phase,
    PlanFound,
    Planning,
    PlanRefused,
    ProbeFailed,
    Reported,
    Running,
    SettleIntent,
    Starting,
    State,
    Stopping,
    StoreReturned,
    Ticked,
    Waiting,
    WriteRefused,
)
from sailord.core.straggler_rules import watched
from sailord.core.timeouts import adopted_start_s, stop_s

MARKS_MAX = 4096
"""Of so many lives of nodes it is known what was said of them."""
_ORDERED: dict[tuple[JobState, IntentKind], JobState] = {
    ("queued", "cancel"): "cancelled",
    ("queued", "pause"): "paused",
    ("paused", "cancel"): "cancelled",
    ("paused", "resume"): "queued",
    ("failed", "resume"): "queued",
}
"""What an order makes of a job that does not have the cluster."""


def learn(state: State, event: Event) -> Step:
    """Fold the event into the state; the commands are its immediate consequences, no decisions."""
    # Where nothing at all reached us, it was we who stood still: silence says nothing of others.
    stood_still = event.at > state.now + state.options.still_s
    leases_since = event.at if stood_still else state.leases_since
    woken_at = event.at if event.at > state.now + state.options.nap_s else state.woken_at
    before = state = replace(
        state, now=max(state.now, event.at), leases_since=leases_since, woken_at=woken_at
    )
    if state.term is None and not isinstance(event, Elected):
        return Step(state)  # Only the leader follows events; a new one reads the whole store.
    commands: tuple[Command, ...] = ()
    match event:
        case Elected():
            state, commands = _take_over(state, event)
        case Deposed() | WriteRefused():
            return Step(State(options=state.options, now=state.now, requests=state.requests))
        case NodesObserved():
            state = _see_nodes(state, event.nodes)
        case Reported():
            state = _hear_all(state, (event.report, *event.others))
        case ProbeFailed():
            state = _miss(state, event.node)
        case IntentGiven():
            state, commands = _note_intents(state, (event.intent, *event.others))
        case JobSubmitted():
            state, commands = _queue(state, event.job, event.durable)
        case PlanFound():
            state = _answer(state, event)
        case PlanRefused():
            state = _answer(state, event)
        case GenerationWritten():
            state = _recorded(state, event.record)
        case ManifestWritten() | CheckpointCommitted() | CommitFailed() | DurableChecked():
            state = hear_of_storage(state, event)
        case StoreReturned():
            state = replace(state, leases_since=state.now)
        case Ticked():
            state = watched(state)
        case _:
            assert_never(event)
    state, billed = charge(before, _give_up_nodes(state))
    return Step(state, (*billed, *commands))


def _take_over(state: State, event: Elected) -> Step:
    """Begin from what the store holds, and from nothing that an earlier term believed."""
    jobs = {job.id: job for job in event.jobs}
    generations = {record.job: record for record in event.generations}
    live = sorted((job for job in event.jobs if job.state in LIVE), key=_queue_order)
    active = None
    if live:
        job = live[0]
        active = _adopted(job, generations.pop(job.id, None), state, event.at)
    taken = State(
        options=state.options,
        now=state.now,
        term=event.term,
        leases_since=event.at,
        jobs=jobs,
        generations=generations,
        durables=dict(event.durables),
        active=active,
        requests=state.requests,
    )
    taken = _see_nodes(taken, event.nodes)
    if active is not None and active.generation is not None:
        taken = _grant_grace(taken, active.generation.members)
    commands: list[Command] = []
    for other in live[1:]:  # An older version could leave two in the store.
        queued = replace(other, state="queued", reason=f"{live[0].id} has the cluster")
        taken, written = write_job(taken, queued)
        commands += written
    taken, heard = _note_intents(taken, event.intents)
    return Step(taken, (*commands, *heard))


def _adopted(job: JobRecord, record: GenerationRecord | None, state: State, at: float) -> Active:
    phase: Phase = Waiting("a new leader took over", at)
    step = 0
    if job.state == "held":
        phase = Held(job.reason, at)
    elif record is not None and record.state != "closed":
        # Its members' reports will tell whether it runs, and one that was told to stop does.
        phase = Starting(since=at, deadline=at + adopted_start_s(state.options, record), move_s=0.0)
    if record is not None:
        step = record.restore.point.step
    # What runs was considered by whoever led before; it need not be reconsidered at once.
    return Active(job.id, phase, record, step=step, advanced_at=at, considered_at=at)


def _grant_grace(state: State, members: Iterable[NodeId]) -> State:
    """Members without a lease may only wait for the store: give them time to come back."""
    away = {member: NodeRecord(member, member, "", "", "", 0, "") for member in members}
    fresh = {
        id_: Node(unseen, state.now, absent_since=state.now)
        for id_, unseen in away.items()
        if id_ not in state.nodes
    }
    return replace(state, nodes=state.nodes.with_(fresh))


def _see_nodes(state: State, records: Iterable[NodeRecord]) -> State:
    seen = {record.id: record for record in records}
    fresh: dict[NodeId, Node] = {}
    for record in seen.values():
        known = node = state.nodes.get(record.id)
        if node is None:
            node = _welcome(state, record)
        elif record.state == "ready" and node.record.state == "joining":
            node = replace(node, since=state.now)
        leaving = node.leaving_since
        if record.state == "draining" and leaving is None:
            leaving = state.now
        elif record.state == "ready" and node.record.state == "draining":
            leaving = None  # A false alarm: the agent itself took it back.
            node = replace(node, returned_at=state.now)
        # Whoever gave us notice may have said when, and the machine itself not know of it.
        is_told = leaving is not None and record.leaves_at is None
        told = replace(record, leaves_at=node.record.leaves_at) if is_told else record
        if (told, None, leaving) != (node.record, node.absent_since, node.leaving_since):
            if node.absent_since is not None or told.address != node.record.address:
                # What was asked of it went elsewhere, or came too early.
                node = replace(node, unreachable_since=None, probed_at=None)
            node = replace(node, record=told, absent_since=None, leaving_since=leaving)
        if node is not known:
            fresh[record.id] = node
    names = {record.name: record.id for record in seen.values()}
    for id_, node in state.nodes.items():
        if id_ in seen:
            continue
        if names.get(node.record.name, id_) != id_ and not node.is_lost:
            fresh[id_] = _lost(node, state.now, "its machine was started anew")
        elif node.absent_since is None:
            fresh[id_] = replace(node, absent_since=state.now)
    return replace(state, nodes=state.nodes.with_(fresh)) if fresh else state


def _hear_all(state: State, reports: Iterable[Report]) -> State:
    """Thousands may speak in one moment: what all say is put together once."""
    active, fresh = state.active, dict[NodeId, Node]()
    for report in reports:
        node = fresh.get(report.node) or state.nodes.get(report.node)
        if node is None or (node.report is not None and report.number <= node.report.number):
            continue
        active, fresh[report.node] = _hear(state, active, node, report)
    return replace(state, nodes=state.nodes.with_(fresh), active=active) if fresh else state


def _hear(
    state: State, active: Active | None, node: Node, report: Report
) -> tuple[Active | None, Node]:
    if node.is_lost:
        # It was given up and lives: it is welcome, as if it had just come.
        node = replace(_welcome(state, node.record), absent_since=node.absent_since)
    failed_since = broken_since = None
    if active is not None and _speaks_of(active.generation, report):
        if report.taking == "failed":
            failed_since = state.now if node.failed_since is None else node.failed_since
        if report.taking == "broken":
            broken_since = state.now if node.broken_since is None else node.broken_since
        if report.step > active.step:
            step_s = _step_s(active, report.step, state.now)
            active = replace(active, step=report.step, advanced_at=state.now, step_s=step_s)
    heard = replace(
        node,
        report=report,
        heard_at=state.now,
        failed_since=failed_since,
        broken_since=broken_since,
        unreachable_since=None,
    )
    return active, heard


def _step_s(active: Active, step: int, now: float) -> float | None:
    """What a step takes, the last ones counting most; the first of a generation does not count."""
    if not isinstance(active.phase, Running) or active.advanced_at <= active.phase.since:
        return active.step_s
    fresh = (now - active.advanced_at) / (step - active.step)
    return fresh if active.step_s is None else 0.9 * active.step_s + 0.1 * fresh


def _speaks_of(record: GenerationRecord | None, report: Report) -> bool:
    return record is not None and report.speaks_of(record)


def _miss(state: State, id_: NodeId) -> State:
    node = state.nodes.get(id_)
    if node is None or node.unreachable_since is not None:
        return state
    if node.probed_at is not None and node.heard_at >= node.probed_at:
        return state  # It spoke after it was asked.
    missed = replace(node, unreachable_since=state.now)
    return replace(state, nodes=state.nodes.with_({id_: missed}))


def _note_intents(state: State, intents: Iterable[Intent]) -> Step:
    """Take in orders, each once and in their order; the nodes are replaced once for all of them."""
    heard, marked = set(state.intents), dict[NodeId, Node]()
    marks, commands = dict(state.marks), list[Command]()
    lives = _lives_by_name(state)
    for intent in intents:
        if intent.id in heard:
            continue
        heard.add(intent.id)
        match intent.kind:
            case "preempt" | "drain" | "withdraw" | "cordon" | "uncordon" | "quarantine":
                id_ = NodeId(intent.life) or lives.get(intent.target, NodeId(intent.target))
                if id_ not in (intent.life, intent.target):
                    commands.append(GiveIntent(replace(intent, life=id_)))
                marks[id_] = (*marks.get(id_, ()), intent)
                node = marked.get(id_) or state.nodes.get(id_)
                if node is not None and not node.is_lost:
                    marked[id_] = _marked(node, intent, state.now)
            case "cancel" | "pause" | "resume" | "replan" | "checkpoint" | "rollback":
                state, settled = _order(state, intent)
                commands += settled
            case _:
                assert_never(intent.kind)
    nodes = state.nodes.with_(marked) if marked else state.nodes
    state = replace(state, nodes=nodes, intents=frozenset(heard), marks=marks)
    state, forgotten = _without_old_marks(state)
    return Step(state, (*commands, *forgotten))


def _lives_by_name(state: State) -> dict[str, NodeId]:
    """Whom a name means now: the life that came last under it, and not one that is lost."""
    living = (node for node in state.nodes.values() if not node.is_lost)
    # Who is there comes after who is not.
    in_order = sorted(living, key=lambda node: (node.absent_since is None, node.since))
    return {node.record.name: node.record.id for node in in_order}


def _without_old_marks(state: State) -> Step:
    """Forget the oldest orders about nodes that are gone, here and in the store."""
    too_many = len(state.marks) - MARKS_MAX
    if too_many <= 0:
        return Step(state)
    old = dict.fromkeys([id_ for id_ in state.marks if id_ not in state.nodes][:too_many])
    settled = tuple(SettleIntent(intent.id) for id_ in old for intent in state.marks[id_])
    marks = {id_: said for id_, said in state.marks.items() if id_ not in old}
    return Step(replace(state, marks=marks), settled)


def _welcome(state: State, record: NodeRecord) -> Node:
    """A node that is new, or new again: what was said of this life of it still holds."""
    node = Node(record, state.now, is_cordoned=record.state == "cordoned")
    for intent in state.marks.get(record.id, ()):
        node = _marked(node, intent, state.now)
    return node


def _marked(node: Node, intent: Intent, now: float) -> Node:
    match intent.kind:
        case "preempt" | "drain":
            leaves_at = node.record.leaves_at if intent.leaves_at is None else intent.leaves_at
            since = now if node.leaving_since is None else node.leaving_since
            record = replace(node.record, leaves_at=leaves_at)
            return replace(node, leaving_since=since, record=record)
        case "withdraw":
            back = node.returned_at if node.leaving_since is None else now
            record = replace(node.record, leaves_at=None)
            return replace(node, leaving_since=None, returned_at=back, record=record)
        case "cordon":
            return replace(node, is_cordoned=True)
        case "quarantine":
            return replace(node, slow=intent.reason)
        case _:
            back = now if node.is_cordoned or node.slow else node.returned_at
            return replace(node, is_cordoned=False, slow="", returned_at=back)


def _order(state: State, intent: Intent) -> Step:
    """Queue an order of the active job for the rules; any other job is changed, or not, at once."""
    active = state.active
    if active is not None and active.job == intent.target:
        return Step(replace(state, active=replace(active, orders=(*active.orders, intent))))
    settle = SettleIntent(intent.id)
    job = state.jobs.get(JobId(intent.target))
    to = None if job is None else _ORDERED.get((job.state, intent.kind))
    if job is None or to is None:
        return Step(state, (settle,))
    job = replace(job, state=to, reason=intent.reason or f"{intent.kind} was ordered")
    state, commands = write_job(state, job)
    return Step(state, (*commands, settle))


def _queue(state: State, job: JobRecord, durable: Durable | None) -> Step:
    """Take in a job that was submitted; its record is in the store already."""
    if job.id in state.jobs:
        return Step(state)
    if durable is not None:  # It was submitted to continue from this checkpoint.
        state = replace(state, durables={**state.durables, job.id: durable})
    state = state.with_job(job)
    is_taken_at_once = state.active is None and next_in_queue(state) == job
    return Step(state, () if is_taken_at_once else (state_note(job),))


def _answer(state: State, event: PlanFound | PlanRefused) -> State:
    active = state.active
    if active is None or not isinstance(active.phase, Planning):
        return state
    if active.phase.request != event.request:
        return state  # An answer to a question that we no longer ask.
    answer = event.proposal if isinstance(event, PlanFound) else event.why
    if isinstance(event, PlanRefused) and not event.is_known:
        missed = replace(active.phase, deadline=event.at, trouble=event.why)
        return replace(state, active=replace(active, phase=missed))
    return replace(state, active=replace(active, phase=replace(active.phase, answer=answer)))


def _recorded(state: State, record: GenerationRecord) -> State:
    active = state.active
    if active is None or active.job != record.job:
        return state
    match active.phase:
        case Opening() if record == active.phase.record:
            # A new generation counts its own steps and failures.
            cleared = {
                id_: replace(state.nodes[id_], failed_since=None, broken_since=None)
                for id_ in state.nodes.notable
            }
            step = record.restore.point.step
            opened = replace(
                active,
                generation=record,
                step=step,
                advanced_at=state.now,
                commit=None,
                securing=None,
                check=None,
            )
            durables = dict(state.durables)
            if active.phase.lowers is not None:
                durables[record.job] = active.phase.lowers
            nodes = state.nodes.with_(cleared)
            return replace(state, nodes=nodes, active=opened, durables=durables)
        case Stopping() if _is_later(record, active.generation):
            # They are told only now.
            deadline = state.now + stop_s(state.options, active)
            told = replace(active.phase, deadline=deadline)
            return replace(state, active=replace(active, generation=record, phase=told))
        case Closing() if _is_later(record, active.generation):
            return replace(state, active=replace(active, generation=record))
        case _:
            return state


def _is_later(record: GenerationRecord, than: GenerationRecord | None) -> bool:
    return than is not None and record.number == than.number and record.state != "open"


# ---- who is lost ------------------------------------------------------------------------------


def _give_up_nodes(state: State) -> State:
    """Call nodes lost that must be, and forget those that nothing names any more."""
    nodes = state.nodes
    if not nodes.notable:
        return state
    generation = state.active.generation if state.active is not None else None
    members = frozenset(generation.members if generation is not None else ())
    notable = [(id_, nodes[id_]) for id_ in sorted(nodes.notable)]
    broken = {
        peer
        for _, node in notable
        if node.report is not None and not node.is_lost
        for peer in node.report.broken_peers
        if _speaks_of(generation, node.report)
    }
    lost: dict[NodeId, Node] = {}
    forgotten: set[NodeId] = set()
    for id_, node in notable:
        if id_ not in members and node.absent_since is not None:
            forgotten.add(id_)  # One that is lost stays known as such while its lease lasts.
        elif not node.is_lost and (why := _why_lost(state, node, is_broken=id_ in broken)):
            lost[id_] = _lost(node, state.now, why)
    if lost:
        state = replace(state, nodes=nodes.with_(lost))
    if forgotten:
        kept = ((id_, node) for id_, node in state.nodes.items() if id_ not in forgotten)
        state = replace(state, nodes=Nodes(kept))
    return state


def _why_lost(state: State, node: Node, *, is_broken: bool) -> str:
    """Why a node counts as lost; empty while it may live.

    A lease is the last resort. A step that was done proves that every member took part in it,
    so a member without a lease is only suspect as long as steps go on; its agent's own word proves
    as much, and it is asked for it. Who died in silence while all trained has done no step for most
    of its lease by the time that the lease runs out: to wait for as long delays nothing.
    """
    if is_broken and node.unreachable_since is not None:
        return "a peer lost its connection and its agent does not answer"
    if node.absent_since is None:
        return ""
    assert state.active is not None
    options = state.options
    if state.now < state.trusted_since(node):
        return ""
    if state.now < max(node.absent_since, node.heard_at, state.woken_at) + options.suspect_s:
        return ""
    generation = state.active.generation
    has_stepped = generation is not None and state.active.step > generation.restore.point.step
    waits_s = options.last_step_s(state.lease_of(node)) if has_stepped else options.suspect_s
    if state.now < state.active.advanced_at + waits_s:
        return ""
    return "its lease is gone and no step was done since"


def _lost(node: Node, now: float, why: str) -> Node:
    return replace(node, lost_at=now, why_lost=why)


def _queue_order(job: JobRecord) -> tuple[int, float, str]:
    return (-job.priority, job.submitted_at, job.id)


def in_queue(state: State) -> list[JobRecord]:
    """The jobs that wait, who comes first: the highest priority, then who waits longest."""
    queued = (job for job in state.jobs.values() if job.state == "queued")
    return sorted(queued, key=_queue_order)


def next_in_queue(state: State) -> JobRecord | None:
    """The job that runs next."""
    return next(iter(in_queue(state)), None)
