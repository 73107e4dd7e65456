"""Transitions between the phases of a job, and what each of them writes and commands."""

from __future__ import annotations

from dataclasses import replace

from agents.protocol.records import GenerationRecord, JobState, NodeId, Order, Point, Restore
from sailord.core.model.commands import (
    Command,
    Note,
    RequestPlan,
    SettleOrder,
    WakeAgents,
    WriteGeneration,
)
from sailord.core.model.phases import (
    Closing,
    Held,
    Opening,
    Phase,
    Running,
    Starting,
    Stopping,
    Waiting,
)
from sailord.core.model.proposal import Proposal
from sailord.core.model.rule import PASS, RuleAnswer, Step, write_job
from sailord.core.model.state import Active, Attempts, LastQuestion, OpenQuestion, State
from sailord.core.queries.active_job import is_alive, is_explained, is_rolling_back
from sailord.core.queries.generation_record import next_record
from sailord.core.queries.job_cost import why_unpaid
from sailord.core.queries.leave_times import left_later
from sailord.core.queries.replan_triggers import (
    Trigger,
    cordoned_members,
    is_last_resort,
    last_rollback,
    last_steering_order,
    leaving,
    next_order,
    replan_trigger,
    usable,
    why_no_node,
)
from sailord.core.queries.restore_choice import restore_now, why_not_from_start
from sailord.core.queries.snapshot_intervals import departures
from sailord.core.queries.straggler_queries import measured_ratios
from sailord.core.queries.timeouts import stop_s
from sailord.core.rules.checkpoint_rules import check_first
from sailord.core.rules.straggler_rules import keep_stragglers
from sailord.text.units import counted


def ask(state: State, active: Active, trigger: Trigger | None) -> Step:
    """Ask the planner for a plan on all usable nodes, for this reason."""
    assert trigger is not None
    order = next_order(active)
    is_replan = order is not None and order.kind == "replan"
    alive = is_alive(state, active)
    is_running = isinstance(active.phase, Starting | Running) and alive
    nodes = tuple(id_ for id_ in usable(state, active) if id_ not in trigger.slow)
    aside: tuple[NodeId, ...] = ()
    later: tuple[NodeId, ...] = ()
    if is_running and (trigger.is_ordered or not trigger.is_forced):
        aside, later = cordoned_members(state, active), tuple(left_later(state, active))
    # If all usable nodes are set aside, all stay.
    nodes, aside = _without(nodes, aside)
    aside = (*aside, *later)
    # The answer must do without these nodes, and may be slower than the running plan: it is not
    # forced.
    is_forced = trigger.is_forced and not aside
    is_last = is_last_resort(state, active)
    asked = LastQuestion(
        frozenset(nodes),
        at=state.now,
        is_refused=is_last,
        is_last_resort=is_last,
        said=active.asked.said,
    )
    considered = replace(active, asked=asked)
    if is_last:
        nodes = tuple(sorted((*nodes, *leaving(state, active))))
    settled: tuple[Command, ...] = ()
    if order is not None and is_replan:
        settled = (SettleOrder(order.id),)
        considered = without(considered, order)
    if not nodes and trigger.slow:
        return keep_stragglers(state, active, trigger.slow, "no other node is usable")
    if not nodes:
        refused = replace(considered, asked=replace(asked, is_refused=True, said=""))
        return Step(replace(state, active=refused), (*settled, note(active, why_no_node(state))))
    request = state.requests + 1
    deadline = state.now + state.options.plan_s
    question = OpenQuestion(
        request,
        nodes,
        trigger.reason,
        is_forced,
        deadline,
        slow=trigger.slow,
        is_ordered=is_replan or trigger.is_ordered,
    )
    is_urgent = not is_running and active.generation is not None
    repeats = is_urgent and _can_repeat(active, nodes)
    if repeats:
        assert active.generation is not None
        # Only the members count as asked about: other nodes cause the next question.
        members = frozenset(active.generation.members)
        considered = replace(
            considered, asked=LastQuestion(members, at=state.now, said=active.asked.said)
        )
    # A job that waits already keeps its reason and its moment.
    stays = is_running or isinstance(active.phase, Waiting)
    phase = active.phase if stays else Waiting(trigger.reason, state.now)
    asking = replace(considered, phase=phase, question=question)
    command = RequestPlan(
        request=request,
        job=active.job,
        nodes=nodes,
        running=active.generation,
        leaving=leaving(state, active) if is_running else (),
        # Going on with a cordoned node, or one that is left later, is no slower.
        slow=dict.fromkeys(aside, 1.0) | {id_: slow.times for id_, slow in trigger.slow.items()},
        is_urgent=is_urgent,
        repeats=repeats,
        factors=active.slowness.speeds.factors if trigger.slow else {},
        ratios=() if trigger.slow or is_urgent else measured_ratios(state, active),
    )
    some = ", draining ones among them" if is_last else ""
    text = f"planning for {counted(len(nodes), 'node')}{some}: {trigger.reason}"
    told = note(active, text, is_detail=True)
    return Step(replace(state, active=asking, requests=request), (*settled, told, command))


