"""What the controller does: the one place where anything is decided.

An event changes what is known (``facts``); then each rule below looks at the phase of the job
and at what is known, and the rules go on until none has anything left to do. So nothing hangs
on having seen one particular event: a controller that was away looks, and goes on.

    Waiting -> Planning -> Opening -> Starting -> Running      first plan, or after a loss
    Running -> Planning -> Stopping -> Opening -> ...          a better plan, a notice, a drain
    Running -> Stopping -> Closing                             paused
    any     -> Closing                                         cancelled, done, held
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from agents.protocol import (
    GenerationRecord,
    JobId,
    JobRecord,
    JobState,
    NodeId,
    Point,
    Restore,
)
from sailord.changes import Change, broken_members, change_wanted, usable
from sailord.facts import learn, next_in_queue
from sailord.model import (
    AbortGeneration,
    Active,
    Closing,
    Command,
    Elected,
    Event,
    Held,
    JobSubmitted,
    Note,
    Opening,
    Phase,
    Planning,
    ProbeAgent,
    Proposal,
    RequestPlan,
    Resign,
    Running,
    SettleIntent,
    Starting,
    State,
    Stopping,
    Waiting,
    WakeAgents,
    WriteGeneration,
    WriteJob,
    WriteRefused,
)
from sailord.recover import lineage_of
from sailord.standing import (
    all_members,
    is_alive,
    is_due,
    is_informed,
    is_running_plan,
    is_too_late_to_stop,
    restore_now,
    stopped_at,
)

Outcome = tuple[State, tuple[Command, ...]]
RULES_MAX = 32


def decide(state: State, event: Event) -> Outcome:
    """Say what the controller becomes and does, now that ``event`` has happened."""
    before, state = state, learn(state, event)
    if state.term is None:
        led = before.term is not None and isinstance(event, WriteRefused)
        return state, (Resign("the store holds what another leader wrote"),) if led else ()
    commands: list[Command] = [SettleIntent(id_) for id_ in state.settled]
    state = replace(state, settled=())
    for _ in range(RULES_MAX):
        outcome = _next_move(state)
        if outcome is None:
            return state, (*_changed_jobs(before, event, state), *commands)
        state = outcome[0]
        commands += outcome[1]
    raise AssertionError(f"the rules come to no rest: {state.active}")


def _next_move(state: State) -> Outcome | None:
    active = state.active
    if active is None:
        return _take_next_job(state)
    move = _probe_suspects(state) or _obey(state, active)
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


# ---- one rule per phase ---------------------------------------------------------------------


def _while_waiting(state: State, active: Active) -> Outcome | None:
    change = change_wanted(state, active)
    return _ask(state, active, change) if is_due(state, active, change) else None


def _while_planning(state: State, active: Active, phase: Planning) -> Outcome | None:
    alive = is_alive(state, active)
    if not alive and not isinstance(phase.before, Waiting):
        return _fail(state, active)
    if not set(phase.asked_for) <= set(usable(state, active)):
        return _enter(state, phase.before)  # A node of the question is gone: ask another one.
    match phase.answer:
        case None if state.now < phase.deadline:
            return None
        case None:
            # That says nothing about the nodes: the same question is worth another try.
            again = replace(active, not_before=state.now + state.options.failure_pause_s)
            note = _note(active, "the planner did not answer in time")
            return _enter(replace(state, active=again), phase.before, note)
        case str() as why:
            return _refuse(state, active, phase, why)
        case Proposal() as proposal:
            if not alive and not is_informed(state, active):
                return None
            if not alive:
                return _open(state, active, proposal, phase.reason)
            if not phase.is_forced and not proposal.is_worth_it:
                return _enter(state, phase.before, _note(active, f"stays: {proposal.why}"))
            if is_running_plan(active, proposal):
                return _enter(state, phase.before, _note(active, "stays: no better plan"))
            if is_too_late_to_stop(state, active, proposal) and is_informed(state, active):
                return _open(state, active, proposal, phase.reason)
            return _stop(state, active, proposal, phase.reason)


def _while_stopping(state: State, active: Active, phase: Stopping) -> Outcome | None:
    assert active.generation is not None
    stopped = stopped_at(state, active.generation)
    if stopped is None and is_alive(state, active) and state.now < phase.deadline:
        return None
    if not isinstance(phase.then, Proposal):
        return _close(state, active, phase.then, phase.reason)
    if stopped is None and not is_informed(state, active):
        return None
    if not set(phase.then.members) <= set(usable(state, active)):
        return _enter(state, Waiting(f"{phase.reason}; a node of the new plan is gone", state.now))
    return _open(state, active, phase.then, phase.reason, stopped)


def _while_opening(state: State, active: Active, phase: Opening) -> Outcome | None:
    if active.generation != phase.record:
        return None
    options, record = state.options, phase.record
    deadline = state.now + options.start_s + 3 * phase.proposal.move_s
    commands: list[Command] = []
    if record.number > 1:
        nodes = tuple(sorted(id_ for id_, node in state.nodes.items() if not node.is_lost))
        commands.append(AbortGeneration(record.job, record.number - 1, nodes))
    commands.append(WakeAgents(record.members))
    return _enter(state, Starting(state.now, deadline, phase.proposal.move_s), *commands)


def _while_starting(state: State, active: Active, phase: Starting) -> Outcome | None:
    if not is_alive(state, active) or state.now >= phase.deadline:
        return _fail(state, active)
    assert active.generation is not None
    if all_members(state, active.generation, "running", "stopped"):
        took = state.now - phase.since
        text = f"generation {active.generation.number} runs after {took:.2f} s"
        return _enter(
            replace(state, active=replace(active, advanced_at=state.now)),
            Running(state.now),
            _note(active, f"{text} (predicted {phase.move_s:.2f} s)"),
        )
    # A notice or a drain does not wait until everything runs.
    change = change_wanted(state, active)
    is_pressing = change is not None and change.is_forced
    is_time = is_pressing and is_due(state, active, change)
    return _ask(state, active, change) if is_time else None


def _while_running(state: State, active: Active) -> Outcome | None:
    assert active.generation is not None
    stalled = state.now >= active.advanced_at + state.options.stall_s
    if not is_alive(state, active) or stalled:
        return _fail(state, active)
    steps = active.job.steps
    if (
        steps is not None
        and active.step >= steps
        and all_members(state, active.generation, "stopped")
    ):
        return _close(state, active, "done", f"all {steps} steps are done")
    change = change_wanted(state, active)
    return _ask(state, active, change) if is_due(state, active, change) else None


def _while_closing(state: State, active: Active, phase: Closing) -> Outcome | None:
    if active.generation is not None and active.generation.state != "closed":
        return None
    return _finish(state, active, phase.then, phase.reason)


# ---- orders -----------------------------------------------------------------------------------


def _obey(state: State, active: Active) -> Outcome | None:
    """Carry out what an operator asked of the job, as soon as the phase allows it."""
    if not active.orders or isinstance(active.phase, Opening | Closing):
        return None
    order = active.orders[0]
    reason = order.reason or f"{order.kind} was ordered"
    match order.kind:
        case "cancel":
            return _close(state, active, "cancelled", reason)
        case "pause" if isinstance(active.phase, Stopping) and active.phase.then == "paused":
            return None
        case "pause" if is_alive(state, active):
            return _stop(state, active, "paused", reason)
        case "pause":
            return _close(state, active, "paused", reason)
        case "resume" if isinstance(active.phase, Held):
            job = replace(active.job, state="running", reason=reason)
            again = replace(active, job=job, failures=0, not_before=state.now, is_refused=False)
            again = replace(again, considered=frozenset(), orders=active.orders[1:])
            waiting = Waiting(reason, state.now)
            return _enter(replace(state, active=again), waiting, SettleIntent(order.id))
        case "replan":
            return None  # ``changes`` asks for it.
        case _:  # It goes on already.
            left = replace(active, orders=active.orders[1:])
            return replace(state, active=left), (SettleIntent(order.id),)


def _take_next_job(state: State) -> Outcome | None:
    job = next_in_queue(state)
    if job is None:
        return None
    jobs, generations = dict(state.jobs), dict(state.generations)
    del jobs[job.id]
    last = generations.pop(job.id, None)
    job = replace(job, state="running", reason="its turn came")
    phase = Waiting("nothing was planned yet", state.now)
    step = last.restore.point.step if last is not None else 0
    active = Active(job, phase, last, step=step, advanced_at=state.now)
    return replace(state, jobs=jobs, generations=generations, active=active), ()


# ---- moves ------------------------------------------------------------------------------------


def _ask(state: State, active: Active, change: Change | None) -> Outcome:
    assert change is not None
    nodes = usable(state, active)
    considered = replace(active, considered=frozenset(nodes), considered_at=state.now)
    settled: tuple[Command, ...] = ()
    if active.orders and active.orders[0].kind == "replan":
        settled = (SettleIntent(active.orders[0].id),)
        considered = replace(considered, orders=active.orders[1:])
    if not nodes:
        refused = replace(considered, is_refused=True)
        return replace(state, active=refused), (*settled, _note(active, "no node is ready"))
    alive = is_alive(state, active)
    before = active.phase if isinstance(active.phase, Starting | Running) and alive else None
    request = state.requests + 1
    phase = Planning(
        request,
        nodes,
        change.reason,
        change.is_forced,
        state.now + state.options.plan_s,
        before or Waiting(change.reason, state.now),
    )
    is_safe = active.failures >= state.options.failures_until_safe
    asked = replace(considered, phase=phase, is_refused=False)
    return replace(state, active=asked, requests=request), (
        *settled,
        _note(active, f"planning for {_count(nodes)}: {change.reason}"),
        RequestPlan(request, active.job.id, nodes, active.generation, is_safe),
    )


def _refuse(state: State, active: Active, phase: Planning, why: str) -> Outcome:
    state = replace(state, active=replace(active, is_refused=True))
    return _enter(state, phase.before, _note(active, f"no plan: {why}"))


def _stop(state: State, active: Active, then: Proposal | JobState, reason: str) -> Outcome:
    """Let all members park at the end of one step, with nothing lost."""
    last = active.generation
    assert last is not None
    iteration_s = then.iteration_s if isinstance(then, Proposal) else 0.0
    deadline = state.now + state.options.stop_s + 3 * iteration_s
    phase = Stopping(then, reason, deadline)
    if last.state == "stopping":
        return _enter(state, phase)
    assert state.term is not None
    record = replace(
        last, state="stopping", stop_at=active.step + 1, term=state.term, reason=reason
    )
    order = WriteGeneration(record, replaces=last)
    return _enter(state, phase, order, _note(active, f"stopping: {reason}", is_transition=True))


def _open(
    state: State,
    active: Active,
    proposal: Proposal,
    reason: str,
    stopped: Point | None = None,
) -> Outcome:
    """Store the next generation; only then is anybody told of it."""
    last = active.generation
    restore = Restore(stopped, "memory") if stopped is not None else restore_now(state, active)
    assert state.term is not None
    record = GenerationRecord(
        job=active.job.id,
        number=1 if last is None else last.number + 1,
        state="open",
        plan=proposal.plan,
        members=tuple(sorted(proposal.members)),
        restore=restore,
        term=state.term,
        reason=reason,
        lineage=() if last is None else lineage_of(last),
    )
    lost = max(active.step - restore.point.step, 0)
    text = f"generation {record.number} on {_count(record.members)} from step"
    text = f"{text} {restore.point.step} ({restore.source}, {lost} steps lost): {reason}"
    return _enter(
        state,
        Opening(record, proposal),
        WriteGeneration(record, replaces=last),
        _note(active, text, is_transition=True),
    )


def _fail(state: State, active: Active) -> Outcome:
    """The generation cannot go on. Machines that went away are nobody's fault and count nowhere."""
    assert active.generation is not None
    options = state.options
    broken = [state.nodes.get(id_) for id_ in broken_members(state, active.generation)]
    is_fault = not any(node is None or node.is_lost for node in broken)
    change = change_wanted(state, active)
    reason = change.reason if change is not None else "the generation failed"
    was_healthy = active.step - active.generation.restore.point.step >= options.steps_of_health
    failures = (0 if was_healthy else active.failures) + is_fault
    pause = options.failure_pause_s * 2 ** (failures - 1) if is_fault else 0.0
    active = replace(
        active, failures=failures, not_before=state.now + pause, considered=frozenset()
    )
    state = replace(state, active=replace(active, is_refused=False))
    if failures >= options.failures_until_held:
        return _close(state, active, "held", f"{failures} attempts failed; the last: {reason}")
    return _enter(state, Waiting(reason, state.now), _note(active, reason, is_transition=True))


