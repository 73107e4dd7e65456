"""The queue of jobs that wait for the cluster."""

from __future__ import annotations

from agents.protocol.records import JobId, JobRecord
from sailord.core.model.state import State


def queue_order(job: JobRecord) -> tuple[int, float, str]:
    """Sort key of the queue: the highest priority first, then the earliest submission."""
    return (-job.priority, job.submitted_at, job.id)


def in_queue(state: State) -> list[JobRecord]:
    """Return the queued jobs, the next one first."""
    queued = (job for job in state.jobs.values() if job.state == "queued")
    return sorted(queued, key=queue_order)


def next_in_queue(state: State) -> JobRecord | None:
    """Return the job that gets the cluster next; unpaid ones come after all others."""
    return min(in_queue(state), key=lambda job: is_unpaid(state, job.id), default=None)


def is_unpaid(state: State, id_: JobId) -> bool:
    """Return whether a queued job is passed over: its limits pay for no plan on these nodes.

    A node that it was not asked about may be cheaper; fewer nodes change nothing.
    """
    nodes = state.unpaid.get(id_)
    return nodes is not None and nodes.issuperset(state.nodes.free)
