"""Acts on the planner's answer to the open question."""

from __future__ import annotations

from dataclasses import replace

from sailord.core.model.commands import Command, Note
from sailord.core.model.phases import Running, Waiting
from sailord.core.model.proposal import Proposal
from sailord.core.model.rule import PASS, WAIT, RuleAnswer, Step, write_job
from sailord.core.model.state import Active, OpenQuestion, State
from sailord.core.queries.active_job import (
    is_alive,
    is_due,
    is_joining,
    is_rolling_back,
    is_running_plan,
    is_too_late_to_stop,
)
from sailord.core.queries.replan_triggers import (
    RECONSIDERED,
    leaving,
    ordered_plan,
    replan_trigger,
    usable,
)
from sailord.core.queries.restore_choice import holders_reported
from sailord.core.rules.straggler_rules import answer_to_slow, leave_out
from sailord.core.rules.transitions import (
    ask,
    check_before_restore,
    fail,
    note,
    open_next,
    stop,
    with_ask_again,
)


def answer_question(state: State, active: Active) -> RuleAnswer:
    """Act on the planner's answer, or drop a question that is out of date."""
    question = active.question
    if question is None:
        return PASS
    alive = is_alive(state, active)
    if not alive and not isinstance(active.phase, Waiting):
        return fail(state, active)
    there = {
        *usable(state, active),
        *(leaving(state, active) if active.asked.is_last_resort else ()),
    }
    if not there.issuperset(question.nodes):
        return _ask_without(state, active, question)
    if alive and not question.is_forced and _must_change(state, active):
        return _drop(state, active)
    kept = answer_to_slow(state, active, question)
    if kept is not None:
        return kept
    match question.answer:
        case None if state.now < question.deadline:
            return WAIT
        case None:
            # This says nothing about the nodes: the same question may be asked again.
            not_before = state.now + state.options.failure_pause_s
            attempts = replace(active.attempts, not_before=not_before)
            late = active.unanswered + 1
            again = replace(_allow_last_resort(active), attempts=attempts, unanswered=late)
            why = f": {question.trouble}" if question.trouble else " in time"
            return _say(state, again, f"the planner did not answer{why}")
        case str() as why:
            asked = replace(active.asked, is_refused=True, is_unpaid=question.is_unpaid)
            refused = replace(active, asked=asked)
            keeps = "the job keeps its plan, there is none for the nodes asked about"
            running = isinstance(active.phase, Running)
            text = f"no plan: {why}"  # It is told of a job that waits, too, if that follows.
            return _say(state, refused, text, f"{keeps}: {why}" if running else text)
        case Proposal() as proposal if alive:
            return _change_or_stay(state, active, question, proposal)
        case Proposal() as proposal:
            # Nothing runs that must be stopped, but every snapshot holder must be heard first.
            is_time = holders_reported(state, active)
            return open_next(state, active, proposal, question.reason) if is_time else WAIT


def _ask_without(state: State, active: Active, question: OpenQuestion) -> Step:
    """Close a question of which a node is no longer usable, so that the next leaves it out."""
    rest = replace(_allow_last_resort(active), question=None)
    if not is_alive(state, active):
        return _drop(state, rest)
    # The other new nodes of the question still count as new.
    rest = replace(rest, asked=replace(rest.asked, nodes=frozenset()))
    urgent = replan_trigger(state, rest)
    if question.is_ordered and (urgent is None or not urgent.is_forced):
        # The order was settled when the question was asked.
        return ask(state, rest, ordered_plan(state.now))
    return _drop(state, rest)


def _must_change(state: State, active: Active) -> bool:
    """Return whether the generation must change at once, whatever the answer; orders wait for it.

    For example, a straggler or a cordoned member, left out of the question, is preempted.
    """
    unordered = replace(active, orders=())
    urgent = replan_trigger(state, unordered)
    return urgent is not None and urgent.is_forced and is_due(state, unordered, urgent)


def _allow_last_resort(active: Active) -> Active:
    """Let the last resort be asked about again: only a refusal rules it out."""
    return replace(active, asked=replace(active.asked, is_last_resort=False))


def _drop(state: State, active: Active, *said: Note) -> Step:
    """Close the question; the phase goes on as if it had never been asked."""
    return Step(replace(state, active=replace(active, question=None)), said)


def _say(state: State, active: Active, text: str, noted: str = "") -> Step:
    """Close the question with an answer that changes nothing; it is told until the next one.

    ``noted``: the words of the event, if others.
    """
    told = replace(active, asked=replace(active.asked, said=text))
    return _drop(state, told, note(active, noted or text))


def _change_or_stay(
    state: State, active: Active, question: OpenQuestion, proposal: Proposal
) -> RuleAnswer:
    """Change to the proposed plan, or keep what runs."""
    if is_rolling_back(active):
        return open_next(state, active, proposal, question.reason)
    if not question.is_forced and not proposal.is_worth_it:
        later = with_ask_again(state, active, proposal.ask_again_s)
        return _say(state, later, f"stays: {proposal.why}")
    if is_running_plan(active, proposal):
        return _say(state, active, "stays: no better plan")
    cannot_stop = is_joining(state, active) or is_too_late_to_stop(state, active, proposal)
    cannot_stop = cannot_stop and holders_reported(state, active)
    if cannot_stop and (looked := check_before_restore(state, active)) is not PASS:
        return looked
    reason, written = question.reason, tuple[Command, ...]()
    if not question.is_forced:
        reason = f"{reason.replace(RECONSIDERED, 'a better plan was found')}: {proposal.why}"
        past = replace(state.job.past, moved_at=state.now)
        state, written = write_job(state, replace(state.job, past=past))
    state, marks = leave_out(state, question)
    move = open_next if cannot_stop else stop
    moved = move(state, active, proposal, reason)
    assert isinstance(moved, Step), "the checkpoint was checked above"
    return Step(moved.state, (*written, *marks, *moved.commands))
