"""Every address of the API in one table, from which the application and its document are made."""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp import web

from sailord.api import handlers, webhooks
from sailord.api.app import Handler, answer
from sailord.api.openapi import document


@dataclass(frozen=True, slots=True)
class Route:
    """One address and what it is for."""

    method: str
    path: str
    name: str
    handler: Handler
    body: str | None = None
    """The schema of what is sent."""
    success: int = 200
    answer: str = "Any"
    """The schema of what comes back, or a media type."""


async def _openapi(request: web.Request) -> web.Response:
    """This document."""
    del request
    return answer(document(ROUTES))


ROUTES: tuple[Route, ...] = (
    Route("GET", "/livez", "livez", handlers.livez),
    Route("GET", "/readyz", "readyz", handlers.readyz),
    Route("GET", "/metrics", "metrics", handlers.metrics, answer="text/plain"),
    Route("GET", "/openapi.json", "openapi", _openapi),
    Route("GET", "/v1/status", "status", handlers.status),
    Route("GET", "/v1/jobs", "jobs", handlers.list_jobs),
    Route("POST", "/v1/jobs", "submit", handlers.submit_job, "Submission", 201, "Job"),
    Route("GET", "/v1/jobs/{job}", "job", handlers.show_job, answer="Job"),
    Route("GET", "/v1/jobs/{job}/plan", "plan", handlers.show_plan),
    Route("GET", "/v1/jobs/{job}/history", "history", handlers.show_history),
    Route("GET", "/v1/jobs/{job}/why", "why", handlers.show_why),
    Route("POST", "/v1/jobs/{job}/{order:cancel|pause|resume|replan}", "order_job",
          handlers.order_job, "Order", 202, "Taken"),
    Route("GET", "/v1/nodes", "nodes", handlers.list_nodes),
    Route("GET", "/v1/nodes/{node}/logs", "logs", handlers.logs, answer="text/plain"),
    Route("POST", "/v1/nodes/{node}/{order:drain|cordon|uncordon|preempt|withdraw}", "order_node",
          handlers.order_node, "Order", 202, "Taken"),
    Route("GET", "/v1/events", "events", handlers.events, answer="text/event-stream"),
    Route("POST", "/v1/agents/report", "report", handlers.report, "Report"),
    Route("POST", "/v1/webhooks/preemption", "webhook_preemption", webhooks.preemption,
          "Preemption", 202, "Accepted"),
    Route("POST", "/v1/webhooks/capacity", "webhook_capacity", webhooks.capacity,
          "Capacity", 202, "Accepted"),
)  # fmt: skip
