"""Every address of the API in one table, from which the application and its document are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from aiohttp import web

from agents.protocol.records import ReportReply
from sailord.api import (
    capacity,
    capacity_webhook,
    checkpoints,
    preemption_webhook,
    types,
)
from sailord.api import (
    jobs_and_nodes as handlers,
)
from sailord.api.app import Handler, answer
from sailord.api.openapi import EVENTS, document


@dataclass(frozen=True, slots=True)
class Route:
    """One address and what it is for."""

    method: str
    path: str
    name: str
    handler: Handler
    answers: tuple[type | str, ...]
    """What comes back: a shape, as JSON, or a media type of text."""
    body: str | None = None
    """The schema of what is sent."""
    success: int = 200
    refuses: tuple[int, ...] = ()
    """With which statuses, beside those that follow from the rest."""
    others: Mapping[int, type] = field(default_factory=dict)
    """Statuses other than ``success`` that may come with a shape of their own."""


async def _openapi(request: web.Request) -> web.Response:
    """This document."""
    del request
    return answer(document(ROUTES))


_TEXT = "text/plain"
ROUTES: tuple[Route, ...] = (
    Route("GET", "/livez", "livez", handlers.livez, (types.Live,)),
    Route("GET", "/readyz", "readyz", handlers.readyz, (types.Ready,), refuses=(503,)),
    Route("GET", "/metrics", "metrics", handlers.metrics, (_TEXT,)),
    Route("GET", "/openapi.json", "openapi", _openapi, (dict,)),
    Route("GET", "/v1/status", "status", handlers.status, (types.Status,)),
    Route("GET", "/v1/jobs", "jobs", handlers.list_jobs, (types.Jobs,)),
    Route("POST", "/v1/jobs", "submit", handlers.submit_job, (types.Submitted,), "Submission", 201,
          (409, 503)),
    Route("GET", "/v1/jobs/{job}", "job", handlers.show_job, (types.JobView,)),
    Route("GET", "/v1/jobs/{job}/plan", "plan", handlers.show_plan, (types.PlanView,),
          refuses=(503,)),
    Route("GET", "/v1/jobs/{job}/history", "history", handlers.show_history, (types.History,),
          refuses=(503,)),
    Route("GET", "/v1/jobs/{job}/why", "why", handlers.show_why, (types.Why,), refuses=(503,)),
    Route("POST", "/v1/jobs/{job}/{order:cancel|pause|resume|replan|checkpoint}", "order_job",
          handlers.order_job, (types.Taken,), "Order", 202, (409, 503)),
    Route("GET", "/v1/jobs/{job}/moves", "moves", checkpoints.list_moves, (checkpoints.Moves,),
          refuses=(503,)),
    Route("GET", "/v1/jobs/{job}/checkpoints", "checkpoints", checkpoints.list_checkpoints,
          (checkpoints.CheckpointsView,), refuses=(502,)),
    Route("POST", "/v1/jobs/{job}/checkpoints/{step}/{order:pin|unpin}", "pin",
          checkpoints.pin_checkpoint, (checkpoints.Pinned,), refuses=(409, 502)),
    Route("POST", "/v1/jobs/{job}/checkpoints/{step}/rollback", "rollback",
          checkpoints.roll_back, (types.Taken,), "Rollback", 202, (409, 502, 503)),
    Route("GET", "/v1/nodes", "nodes", handlers.list_nodes, (types.Nodes,)),
    Route("GET", "/v1/nodes/{node}/logs", "logs", handlers.logs, (_TEXT,), refuses=(502,)),
    Route("POST", "/v1/nodes/{node}/{order:drain|cordon|uncordon|preempt|withdraw}", "order_node",
          handlers.order_node, (types.Taken,), "Order", 202, (409, 503)),
    Route("GET", "/v1/capacity", "capacity", capacity.show_capacity, (capacity.CapacityView,)),
    Route("GET", "/v1/events", "events", handlers.events, (EVENTS, types.Events)),
    Route("POST", "/v1/agents/report", "report", handlers.report, (ReportReply,), "Report",
          refuses=(401,), others={409: ReportReply}),
    Route("POST", "/v1/webhooks/preemption", "webhook_preemption", preemption_webhook.preemption,
          (types.Accepted,), "Preemption", 202, (401, 409, 503)),
    Route("POST", "/v1/webhooks/capacity", "webhook_capacity", capacity_webhook.capacity,
          (types.Accepted,), "Capacity", 202, (401, 409, 503)),
)  # fmt: skip
