"""Deletes records of ended jobs from the store, the oldest first, beyond ``ended_jobs_kept``."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import structlog

from agents.protocol.records import ENDED, JobId
from agents.store.interface import StoreError
from sailord.cluster_records import Gateway
from sailord.controller.cluster_state import ClusterState
from sailord.controller.inbox import Inbox
from sailord.core.model.events import JobsForgotten
from sailord.core.model.state import State

log = structlog.get_logger("sailord")

LOOK_S = 60.0
AT_ONCE = 20
"""Jobs deleted at a time, so that the store can serve other requests in between."""


def surplus(state: State) -> tuple[JobId, ...]:
    """Return the ended jobs beyond ``ended_jobs_kept``, in the order of their deletion."""
    ended = [job for job in state.jobs.values() if job.state in ENDED]
    ended.sort(key=lambda job: (job.submitted_at, job.id))
    return tuple(job.id for job in ended[: max(0, len(ended) - state.options.ended_jobs_kept)])


@dataclass(eq=False)
class EndedJobs:
    """Limits the number of ended jobs while we lead."""

    gateway: Gateway
    cluster: ClusterState
    inbox: Inbox
    settle_s: float = 1.0
    """Gets the event that tells the controller which records were deleted."""

    async def run(self) -> None:
        """Delete surplus records periodically, forever."""
        while True:
            try:
                is_more = await self.forget_some()
            except StoreError:
                is_more = False  # The next round tries again.
            await asyncio.sleep(0 if is_more else LOOK_S)

    async def forget_some(self) -> bool:
        """Delete the records of some jobs; return whether there are more."""
        state, term = self.cluster.state, self.cluster.state.term
        found = surplus(state)
        if term is None or not found:
            return False
        gone = tuple([job for job in found[:AT_ONCE] if await self.gateway.forget_job(job, term)])
        if gone:
            log.info("deleted records of ended jobs", jobs=len(gone), oldest=gone[0])
            self.inbox.put(JobsForgotten(state.now, gone))
            await asyncio.sleep(self.settle_s)
        return len(found) > AT_ONCE and bool(gone)
