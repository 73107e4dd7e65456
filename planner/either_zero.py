"""The better of two answers: with the ZeRO stage that the job says, and with the other one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from planner.problem.bounds import ROUNDING
from planner.problem.preference import PlanEstimate, preferred
from planner.problem.question import EITHER_ZERO, STOPPED, Answer, Gain, Question
from planner.search.search_cache import SearchCache
from simulator.spec.job import Job


def better_zero(
    question: Question, ask: Callable[[Question, SearchCache], Answer], cache: SearchCache
) -> Answer:
    """Ask with both ZeRO stages, and take the other one's plan if it is better.

    If simple plans are preferred, by the rule for plans of one space (``preferred``). The bounds
    are those of both spaces.
    """
    job, tries = question.job, tuple(name for name in question.tries if name != "zero1")
    plain = ask(replace(question, tries=tries), cache)
    if plain.note == STOPPED:
        return plain
    changed = replace(question, tries=tries, job=_with_other_zero(job))
    try:
        # The estimates and templates in ``cache`` are of the job's own stage, so use a new cache.
        found = ask(changed, SearchCache())
    except KeyboardInterrupt:
        if not question.is_stoppable or plain.plan is None:
            raise
        return replace(plain, note=STOPPED)
    if found.plan is not None:
        found = replace(found, plan=replace(found.plan, zero=changed.job.zero))
    taken = found if _is_taken(question, plain, found) else plain
    gain = Gain(
        "zero1",
        job.objective.goal,
        found.objective,
        plain.objective,
        is_taken=taken is found and found.plan is not None,
    )
    answer = replace(
        taken,
        evaluations=plain.evaluations + found.evaluations,
        gains=(*taken.gains, gain),
    )
    if plain.plan is None or found.plan is None:
        return answer  # The space in which no plan was found has no bound.
    answer = replace(answer, covered=f"{answer.covered}; {EITHER_ZERO}")
    return bounded_by_both(question, answer, plain, found)


def _with_other_zero(job: Job) -> Job:
    return replace(job, zero=0 if job.zero else 1)


def _is_taken(question: Question, plain: Answer, found: Answer) -> bool:
    """Whether the plan with the other ZeRO stage is taken."""
    if found.plan is None or plain.plan is None:
        return found.plan is not None
    assert plain.objective is not None
    assert found.objective is not None
    if found.objective >= plain.objective:
        return False
    if question.prefer == "fastest":
        return True
    pair = []
    for each in (found, plain):
        assert each.plan is not None
        assert each.estimate is not None
        pair.append(PlanEstimate(each.plan, each.estimate))
    return preferred(pair[0], pair[1:], question.job.objective.goal) is pair[0]


def bounded_by_both(question: Question, answer: Answer, plain: Answer, found: Answer) -> Answer:
    """The answer with the lower bounds of both spaces."""
    least = min(plain.lower_bound, found.lower_bound)
    gap, objective = question.gap, answer.objective
    note = STOPPED if found.note == STOPPED else answer.note
    if not note and gap is not None and objective is not None:
        # The gap is reached if the lower of the two bounds is near enough.
        is_reached = least >= objective * (1 - gap - ROUNDING)
        note = "" if is_reached else plain.note or found.note
    return replace(
        answer,
        lower_bound=least,
        lower_bound_s=min(plain.lower_bound_s, found.lower_bound_s),
        note=note,
    )
