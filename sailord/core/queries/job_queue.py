"""The queue of jobs that wait for the cluster."""

from __future__ import annotations

from agents.protocol.records import JobId, JobRecord
from sailord.core.model.state import State


def queue_order(job: JobRecord) -> tuple[int, float, str]:
    """Sort key of the queue: the highest priority first, then the earliest submission."""
    return (-job.priority, job.submitted_at, job.id)


def in_queue(state: State) -> list[JobRecord]:
    """Return the queued jobs, the next one first; those passed over come last."""
    queued = (job for job in state.jobs.values() if job.state == "queued")
    return sorted(queued, key=lambda job: (is_passed_over(state, job.id), *queue_order(job)))


def next_in_queue(state: State) -> JobRecord | None:
    """Return the job that gets the cluster next."""
    return next(iter(in_queue(state)), None)


def is_passed_over(state: State, id_: JobId) -> bool:
    """Return whether a queued job lets others go first: of late, its limits paid for no plan.

    Prices change, so it is asked about again after as long as if it waited with the cluster.
    """
    asked_at = state.unpaid.get(id_)
    return asked_at is not None and state.now < asked_at + state.options.reconsider_s
