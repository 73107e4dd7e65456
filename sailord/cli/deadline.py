"""A job's deadline, read against the clock."""

from __future__ import annotations

from datetime import UTC, datetime

from simulator.documents.problems import InputError, Problem
from simulator.spec.job import Job


def seconds_left(job: Job, now: datetime | None = None) -> float | None:
    """Until the job's deadline, where it has one; no more than 0 if it has passed."""
    if job.objective.deadline is None:
        return None
    if job.steps is None:
        raise InputError(
            Problem(
                "objective.deadline",
                "says nothing while nobody knows how many iterations the job has",
                "set training.steps, or leave the deadline out",
            )
        )
    left = datetime.fromisoformat(job.objective.deadline) - (now or datetime.now(UTC))
    return left.total_seconds()
