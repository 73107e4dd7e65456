"""Which job a node belongs to while several jobs share the cluster."""

from __future__ import annotations

from collections.abc import Mapping

from agents.protocol.records import ENDED, LIVE, JobId, JobRecord, NodeId


def job_of(node: NodeId, jobs: Mapping[JobId, JobRecord]) -> JobId | None:
    """Return the job that has the node; ``None``: no jobs share, or none of them has it."""
    live = [job for job in jobs.values() if job.state in LIVE]
    if all(job.part is None for job in live):
        return None
    named = (job.id for job in live if job.part is not None and node in job.part)
    rest = (job.id for job in live if job.part is None)
    return next(named, next(rest, None))


def takes_replicas(node: NodeId, job: JobId, jobs: Mapping[JobId, JobRecord]) -> bool:
    """Return whether a job may send replicas to the node: it has it, and keeps it."""
    leaves = any(node in each.coming for each in jobs.values() if each.state not in ENDED)
    return not leaves and not is_of_another(node, job, jobs)


def is_of_another(node: NodeId, job: JobId, jobs: Mapping[JobId, JobRecord]) -> bool:
    """Return whether the node belongs to another job than this one, which is live."""
    there, owner = jobs.get(job), job_of(node, jobs)
    return there is not None and there.state in LIVE and owner not in {None, job}
