"""Says which jobs a queued job waits for, for how long, and from where it goes on."""

from __future__ import annotations

from agents.protocol.records import JobId
from sailord.api.answers.problems import TOTAL_BUDGET
from sailord.core.model.phases import Held, Waiting
from sailord.core.model.state import State
from sailord.core.queries.forecast import done_in
from sailord.core.queries.job_queue import in_queue, is_passed_over, next_in_queue
from sailord.core.queries.restore_choice import resume_point
from sailord.text.causes import first_names
from sailord.text.units import duration


def waits_for(state: State, id_: JobId) -> tuple[JobId, ...]:
    """The jobs before a queued job: the active one, then the queue."""
    queue = [job.id for job in in_queue(state)]
    if id_ not in queue:
        return ()
    active = () if state.active is None else (state.active.job,)
    return (*active, *queue[: queue.index(id_)])


def place_text(state: State, id_: JobId) -> str:
    """Return whom a job waits for, for about how long, and from where it goes on; else empty."""
    job, active = state.jobs.get(id_), state.active
    if job is None or (active is not None and active.job == id_):
        return ""
    said = []
    if before := waits_for(state, id_):
        said.append(f"queued behind {first_names(before)}")
        if active is not None and (left_s := done_in(state)) is not None:
            said.append(f"{active.job} is done in about {duration(left_s)}")
        elif active is not None and isinstance(active.phase, Waiting) and active.asked.is_refused:
            cure = f"sailorctl pause {active.job} lets the next job run"
            said.append(f"{active.job} has the cluster and no plan; {cure}")
        elif active is not None and before == (active.job,):
            said.append(f"it gets the cluster once {active.job} ends or is paused")
    if before and is_passed_over(state, id_):
        cure = "no order raises it: cancel the job and submit it with a higher one"
        if TOTAL_BUDGET in job.reason:
            cure = f"sailorctl budget {id_} USD brings it back to its place"
        said.append(f"others go first while a limit in dollars pays for no plan; {cure}")
    step = resume_point(state, id_).step if job.state in ("queued", "paused", "held") else 0
    if step and job.state == "queued" and not said:
        said.append("queued")
    if step:
        resumed = "" if job.state == "queued" else "once it is resumed, "
        said.append(f"{resumed}{id_} goes on from step {step:,}")
    return "; ".join(said)


def after_order(state: State, kind: str, id_: JobId) -> str:
    """Return what follows an order about a job, where it is not plain from its name; else empty."""
    following, active = next_in_queue(state), state.active
    if kind == "pause" and following is not None and active is not None and active.job == id_:
        is_saved = "" if isinstance(active.phase, Held) else "once its last step is saved, "
        return f"{is_saved}{following.id} gets the cluster"
    return place_text(state, id_) if kind in ("pause", "resume", "priority") else ""
