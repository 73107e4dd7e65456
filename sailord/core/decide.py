"""What the controller does: the one place where anything is decided.

An event changes what is known (``facts``); then each rule below looks at the phase of the job
and at what is known, and the rules go on until none has anything left to do. So nothing hangs
on having seen one particular event: a controller that was away looks, and goes on. What each
rule does to the job is a move (``moves``), or an operator's order (``orders``).

    Waiting -> Planning                                     once all have come who come together
    Planning -> Opening -> Starting -> Running              nothing runs that could be stopped first
    Planning -> Stopping -> Opening                         a better plan, a notice, a drain
    Planning -> Waiting, Starting, Running                  no plan, or none that pays: on as before
    Starting, Running -> Planning                           a notice, an order; machines that came
    Starting, Running -> Waiting                            a loss or a failure
    Stopping -> Waiting                                     a node of the next plan went meanwhile
    Starting, Running, Planning -> Stopping -> Closing      paused, with nothing lost
    Waiting, Planning, Starting, Running, Held -> Closing   cancelled, done; or else
    Closing -> Held -> Waiting                              many failures; until somebody resumes
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from sailord.core.checkpoint_rules import commit_next, obey_checkpoint, secure, sweep
from sailord.core.job_cost import over_budget
from sailord.core.learn import learn, next_in_queue
from sailord.core.operator_orders import obey
from sailord.core.proposal import Proposal
from sailord.core.queries import (
    all_members,
    ask_again_in,
    changed_jobs,
    goes_back,
    has_started,
    is_alive,
    is_due,
    is_informed,
    is_running_plan,
    is_too_late_to_stop,
    is_writing,
    stopped_at,
    suspects_to_probe,
    turned_jobs,
)
from sailord.core.replan_triggers import change_wanted, last_word, order_at_hand, usable
from sailord.core.state import (
    AbortGeneration,
    Active,
    Closing,
    Command,
    Event,
    GiveIntent,
    Held,
    Note,
    Opening,
    Outcome,
    Planning,
    ProbeAgent,
    Resign,
    Running,
    SettleIntent,
    Starting,
    State,
    Stopping,
    Waiting,
    WakeAgents,
    WriteJob,
    WriteRefused,
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

RULES_MAX = 32


def decide(state: State, event: Event) -> Outcome:
    """Say what the controller becomes and does, now that ``event`` has happened."""
    before, state = state, learn(state, event)
    if state.term is None:
        led = before.term is not None and isinstance(event, WriteRefused)
        return state, (Resign("the store holds what another leader wrote"),) if led else ()
    commands: list[Command] = [SettleIntent(id_) for id_ in state.settled]
    commands += map(GiveIntent, state.meant)
    if commands:
        state = replace(state, settled=(), meant=())
    orders = 0 if state.active is None else len(state.active.orders)
    for _ in range(RULES_MAX + orders):
        outcome = _next_move(state)
        if outcome is None or (outcome[0] is state and not outcome[1]):
            written = (WriteJob(job) for job in changed_jobs(before, event, state))
            turned = turned_jobs(before, event, state)
            told = (Note(f"{job.state}: {job.reason}", job.id, True) for job in turned)
            return state, (*written, *told, *commands)
        state = outcome[0]
        commands += outcome[1]
    raise AssertionError(f"the rules come to no rest: {state.active}")


def _next_move(state: State) -> Outcome | None:
    """The first rule that has something to do says what; ``None``: all is as it should be."""
    active = state.active
    if active is None:
        return _take_next_job(state)
    if active.commit is not None and active.commit.is_storing:
        # Where the next generation may begin hangs on it, and it takes a moment.
        return _probe_suspects(state, active)
    for rule in WHATEVER_THE_PHASE:
        move = rule(state, active)
        if move is not None:
            return move
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
            return None
        case _:
            assert_never(active.phase)


# ---- rules whatever the phase -------------------------------------------------------------------


def _take_next_job(state: State) -> Outcome | None:
    """Nothing has the cluster: the first in the queue gets it."""
    job = next_in_queue(state)
    if job is None:
        return None
    jobs, generations = dict(state.jobs), dict(state.generations)
    del jobs[job.id]
    last = generations.pop(job.id, None)
    past = replace(job.past, since=state.now, departures=0)
    job = replace(job, state="running", reason="its turn came", past=past)
    phase = Waiting("nothing was planned yet", state.now)
    step = last.restore.point.step if last is not None else 0
    active = Active(job, phase, last, step=step, advanced_at=state.now)
    return replace(state, jobs=jobs, generations=generations, active=active), ()


def _keep_budget(state: State, active: Active) -> Outcome | None:
    """A job that has spent what it may is held at once; its snapshots stay where they are."""
    why = over_budget(state)
    if not why or is_writing(active) or isinstance(active.phase, Held):
        return None
    return close(state, active, "held", why)


def _probe_suspects(state: State, active: Active) -> Outcome | None:
    """Ask agents how they are that seem gone."""
    if active.generation is None:
        return None
    suspects = suspects_to_probe(state, active.generation)
    if not suspects:
        return None
    asked = {id_: replace(state.nodes[id_], probed_at=state.now) for id_ in suspects}
    return replace(state, nodes=state.nodes.with_(asked)), tuple(map(ProbeAgent, suspects))


WHATEVER_THE_PHASE = (_probe_suspects, obey_checkpoint, obey, _keep_budget, commit_next, sweep)
"""Asked in this order, before the phase's own rule."""

