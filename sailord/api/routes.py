"""The table of all addresses, from which the application and its OpenAPI document are made."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from aiohttp import web

from agents.protocol.codec import plain
from agents.protocol.records import ReportReply
from sailord.api.answers import node_types, types
from sailord.api.answers.goodput_types import GoodputView
from sailord.api.answers.timeline import TimelineView
from sailord.api.handlers import (
    agent_reports,
    capacity,
    capacity_webhook,
    certificates,
    checkpoints,
    events,
    goodput,
    jobs,
    live,
    network,
    nodes,
    packages,
    page,
    preemption_webhook,
    status,
)
from sailord.api.handlers.timeline import show_timeline
from sailord.api.openapi import BYTES, EVENTS, document
from sailord.api.route import Route
from sailord.page.files import TYPES


async def _openapi(request: web.Request) -> web.Response:
    """Return this document."""
    del request
    return web.Response(text=_document(), content_type="application/json")


@cache
def _document() -> str:
    return json.dumps(plain(document(ROUTES)), allow_nan=False)


def _get(path: str, name: str, handler: Any, *answers: type | str, **columns: Any) -> Route:
    return Route(method="GET", path=path, name=name, handler=handler, answers=answers, **columns)


def _post(path: str, name: str, handler: Any, *answers: type, **columns: Any) -> Route:
    columns.setdefault("role", "operator")
    return Route(method="POST", path=path, name=name, handler=handler, answers=answers, **columns)


_TEXT = "text/plain"
_JOB = "/v1/jobs/{job}"
_PACKAGE = "/v1/packages/{package}"
_CHECKPOINT = f"{_JOB}/checkpoints/{{step}}"
_JOB_ORDER = f"{_JOB}/{{order:cancel|pause|resume|replan|checkpoint}}"
_NODE_ORDER = "/v1/nodes/{node}/{order:drain|cordon|uncordon|preempt|withdraw}"
ROUTES: tuple[Route, ...] = (
    _get("/", "page", page.page, "text/html", auth="none", served_by="any"),
    _get("/page/{file}", "page_file", page.page_file, *TYPES.values(), auth="none",
         served_by="any"),
    _get("/livez", "livez", status.livez, types.Live, auth="none", served_by="any"),
    _get("/readyz", "readyz", status.readyz, types.Ready, auth="none", served_by="any",
         refuses=(503,)),
    _get("/metrics", "metrics", status.metrics, _TEXT, served_by="any"),
    _get("/openapi.json", "openapi", _openapi, dict, auth="none", served_by="any"),
    _get("/v1/status", "status", status.status, types.Status, served_by="leader_if_elected",
         refuses=(404,)),
    _get("/v1/jobs", "jobs", jobs.list_jobs, types.Jobs),
    _post("/v1/jobs", "submit", jobs.submit_job, types.Submitted, served_by="leader_if_elected",
          body="Submission", success=201, refuses=(409, 502, 503)),
    _get(_JOB, "job", jobs.show_job, types.JobView),
    _get(f"{_JOB}/plan", "plan", jobs.show_plan, types.PlanView, refuses=(503,)),
    _get(f"{_JOB}/timeline", "timeline", show_timeline, TimelineView, refuses=(503,)),
    _get(f"{_JOB}/history", "history", jobs.show_history, types.History, refuses=(503,)),
    _get(f"{_JOB}/why", "why", jobs.show_why, types.Why, refuses=(503,)),
    _post(_JOB_ORDER, "order_job", jobs.order_job, types.Taken, body="Order", success=202,
          refuses=(409, 503)),
    _post(f"{_JOB}/budget", "budget", jobs.set_budget, types.Taken, body="Budget", success=202,
          refuses=(409, 503)),
    _post(f"{_JOB}/priority", "priority", jobs.set_priority, types.Taken, body="Priority",
          success=202, refuses=(409, 503)),
    _get(f"{_JOB}/moves", "moves", checkpoints.list_moves, checkpoints.Moves, refuses=(503,)),
    _get(f"{_JOB}/checkpoints", "checkpoints", checkpoints.list_checkpoints,
         checkpoints.CheckpointsView, refuses=(502,)),
    _post(f"{_CHECKPOINT}/{{order:pin|unpin}}", "pin", checkpoints.pin_checkpoint,
          checkpoints.Pinned, refuses=(409, 502)),
    _post(f"{_CHECKPOINT}/rollback", "rollback", checkpoints.roll_back, types.Taken,
          body="Rollback", success=202, refuses=(409, 502, 503)),
    _get("/v1/nodes", "nodes", nodes.list_nodes, node_types.NodeList),
    _get("/v1/scrape-targets", "scrape_targets", nodes.list_scrape_targets,
         tuple[types.ScrapeTarget, ...]),
    _get("/v1/nodes/{node}", "node", nodes.show_node, node_types.NodeList),
    _get("/v1/nodes/{node}/logs", "logs", nodes.logs, _TEXT, refuses=(502,)),
    _post(_NODE_ORDER, "order_node", nodes.order_node, types.Taken, body="Order", success=202,
          refuses=(409, 503)),
    _get(_PACKAGE, "package", packages.show_package, packages.PackageView, refuses=(502,)),
    Route(method="PUT", path=f"{_PACKAGE}/{{part}}", name="put_part", handler=packages.put_part,
          role="operator",
          answers=(packages.PackageView,), body="Part", success=201, refuses=(409, 502)),
    _get(f"{_PACKAGE}/{{part}}", "read_part", packages.read_part, BYTES, auth="signature",
         served_by="any", refuses=(401, 403, 408, 502)),
    _get("/v1/capacity", "capacity", capacity.show_capacity, capacity.CapacityView),
    _post("/v1/capacity/retry", "retry_capacity", capacity.retry_capacity, capacity.CapacityView,
          success=202),
    _get("/v1/goodput", "goodput", goodput.show_goodput, GoodputView),
    _get("/v1/network", "network", network.show_network, network.NetworkView),
    _post("/v1/network", "measure_network", network.measure_network, network.NetworkView,
          success=202),
    _get("/v1/network/file", "network_file", network.show_network_file, dict),
    _get("/v1/live", "live", live.live, EVENTS, served_by="leader_if_elected"),
    _get("/v1/events", "events", events.events, EVENTS, types.Events),
    _post("/v1/agents/report", "report", agent_reports.report, ReportReply, auth="signature",
          served_by="any", body="Report", refuses=(401, 403), others={409: ReportReply}),
    _get("/v1/certificates", "revoked", certificates.certificates, certificates.CertificateView,
         auth="signature", served_by="any", refuses=(401, 404, 408, 422)),
    _post("/v1/certificates", "enrol", certificates.certificates, certificates.CertificateView,
          auth="signature", served_by="any", body="CertificateRequest", refuses=(401, 404)),
    _post("/v1/webhooks/preemption", "webhook_preemption", preemption_webhook.preemption,
          types.Accepted, auth="signature", served_by="any", body="Preemption", success=202,
          refuses=(401, 409, 503)),
    _post("/v1/webhooks/capacity", "webhook_capacity", capacity_webhook.capacity, types.Accepted,
          auth="signature", body="Capacity", success=202, refuses=(401, 409, 503)),
)  # fmt: skip
_BY_NAME = {route.name: route for route in ROUTES}


def route_of(request: web.Request) -> Route | None:
    """The route of a request; ``None``: the address is unknown."""
    return _BY_NAME.get(request.match_info.route.name or "")