def _without(
    nodes: tuple[NodeId, ...], aside: tuple[NodeId, ...]
) -> tuple[tuple[NodeId, ...], tuple[NodeId, ...]]:
    """Return the nodes without those set aside, and which these are; all, if none would be left."""
    rest = tuple(id_ for id_ in nodes if id_ not in aside)
    return (rest, tuple(id_ for id_ in aside if id_ in nodes)) if rest else (nodes, ())


def _can_repeat(active: Active, nodes: tuple[NodeId, ...]) -> bool:
    """Return whether the last plan may run again; after two failures it may be the cause."""
    last = active.generation
    if last is None or last.state == "closed":
        return False
    if active.asked.is_refused or active.attempts.failures > 1:
        return False
    return set(last.members) <= set(nodes)


def stop(state: State, active: Active, then: Proposal | JobState, reason: str) -> Step:
    """Order all members to park at the end of one step, with no step lost."""
    last = active.generation
    assert last is not None
    phase = Stopping(then, reason, state.now + stop_s(state.options, active))
    if last.state == "stopping":
        return enter(state, phase)
    assert state.term is not None
    record = replace(
        last, state="stopping", stop_at=active.progress.step + 1, term=state.term, reason=reason
    )
    write = WriteGeneration(record, replaces=last)
    told = note(active, f"stopping: {reason}", is_transition=True, is_detail=True)
    return enter(state, phase, write, told)


def check_before_restore(state: State, active: Active) -> RuleAnswer:
    """Check the checkpoint that the next generation would begin from, if that is still to do."""
    restore, _ = restore_now(state, active)
    return check_first(state, active, restore)


def open_next(
    state: State,
    active: Active,
    proposal: Proposal,
    reason: str,
    stopped: Point | None = None,
) -> RuleAnswer:
    """Store the next generation's record; its members are woken only after that."""
    lowers, settles = None, ""
    restore = Restore(stopped or Point(0, 0), "memory")
    if stopped is None or is_rolling_back(active):
        restore, lowers = restore_now(state, active)
        order = next_order(active)
        if order is not None and order.kind == "rollback":
            settles = order.id
        else:
            looked = check_before_restore(state, active)
            if looked is not PASS:
                return looked
            check = active.checkpointing.check
            if restore.source == "durable" and check is not None and check.why_none:
                return close(state, active, "held", check.why_none)
    why_not = why_not_from_start(state, active, restore)
    if why_not:
        return close(state, active, "held", why_not)
    active = replace(active, may_start_over=False)
    record = next_record(state, active, proposal, restore, reason, lowers)
    lost = max(active.progress.step - restore.point.step, 0)
    text = f"generation {record.number} on {counted(len(record.members), 'node')} from step"
    source = f"{restore.source}, {counted(lost, 'step')} lost"
    text = f"{text} {restore.point.step} ({source}): {reason}"
    active = with_ask_again(state, active, proposal.ask_again_s)
    past = replace(state.job.past, departures=departures(state, active))
    state, written = write_job(replace(state, active=active), replace(state.job, past=past))
    return enter(
        state,
        Opening(record=record, proposal=proposal, lowers=lowers),
        *written,
        WriteGeneration(record=record, replaces=active.generation, lowers=lowers, settles=settles),
        note(active, text, is_transition=True, is_detail=True),
        *_unfinished_checkpoint(state, active, record),
    )


def _unfinished_checkpoint(
    state: State, active: Active, record: GenerationRecord
) -> tuple[Note, ...]:
    """Say that a checkpoint was due in the last generation whose upload ends with it."""
    last, durable, point = active.generation, state.durables.get(active.job), record.restore.point
    if last is None or not last.persist_every or record.restore.source != "memory":
        return ()
    due = point.step // last.persist_every * last.persist_every
    if due <= max(last.restore.point.step, 0 if durable is None else durable.point.step):
        return ()
    text = f"the checkpoint of step {due} was not finished before the job left its nodes"
    if (every := record.persist_every) is not None:
        text += f"; the next one is due at step {(point.step // every + 1) * every}"
    return (note(active, text),)


