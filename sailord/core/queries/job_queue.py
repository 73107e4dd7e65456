"""The queue of jobs that wait for the cluster."""

from __future__ import annotations

from agents.protocol.records import JobRecord
from sailord.core.model.state import State


def queue_order(job: JobRecord) -> tuple[int, float, str]:
    """Sort key of the queue: the highest priority first, then the earliest submission."""
    return (-job.priority, job.submitted_at, job.id)


def in_queue(state: State) -> list[JobRecord]:
    """Return the queued jobs, the next one first."""
    queued = (job for job in state.jobs.values() if job.state == "queued")
    return sorted(queued, key=queue_order)


def next_in_queue(state: State) -> JobRecord | None:
    """Return the job that gets the cluster next."""
    return next(iter(in_queue(state)), None)