# ---- one rule per phase ---------------------------------------------------------------------


def _while_waiting(state: State, active: Active) -> Outcome | None:
    """Nothing runs: ask for a plan, once those who come or go together have done so."""
    back = take_back(state, active)
    if back is not None:
        return back
    change = change_wanted(state, active)
    return ask(state, active, change) if is_due(state, active, change) else None


def _while_planning(state: State, active: Active, phase: Planning) -> Outcome | None:
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
            return None
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
            return open_next(state, active, proposal, phase.reason) if is_time else None


def _weigh(state: State, active: Active, phase: Planning, proposal: Proposal) -> Outcome:
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
    if cannot_stop and (looked := look_before(state, active)) is not None:
        return looked
    reason = phase.reason
    if not phase.is_forced:
        reason = f"{reason}: {proposal.why.removeprefix('move: ')}"
        past = replace(active.job.past, moved_at=state.now)
        active = replace(active, job=replace(active.job, past=past))
        state = replace(state, active=active)
    state, marks = leave_out(state, phase)
    if cannot_stop:
        state, orders = open_next(state, active, proposal, reason)
    else:
        state, orders = stop(state, active, proposal, reason)
    return state, (*marks, *orders)


def _while_stopping(state: State, active: Active, phase: Stopping) -> Outcome | None:
    """Wait until all are parked, or cannot be; then go on with what the stop was for."""
    assert active.generation is not None
    if is_writing(active):
        return None
    stopped = stopped_at(state, active.generation)
    if stopped is None and is_alive(state, active) and state.now < phase.deadline:
        return None
    if not isinstance(phase.then, Proposal):
        # Whoever pauses may give the machines back, and their memory with them; not so whoever
        # has ordered to resume meanwhile.
        goes_on = last_word(active) == "resume"
        is_kept = goes_on or not is_alive(state, active)
        kept = None if is_kept else secure(state, active, stopped)
        return kept or close(state, active, phase.then, phase.reason)
    if stopped is None and not is_informed(state, active):
        return None
    if not set(phase.then.members) <= set(usable(state, active)):
        return enter(state, Waiting(f"{phase.reason}; a node of the new plan is gone", state.now))
    return open_next(state, active, phase.then, phase.reason, stopped)


def _while_opening(state: State, active: Active, phase: Opening) -> Outcome | None:
    """Once the record stands in the store, tell those whom it concerns."""
    if active.generation != phase.record:
        return None
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


def _while_starting(state: State, active: Active, phase: Starting) -> Outcome | None:
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
    return ask(state, active, change) if is_time else None


def _while_running(state: State, active: Active) -> Outcome | None:
    """Let it run: until it fails, is done, stands still, or something better is to be had."""
    assert active.generation is not None
    if not is_alive(state, active):
        return fail(state, active)
    steps = active.job.steps
    is_done = steps is not None and active.step >= steps
    if is_done and all_members(state, active.generation, "stopped"):
        kept = secure(state, active, stopped_at(state, active.generation))
        return kept or close(state, active, "done", f"all {steps} steps are done")
    if state.now >= active.advanced_at + stall_s(state.options, active):
        return fail(state, active)
    if active.failures and is_healthy(state, active):
        return forgive(state, active)
    kept = keep_too_many(state, active)
    if kept is not None:
        return kept
    change = change_wanted(state, active)
    return ask(state, active, change) if is_due(state, active, change) else None


def _while_closing(state: State, active: Active, phase: Closing) -> Outcome | None:
    """Once the end stands in the store, give the cluster free."""
    if active.generation is not None and active.generation.state != "closed":
        return None
    return finish(state, active, phase.then, phase.reason)
