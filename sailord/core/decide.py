"""The controller's decisions: one pure function, and the rules that it applies in order.

``learn`` folds an event into the state. Then the rules of ``RULES`` are asked in their order. Each
answers ``PASS`` (ask the next), ``WAIT`` (ask none until the next event) or a ``Step`` (change the
state, and ask again from the first): see ``core.model.rule``. It looks only at the state, never at
the event: a controller that missed an event, or has just been elected, reads the store and goes on.

    Waiting -> Opening -> Starting -> Running      the planner answered, and nothing runs
    Running, Starting -> Stopping -> Opening       a better plan, a notice, a drain
    Running, Starting -> Opening                   no time to stop, not all members have joined, or
                                                   a rollback was ordered
    Starting, Running -> Waiting                   a loss or a failure
    Stopping -> Waiting                            a node of the next plan can no longer be used, or
                                                   a member is lost before a pause
    Stopping -> Closing                            paused, once the last step is kept; or cancelled,
                                                   the budget is spent, no state to go on with
    Opening, Stopping -> Closing                   the store rejects a write for good
    Waiting, Starting, Running, Held -> Closing    cancelled, done, the budget is spent, too many
                                                   failures, no node or no state to go on with
    Closing -> Held -> Waiting                     held until an operator resumes it, or until the
                                                   next job can have the cluster: then it is paused

A job that waits without an open generation may go back to the queue (``step_aside``).

While the job waits, starts or runs, a question to the planner may be open (``Active.question``);
training goes on meanwhile, but the phase's own rule waits for the answer. A loss or a drain of one
of its nodes, an order, a spent budget, or a straggler that recovers ends the question early. If it
is only about a better plan, so does anything that forces a new plan.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from agents.protocol.records import LIVE, JobId
from sailord.core.learn import learn
from sailord.core.model.commands import Command, Note, Resign, SettleOrder, WriteJob
from sailord.core.model.events import Elected, Event, OrderGiven, WriteRefused
from sailord.core.model.rule import PASS, RuleAnswer, Step, state_note
from sailord.core.model.state import Active, State
from sailord.core.rules.checkpoint_rules import (
    await_commit,
    collect_unneeded,
    commit_next,
    follow_checkpoint_order,
)
from sailord.core.rules.job_rules import hold_rejected, keep_budget, take_next_job
from sailord.core.rules.operator_orders import follow_order
from sailord.core.rules.phase_rules import advance
from sailord.core.rules.planner_answer import answer_question
from sailord.core.rules.probing import probe_suspects
from sailord.core.rules.quarantine import quarantine_contradicted
from sailord.core.rules.replica_differences import roll_back_difference
from sailord.core.rules.straggler_rules import decide_stragglers

PhaseRule = Callable[[State, Active], RuleAnswer]

RULES: tuple[PhaseRule, ...] = (
    # First, and even while a commit is being stored: a probe changes nothing but what is known of
    # the node, and each rule below decides better with the answer.
    probe_suspects,
    # As early, since it only marks nodes: the rules below must not use them again.
    quarantine_contradicted,
    # The next generation may begin from the checkpoint that is on its way into the store, so no
    # rule below may open one, close one, or go back to an older checkpoint until its fate is known.
    await_commit,
    # Before any rule that would repeat a write that the store rejects.
    hold_rejected,
    # Before all rules that end the generation or make its steps durable: steps since its replicas
    # last agreed may be wrong, and nobody reports that once the generation has ended.
    roll_back_difference,
    # Before the other orders: it only chooses the snapshot to make durable, and has to do so before
    # a pause or a cancel ends the generation.
    follow_checkpoint_order,
    # Before the job's own progress: an operator's order overrides what the phase would do next.
    follow_order,
    # After orders: a pause or a cancel decides how an overspent job ends.
    keep_budget,
    # Before the phase's rule, which may end the generation, and with it what can be committed.
    commit_next,
    # Before the phase's own course, which waits for the planner's answer.
    answer_question,
    # After commits, since what they replace may be removed; and, as all below, not while a question
    # is open.
    collect_unneeded,
    # Before the phase's rule, which asks the planner: it must know which stragglers to leave out.
    decide_stragglers,
    # Last: what is left is the ordinary course of the job.
    advance,
)
"""Asked in this order while a job has the cluster; if none has, only ``take_next_job`` is."""

STEPS_MAX = 32
"""Most steps after one event, plus one for each open order and each node whose bits are
contradicted; after more, rules undo each other."""


def decide(state: State, event: Event) -> Step:
    """Return the state after ``event``, and the commands to carry out."""
    before, (state, commands) = state, learn(state, event)
    if state.term is None:
        led = before.term is not None and isinstance(event, WriteRefused)
        return Step(state, (Resign("the store holds what another leader wrote"),) if led else ())
    steps_max = STEPS_MAX + (0 if state.active is None else len(state.active.orders))
    heard = (state.nodes[id_].report for id_ in state.nodes.notable)
    steps_max += len({id_ for each in heard if each is not None for id_ in each.contradicted})
    for _ in range(steps_max):
        step = next_step(state)
        if step is None:
            return Step(state, _jobs_first(before, event, commands))
        state = step.state
        commands = (*commands, *step.commands)
    raise AssertionError(f"the rules did not converge in {steps_max} steps: {state.active}")


def _jobs_first(before: State, event: Event, commands: Iterable[Command]) -> tuple[Command, ...]:
    """Put the writes of job records first, each job's last one only, and announce new states.

    A new state also tells how the orders ended that led to it.

    Job records come first, since an order is settled only after its effect is stored. One of a
    job that leaves the cluster precedes that of the job that gets it, so that the store never shows
    two with the cluster.
    """
    written = {each.job.id: each.job for each in commands if isinstance(each, WriteJob)}
    stored = {j.id: j for j in event.jobs} if isinstance(event, Elected) else before.jobs
    changed = [job for id_, job in written.items() if stored.get(id_) != job]
    changed.sort(key=lambda job: (job.state in LIVE, job.id))
    given = () if before.active is None else before.active.orders
    if isinstance(event, OrderGiven):
        given = (*given, event.order, *event.others)
    ended = {each.id for each in commands if isinstance(each, SettleOrder)}
    # What became of an order for a checkpoint is told with the step that is durable.
    given = tuple(each for each in given if each.kind != "checkpoint")
    notes = [
        state_note(job, [each.id for each in given if each.id in ended and each.target == job.id])
        for job in changed
        if job.id not in stored or stored[job.id].state != job.state
    ]
    told = {note.job for note in notes}
    rest = (each for each in commands if not isinstance(each, WriteJob))
    return (*map(WriteJob, changed), *notes, *(each for each in rest if not _is_past(each, told)))


def _is_past(command: Command, told: Collection[JobId | None]) -> bool:
    """Whether it tells a state that its job left in the same decision, as one just submitted."""
    return isinstance(command, Note) and command.is_transition and command.job in told


def next_step(state: State) -> Step | None:
    """Return the step of the first rule that has one; ``None``: nothing more to do for now."""
    if state.active is None:
        return take_next_job(state)
    for rule in RULES:
        answer = rule(state, state.active)
        if isinstance(answer, Step):
            return answer
        if answer is not PASS:
            return None
    return None