def _close(state: State, active: Active, then: JobState, reason: str) -> Outcome:
    last = active.generation
    phase = Closing(then, reason)
    if last is None or last.state == "closed":
        return _enter(state, phase)
    assert state.term is not None
    record = replace(last, state="closed", term=state.term, reason=reason)
    order = WriteGeneration(record, replaces=last)
    return _enter(state, phase, order, _note(active, f"{then}: {reason}", is_transition=True))


def _finish(state: State, active: Active, then: JobState, reason: str) -> Outcome:
    job = replace(active.job, state=then, reason=reason)
    wake: tuple[Command, ...] = ()
    if active.generation is not None:
        wake = (WakeAgents(active.generation.members),)
    if then == "held":
        held = replace(active, job=job, phase=Held(reason, state.now))
        return replace(state, active=held), wake
    wake = (*wake, *(SettleIntent(order.id) for order in active.orders))
    if then == "paused" and any(order.kind == "resume" for order in active.orders):
        job = replace(job, state="queued", reason="resume was ordered")
    generations = dict(state.generations)
    if active.generation is not None:
        generations[job.id] = active.generation
    jobs = {**state.jobs, job.id: job}
    return replace(state, jobs=jobs, generations=generations, active=None), wake


def _probe_suspects(state: State) -> Outcome | None:
    """Ask agents how they are when a peer lost its connection to them."""
    assert state.active is not None
    generation = state.active.generation
    if generation is None:
        return None
    named: set[NodeId] = set()
    for node in state.nodes.values():
        if node.report is not None and node.report.generation == generation.number:
            named.update(node.report.broken_peers)
    for id_ in sorted(named):
        suspect = state.nodes.get(id_)
        if suspect is None or suspect.is_lost or suspect.unreachable_since is not None:
            continue
        last = suspect.probed_at
        if last is None or state.now >= last + state.options.probe_s:
            nodes = {**state.nodes, id_: replace(suspect, probed_at=state.now)}
            return replace(state, nodes=nodes), (ProbeAgent(id_),)
    return None


# ---- small words --------------------------------------------------------------------------------


def _enter(state: State, phase: Phase, *commands: Command) -> Outcome:
    assert state.active is not None
    return replace(state, active=replace(state.active, phase=phase)), commands


def _count(nodes: tuple[NodeId, ...]) -> str:
    return "1 node" if len(nodes) == 1 else f"{len(nodes)} nodes"


def _note(active: Active, text: str, *, is_transition: bool = False) -> Note:
    return Note(text, active.job.id, is_transition)


def _changed_jobs(before: State, event: Event, after: State) -> tuple[Command, ...]:
    """Jobs whose state is another one than the store's, and so must be written."""

    def all_jobs(state: State) -> dict[JobId, JobRecord]:
        active = {} if state.active is None else {state.active.job.id: state.active.job}
        return {**state.jobs, **active}

    stored = all_jobs(before)
    match event:
        case Elected():
            stored = {job.id: job for job in event.jobs}
        case JobSubmitted():
            stored.setdefault(event.job.id, event.job)
        case _:
            pass
    return tuple(
        WriteJob(job) for id_, job in sorted(all_jobs(after).items()) if stored.get(id_) != job
    )
