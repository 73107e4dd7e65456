"""One rule for each phase of a job: what ends the phase, and what comes next."""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from sailord.core.checkpoint_rules import secure
from sailord.core.proposal import Proposal
from sailord.core.queries import (
    all_members,
    ask_again_in,
    goes_back,
    has_started,
    is_alive,
    is_due,
    is_informed,
    is_running_plan,
    is_too_late_to_stop,
    is_writing,
    stopped_at,
)
from sailord.core.replan_triggers import change_wanted, last_word, order_at_hand, usable
from sailord.core.rule import PASS, WAIT, RuleAnswer, Step, write_job
from sailord.core.state import (
    AbortGeneration,
    Active,
    Closing,
    Command,
    Held,
    Opening,
    Planning,
    Running,
    Starting,
    State,
    Stopping,
    Waiting,
    WakeAgents,
)
from sailord.core.straggler_rules import answer_to_slow, keep_too_many, leave_out, take_back
from sailord.core.timeouts import stall_s, start_s
from sailord.core.transitions import (
    ask,
    close,
    enter,
    fail,
    finish,
    forgive,
    is_healthy,
    look_before,
    note,
    open_next,
    stop,
    without,
)


def advance(state: State, active: Active) -> RuleAnswer:
    """Ask the rule of the phase that the job is in."""
    match active.phase:
        case Waiting():
            return _while_waiting(state, active)
        case Planning():
            return _while_planning(state, active, active.phase)
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
            return PASS
        case _:
            assert_never(active.phase)


def _while_waiting(state: State, active: Active) -> RuleAnswer:
    """Nothing runs: ask for a plan, once those who come or go together have done so."""
    back = take_back(state, active)
    if back is not PASS:
        return back
    change = change_wanted(state, active)
    return ask(state, active, change) if is_due(state, active, change) else PASS


def _while_planning(state: State, active: Active, phase: Planning) -> RuleAnswer:
    """Make something of the planner's answer, unless the question is out of date."""
    alive = is_alive(state, active)
    if not alive and not isinstance(phase.before, Waiting):
        return fail(state, active)
    if not set(phase.asked_for) <= set(usable(state, active)):
        return enter(state, phase.before)  # A node of the question is gone: ask another one.
    kept = answer_to_slow(state, active, phase)
    if kept is not None:
        return enter(kept[0], phase.before, *kept[1])
    match phase.answer:
        case None if state.now < phase.deadline:
            return WAIT
        case None:
            # That says nothing about the nodes: the same question is worth another try.
            again = replace(active, not_before=state.now + state.options.failure_pause_s)
            why = f": {phase.trouble}" if phase.trouble else " in time"
            said = note(active, f"the planner did not answer{why}")
            return enter(replace(state, active=again), phase.before, said)
        case str() as why:
            refused = replace(active, is_refused=True)
            said = note(active, f"no plan: {why}")
            return enter(replace(state, active=refused), phase.before, said)
        case Proposal() as proposal if alive:
            return _weigh(state, active, phase, proposal)
        case Proposal() as proposal:
            # Nothing runs that could be stopped; but all who may hold its state are heard first.
            is_time = is_informed(state, active)
            return open_next(state, active, proposal, phase.reason) if is_time else WAIT


def _weigh(state: State, active: Active, phase: Planning, proposal: Proposal) -> RuleAnswer:
    """Move from what runs to what is proposed, or stay."""
    if goes_back(active):
        return open_next(state, active, proposal, phase.reason)
    if not phase.is_forced and not proposal.is_worth_it:
        later = replace(state, active=ask_again_in(state, active, proposal.ask_again_s))
        text = f"stays: {proposal.why.removeprefix('stay: ')}"
        return enter(later, phase.before, note(active, text))
    if is_running_plan(active, proposal):
        return enter(state, phase.before, note(active, "stays: no better plan"))
    cannot_stop = is_too_late_to_stop(state, active, proposal) and is_informed(state, active)
    if cannot_stop and (looked := look_before(state, active)) is not PASS:
        return looked
    reason, written = phase.reason, tuple[Command, ...]()
    if not phase.is_forced:
        reason = f"{reason}: {proposal.why.removeprefix('move: ')}"
        past = replace(state.job.past, moved_at=state.now)
        state, written = write_job(state, replace(state.job, past=past))
    state, marks = leave_out(state, phase)
    move = open_next if cannot_stop else stop
    moved = move(state, active, proposal, reason)
    assert isinstance(moved, Step), "the checkpoint was checked above"
    return Step(moved.state, (*written, *marks, *moved.commands))


