"""Reads plans for the handlers: a plan, and the planner's explanation of it."""

from __future__ import annotations

import asyncio
from typing import Any

from agents.protocol.records import JobId
from agents.store.interface import StoreError
from sailord.api.answers import render
from sailord.api.handlers.context import ApiContext
from sailord.core.model.state import State

PLANS_SEEN_MAX = 8
"""Plans that are kept: of jobs that share the cluster, each has one."""
PLAN_WITHIN_S = 1.0
"""How long a status request waits for the store's plan."""


async def read_plan(
    api: ApiContext, job: JobId, sha: str
) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Return a plan and the planner's explanation of it, cached since a plan never changes.

    Raises what the store raises.
    """
    known = api.cluster.plans.get((job, sha))
    if known is not None:
        return render.read_plan(known.plan), known.about
    if (job, sha) not in api.plans_seen:
        text = await api.gateway.read_plan(job, sha)
        about = await api.gateway.read_about(job, sha)
        if text is None:
            return None, about
        last = list(api.plans_seen.items())[1 - PLANS_SEEN_MAX :]
        api.plans_seen = {**dict(last), (job, sha): (render.read_plan(text), about)}
    return api.plans_seen[job, sha]


async def plan_of(api: ApiContext, state: State) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """The plan of the active job; empty while there is none, or the store does not answer."""
    active = state.active
    if active is None or active.generation is None:
        return None, {}
    try:
        async with asyncio.timeout(PLAN_WITHIN_S):
            return await read_plan(api, active.job, active.generation.plan)
    except (TimeoutError, StoreError):
        return None, {}  # The rest of the status does not depend on the store.
