"""Rules about a job as a whole: it gets the cluster, yields it, or has spent its budget."""

from __future__ import annotations

from dataclasses import replace

from sailord.core.model.commands import AbortGeneration
from sailord.core.model.phases import Closing, Held, Running, Stopping, Waiting
from sailord.core.model.rule import PASS, RuleAnswer, Step, write_job
from sailord.core.model.state import Active, Progress, State
from sailord.core.queries.active_job import is_writing
from sailord.core.queries.job_cost import over_budget
from sailord.core.queries.job_queue import is_passed_over, next_in_queue
from sailord.core.queries.replan_triggers import last_steering_order
from sailord.core.queries.restore_choice import holders_reported, unsaved_steps
from sailord.core.rules.transitions import close, finish

YIELDED = " has the cluster; held: "
"""In the reason of a job that was held and gave the cluster to the next one."""


def why_yielded(reason: str) -> str:
    """Return why a job was held that gave the cluster to the next one; empty: of any other."""
    return reason.partition(YIELDED)[2]


def take_next_job(state: State) -> Step | None:
    """Give the cluster to the first job of the queue, unless an unreadable job may have it."""
    job = next_in_queue(state)
    if job is None or state.unreadable:
        return None
    generations = dict(state.generations)
    last = generations.pop(job.id, None)
    rollbacks = dict(state.rollbacks)
    ordered = rollbacks.pop(job.id, None)
    past = replace(job.past, since=state.now, departures=0)
    job = replace(job, state="running", reason="next in the queue", past=past)
    unpaid = {id_: at for id_, at in state.unpaid.items() if id_ != job.id}
    phase = Waiting("next in the queue", state.now)
    step = last.restore.point.step if last is not None else 0
    orders = () if ordered is None else (ordered,)
    active = Active(job.id, phase, last, orders=orders, progress=Progress(step, state.now))
    state, commands = write_job(state, job)
    changed = replace(
        state, generations=generations, rollbacks=rollbacks, unpaid=unpaid, active=active
    )
    return Step(changed, commands)


def yield_cluster(state: State, active: Active, phase: Held) -> RuleAnswer:
    """Let the next job have the cluster while this one is held, if no step is lost by that."""
    following = next_in_queue(state)
    if state.now <= phase.since:
        return PASS  # It yields one decision later, so that receivers are told that it was held.
    if following is None or is_passed_over(state, following.id):
        return PASS
    if not _loses_nothing(state, active):
        return PASS
    return finish(state, active, "paused", f"{following.id}{YIELDED}{phase.reason}")


def step_aside(state: State, active: Active) -> RuleAnswer:
    """Let the next job go first while this one's limits in dollars pay for no plan.

    It stays in the queue. Only a job without an open generation, and not where sailord rents or
    jobs share: there it waits for cheaper instances or nodes.
    """
    asked, last = active.asked, active.generation
    if not (asked.is_refused and asked.is_unpaid) or active.orders or active.may_start_over:
        return PASS
    if state.options.rents or state.options.share or (last is not None and last.state != "closed"):
        return PASS
    following = next_in_queue(state)
    if following is None or is_passed_over(state, following.id):
        return PASS
    if not asked.nodes.issuperset(state.nodes.free) or not _loses_nothing(state, active):
        return PASS
    state = replace(state, unpaid={**state.unpaid, active.job: state.now})
    return finish(state, active, "queued", asked.said)


def _loses_nothing(state: State, active: Active) -> bool:
    """Return whether the job can leave the cluster at once, and no step is in memory alone."""
    if not holders_reported(state, active) or _has_workers(state, active):
        return False
    return not unsaved_steps(state, active)


def _has_workers(state: State, active: Active) -> bool:
    """Return whether a living member has not left the generation: it may do one more step."""
    generation = active.generation
    return generation is not None and any(
        not state.nodes[id_].is_lost for id_, _ in state.reports_of(generation)
    )


def hold_rejected(state: State, active: Active) -> RuleAnswer:
    """Hold a job if the store rejects a write of it for good; earlier writes stand."""
    why = active.rejected
    if not why:
        return PASS
    active = replace(active, rejected="")
    state = replace(state, active=active)
    if isinstance(active.phase, Held):
        return Step(state)  # The store rejected the hold, too; only the log has the reason.
    reason = f"the store rejects its record for good: {why}"
    if not isinstance(active.phase, Closing):
        return close(state, active, "held", reason)
    # The end of the generation cannot be stored either, so its agents are told directly.
    held, commands = finish(state, active, "held", reason)
    if (last := active.generation) is None or last.state == "closed":
        return Step(held, commands)
    return Step(held, (*commands, AbortGeneration(active.job, last.number, last.members)))


def keep_budget(state: State, active: Active) -> RuleAnswer:
    """Hold a job that has spent its budget; its snapshots stay in memory.

    One that has done all its steps ends by itself, within the time for storing the last one; one
    that is being paused, once its last step is saved or cannot be.
    """
    why, steps = over_budget(state), state.job.steps
    if not why or is_writing(active) or isinstance(active.phase, Held):
        return PASS
    if isinstance(active.phase, Running) and steps is not None and active.progress.step >= steps:
        return PASS
    saves = isinstance(active.phase, Waiting) and active.checkpointing.securing is not None
    if isinstance(active.phase, Stopping) and active.phase.then == "paused":
        return PASS
    if saves and last_steering_order(active) == "pause":
        return PASS
    return close(state, active, "held", why)