def fail(state: State, active: Active) -> Step:
    """Give up the generation; only a failure that no lost node explains counts as an attempt."""
    assert active.generation is not None
    options = state.options
    is_fault = not is_explained(state, active.generation)
    trigger = replan_trigger(state, active)
    reason = trigger.reason if trigger is not None else "the generation failed"
    before = active.attempts
    earlier = 0 if is_healthy(state, active) else before.failures
    failures = earlier + is_fault
    pause = options.failure_pause_s * 2 ** (failures - 1) if is_fault else 0.0
    active = replace(
        active,
        attempts=Attempts(
            failures, active.progress.step if is_fault else before.failed_at, state.now + pause
        ),
        asked=replace(active.asked, nodes=frozenset(), is_refused=False),
    )
    state = replace(state, active=active)
    if failures >= options.failures_until_held:
        return close(state, active, "held", f"{failures} attempts failed; the last: {reason}")
    told = note(active, reason, is_transition=True, is_detail=True)
    return enter(state, Waiting(reason, state.now), told)


def is_healthy(state: State, active: Active) -> bool:
    """Return whether enough new steps were done for earlier failures to be forgotten.

    Counted from the step of the last failure, over all generations since: lost nodes may end each
    of them early. Not from the restore point, since repeated steps would count.
    """
    steps_done = active.progress.step - active.attempts.failed_at
    return steps_done >= state.options.steps_of_health


def reset_failures(state: State, active: Active) -> Step:
    """Forget earlier failures."""
    forgiven = replace(active, attempts=replace(active.attempts, failures=0))
    said = note(active, "healthy again: earlier failures no longer count")
    return Step(replace(state, active=forgiven), (said,))


def close(state: State, active: Active, then: JobState, reason: str) -> Step:
    """Store the end of the generation; none follows for now."""
    last = active.generation
    phase = Closing(then, reason)
    if last is None or last.state == "closed":
        return enter(state, phase)
    assert state.term is not None
    record = replace(last, state="closed", term=state.term, reason=reason)
    write = WriteGeneration(record, replaces=last)
    return enter(state, phase, write, note(active, f"closing: {reason}", is_detail=True))


def finish(state: State, active: Active, then: JobState, reason: str) -> Step:
    """Free the cluster; a held job keeps it at first (see ``job_rules.yield_cluster``)."""
    job = replace(state.job, state=then, reason=reason)
    wake: tuple[Command, ...] = ()
    if active.generation is not None:
        wake = (WakeAgents(active.generation.members),)
    if then == "held":
        job = replace(job, past=replace(job.past, held_at=state.now))
        state, written = write_job(state, job)
        tried = tuple(order.id for order in active.orders if order.kind == "rollback")
        held = replace(active, phase=Held(reason, state.now, tried))
        return Step(replace(state, active=held), (*written, *wake))
    # A rollback waits for the job's next turn.
    rollback = last_rollback(active) if then == "paused" else None
    # Orders that were given while the end was being stored.
    kind = last_steering_order(active) if then == "paused" else None
    if kind == "resume" and not why_unpaid(job.bill):
        job = replace(job, state="queued", reason="resume was ordered")
    elif kind == "cancel":
        job, rollback = replace(job, state="cancelled", reason="cancel was ordered"), None
    wake = (*wake, *(SettleOrder(order.id) for order in active.orders if order != rollback))
    rollbacks = state.rollbacks if rollback is None else {**state.rollbacks, job.id: rollback}
    generations = dict(state.generations)
    if active.generation is not None:
        generations[job.id] = active.generation
    state, written = write_job(state, job)
    left = replace(state, generations=generations, rollbacks=rollbacks, active=None)
    return Step(left, (*written, *wake))


# ---- helpers ------------------------------------------------------------------------------------


def enter(state: State, phase: Phase, *commands: Command) -> Step:
    """Enter a phase; an open question is dropped, and the answer to the last one."""
    assert state.active is not None
    asked = replace(state.active.asked, said="")
    active = replace(state.active, phase=phase, question=None, asked=asked)
    return Step(replace(state, active=active), commands)


def with_ask_again(state: State, active: Active, seconds: float | None) -> Active:
    """Allow the next question after ``seconds``, if that is sooner than ``reconsider_s``."""
    if seconds is None or seconds >= state.options.reconsider_s:
        return active
    at = state.now + seconds - state.options.reconsider_s
    return replace(active, asked=replace(active.asked, at=at))


def note(
    active: Active, text: str, *, is_transition: bool = False, is_detail: bool = False
) -> Note:
    """Note something about the job; a transition is kept in its history."""
    return Note(text, active.job, is_transition, is_detail)


def without(active: Active, order: Order) -> Active:
    """Return the job without this order."""
    return replace(active, orders=tuple(each for each in active.orders if each != order))
