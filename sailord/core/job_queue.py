"""The queue of jobs that wait for the cluster."""

from __future__ import annotations

from agents.protocol.records import JobRecord
from sailord.core.state import State


def queue_order(job: JobRecord) -> tuple[int, float, str]:
    return (-job.priority, job.submitted_at, job.id)


def in_queue(state: State) -> list[JobRecord]:
    """The jobs that wait, who comes first: the highest priority, then who waits longest."""
    queued = (job for job in state.jobs.values() if job.state == "queued")
    return sorted(queued, key=queue_order)


def next_in_queue(state: State) -> JobRecord | None:
    """The job that runs next."""
    return next(iter(in_queue(state)), None)
