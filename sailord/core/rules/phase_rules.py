"""One rule for each phase of a job: what ends the phase, and what follows."""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from agents.protocol.records import GenerationRecord
from sailord.core.model.commands import AbortGeneration, Command, WakeAgents
from sailord.core.model.phases import Closing, Held, Opening, Running, Starting, Stopping, Waiting
from sailord.core.model.proposal import Proposal
from sailord.core.model.rule import PASS, WAIT, RuleAnswer
from sailord.core.model.state import Active, State
from sailord.core.queries.active_job import (
    all_members,
    has_started,
    is_alive,
    is_due,
    is_writing,
    stopped_at,
)
from sailord.core.queries.generation_record import is_first
from sailord.core.queries.replan_triggers import (
    last_steering_order,
    next_order,
    replan_trigger,
    usable,
)
from sailord.core.queries.restore_choice import holders_reported
from sailord.core.queries.timeouts import stall_s, start_s
from sailord.core.queries.unprepared_nodes import why_unprepared
from sailord.core.rules.checkpoint_rules import secure
from sailord.core.rules.job_rules import step_aside, yield_cluster
from sailord.core.rules.transitions import (
    ask,
    close,
    enter,
    fail,
    finish,
    is_healthy,
    note,
    open_next,
    reset_failures,
    without,
)


def advance(state: State, active: Active) -> RuleAnswer:
    """Apply the rule of the present phase."""
    match active.phase:
        case Waiting():
            return _while_waiting(state, active, active.phase)
        case Stopping():
            return _while_stopping(state, active, active.phase)
        case Opening():
            return _while_opening(state, active, active.phase)
        case Starting():
            return _while_starting(state, active, active.phase)
        case Running():
            return _while_running(state, active)
        case Closing():
            return _while_closing(state, active, active.phase)
        case Held():
            return yield_cluster(state, active, active.phase)
        case _:
            assert_never(active.phase)


def _while_waiting(state: State, active: Active, phase: Waiting) -> RuleAnswer:
    """Nothing runs: ask for a plan, after the gathering window, unless no node can be prepared."""
    why = why_unprepared(state, active, phase.since)
    if why:
        return close(state, active, "held", why)
    if (aside := step_aside(state, active)) is not PASS:
        return aside
    trigger = replan_trigger(state, active)
    return ask(state, active, trigger) if is_due(state, active, trigger) else PASS


def _while_stopping(state: State, active: Active, phase: Stopping) -> RuleAnswer:
    """Wait until all members are parked, or cannot be; then do what the stop was for."""
    assert active.generation is not None
    if is_writing(active):
        return WAIT
    stopped = stopped_at(state, active.generation)
    if stopped is None and is_alive(state, active) and state.now < phase.deadline:
        return WAIT
    if not isinstance(phase.then, Proposal):
        # After a pause the machines may be returned, and their memory with them: make the last step
        # durable first, unless the job was resumed meanwhile.
        goes_on = last_steering_order(active) == "resume"
        if not goes_on and (stopped is None or not is_alive(state, active)):
            return fail(state, active)  # The pause is carried out once the job runs again.
        kept = PASS if goes_on else secure(state, active, stopped)
        return close(state, active, phase.then, phase.reason) if kept is PASS else kept
    if stopped is None and not holders_reported(state, active):
        return WAIT
    if not set(phase.then.members) <= set(usable(state, active)):
        why = "a node of the new plan can no longer be used"
        return enter(state, Waiting(f"{phase.reason}; {why}", state.now))
    return open_next(state, active, phase.then, phase.reason, stopped)


def _while_opening(state: State, active: Active, phase: Opening) -> RuleAnswer:
    """After the record is stored, wake its members and abort the generation before."""
    if active.generation != phase.record:
        return WAIT
    options, record = state.options, phase.record
    deadline = state.now + start_s(options, phase.proposal)
    commands: list[Command] = []
    order = next_order(active)
    if order is not None and order.kind == "rollback" and phase.lowers == order.durable:
        state = replace(state, active=without(active, order))
    if not is_first(record):
        nodes = tuple(sorted(id_ for id_, node in state.nodes.items() if not node.is_lost))
        commands.append(AbortGeneration(record.job, record.number - 1, nodes))
    commands.append(WakeAgents(record.members))
    return enter(state, Starting(state.now, deadline, phase.proposal.move_s), *commands)


def _while_starting(state: State, active: Active, phase: Starting) -> RuleAnswer:
    """Wait until every member trains, up to the deadline."""
    if not is_alive(state, active):
        return fail(state, active)
    assert active.generation is not None
    if has_started(state, active.generation):
        took = state.now - phase.since
        text = f"generation {active.generation.number} runs after {took:.2f} s"
        # There is no prediction for the first start.
        text += f" (predicted {phase.move_s:.2f} s)" if phase.move_s else ""
        progress = replace(active.progress, advanced_at=state.now)
        begun = replace(state, active=replace(active, progress=progress))
        running = Running(state.now, phase.trained_since)
        return enter(begun, running, note(active, text, is_detail=True))
    if state.now >= phase.deadline:
        return fail(state, active)
    # A notice or a drain is answered before the generation runs.
    trigger = replan_trigger(state, active)
    is_pressing = trigger is not None and trigger.is_forced
    is_time = is_pressing and is_due(state, active, trigger)
    return ask(state, active, trigger) if is_time else PASS


def _while_running(state: State, active: Active) -> RuleAnswer:
    """Let it run until it fails, is done or stuck, or there is a reason to ask for a plan."""
    assert active.generation is not None
    if not is_alive(state, active):
        return fail(state, active)
    steps = state.job.steps
    if steps is not None and active.progress.step >= steps:
        ended = _end(state, active, active.generation, steps)
        if ended is not PASS:
            return ended
    if state.now >= active.progress.advanced_at + stall_s(state.options, active):
        return fail(state, active)
    if active.attempts.failures and is_healthy(state, active):
        return reset_failures(state, active)
    trigger = replan_trigger(state, active)
    return ask(state, active, trigger) if is_due(state, active, trigger) else PASS


def _end(state: State, active: Active, generation: GenerationRecord, steps: int) -> RuleAnswer:
    """Close a job that is done, once its last step is durable; ``PASS``: ranks have yet to stop."""
    if not all_members(state, generation, "stopped"):
        return PASS
    point, restore = stopped_at(state, generation), generation.restore
    is_sealed_here = restore.source == "memory" or restore.point.step < steps
    waited_s = state.now - active.progress.advanced_at
    is_kept = state.job.saving.uri is not None
    if is_kept and point is None and is_sealed_here and waited_s < state.options.secure_s:
        return WAIT  # A report of the seal is on its way.
    kept = secure(state, active, point)
    return close(state, active, "done", f"all {steps} steps are done") if kept is PASS else kept


def _while_closing(state: State, active: Active, phase: Closing) -> RuleAnswer:
    """After the end is stored, free the cluster."""
    if active.generation is not None and active.generation.state != "closed":
        return WAIT
    return finish(state, active, phase.then, phase.reason)