def _while_stopping(state: State, active: Active, phase: Stopping) -> RuleAnswer:
    """Wait until all are parked, or cannot be; then go on with what the stop was for."""
    assert active.generation is not None
    if is_writing(active):
        return WAIT
    stopped = stopped_at(state, active.generation)
    if stopped is None and is_alive(state, active) and state.now < phase.deadline:
        return WAIT
    if not isinstance(phase.then, Proposal):
        # Whoever pauses may give the machines back, and their memory with them; not so whoever
        # has ordered to resume meanwhile.
        goes_on = last_word(active) == "resume"
        is_kept = goes_on or not is_alive(state, active)
        kept = PASS if is_kept else secure(state, active, stopped)
        return close(state, active, phase.then, phase.reason) if kept is PASS else kept
    if stopped is None and not is_informed(state, active):
        return WAIT
    if not set(phase.then.members) <= set(usable(state, active)):
        return enter(state, Waiting(f"{phase.reason}; a node of the new plan is gone", state.now))
    return open_next(state, active, phase.then, phase.reason, stopped)


def _while_opening(state: State, active: Active, phase: Opening) -> RuleAnswer:
    """Once the record stands in the store, tell those whom it concerns."""
    if active.generation != phase.record:
        return WAIT
    options, record = state.options, phase.record
    deadline = state.now + start_s(options, phase.proposal)
    commands: list[Command] = []
    order = order_at_hand(active)
    if order is not None and order.kind == "rollback" and phase.lowers == order.durable:
        state = replace(state, active=without(active, order))
    if record.number > 1:
        nodes = tuple(sorted(id_ for id_, node in state.nodes.items() if not node.is_lost))
        commands.append(AbortGeneration(record.job, record.number - 1, nodes))
    commands.append(WakeAgents(record.members))
    return enter(state, Starting(state.now, deadline, phase.proposal.move_s), *commands)


def _while_starting(state: State, active: Active, phase: Starting) -> RuleAnswer:
    """Wait until every member trains, for as long as that may take."""
    if not is_alive(state, active):
        return fail(state, active)
    assert active.generation is not None
    if has_started(state, active.generation):
        took = state.now - phase.since
        text = f"generation {active.generation.number} runs after {took:.2f} s"
        # What a start from nothing takes, nobody predicts.
        text += f" (predicted {phase.move_s:.2f} s)" if phase.move_s else ""
        begun = replace(state, active=replace(active, advanced_at=state.now))
        return enter(begun, Running(state.now), note(active, text))
    if state.now >= phase.deadline:
        return fail(state, active)
    # A notice or a drain does not wait until everything runs.
    change = change_wanted(state, active)
    is_pressing = change is not None and change.is_forced
    is_time = is_pressing and is_due(state, active, change)
    return ask(state, active, change) if is_time else PASS


def _while_running(state: State, active: Active) -> RuleAnswer:
    """Let it run: until it fails, is done, stands still, or something better is to be had."""
    assert active.generation is not None
    if not is_alive(state, active):
        return fail(state, active)
    steps = state.job.steps
    is_done = steps is not None and active.step >= steps
    if is_done and all_members(state, active.generation, "stopped"):
        kept = secure(state, active, stopped_at(state, active.generation))
        done = f"all {steps} steps are done"
        return close(state, active, "done", done) if kept is PASS else kept
    if state.now >= active.advanced_at + stall_s(state.options, active):
        return fail(state, active)
    if active.failures and is_healthy(state, active):
        return forgive(state, active)
    kept = keep_too_many(state, active)
    if kept is not PASS:
        return kept
    change = change_wanted(state, active)
    return ask(state, active, change) if is_due(state, active, change) else PASS


def _while_closing(state: State, active: Active, phase: Closing) -> RuleAnswer:
    """Once the end stands in the store, give the cluster free."""
    if active.generation is not None and active.generation.state != "closed":
        return WAIT
    return finish(state, active, phase.then, phase.reason)
