"""Makes the OpenAPI document from the table of routes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from agents.protocol.names import JOB_ID_PATTERN
from sailord.api.answers.json_schema import schema_of
from sailord.api.answers.responses import BODY_BYTES_MAX
from sailord.api.answers.types import RequestProblems
from sailord.api.route import Route
from worker.version import own_version

JSON = "application/json"
BYTES = "application/octet-stream"
EVENTS = "text/event-stream"
_TEXT = {"type": "string", "pattern": r"^[^\u0000]*$"}
_NAME = {"type": "string", "pattern": rf"^{JOB_ID_PATTERN}\Z"}
_PRIORITY = {"type": "integer", "minimum": -1_000_000, "maximum": 1_000_000}
_MOMENT = {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 4e9}


def _object(required: tuple[str, ...] = (), *, is_open: bool = False, **properties: Any) -> Any:
    described: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        described["required"] = list(required)
    if not is_open:
        described["additionalProperties"] = False
    return described


_STREAM = _object(
    is_open=True,
    id=_TEXT,
    event=_TEXT,
    data={"type": "string", "contentMediaType": JSON, "description": "A FeedEvent."},
)
"""One event of a stream."""

BODIES: dict[str, Any] = {
    "Submission": _object(
        ("job",),
        job={
            "type": "string",
            "minLength": 1,
            "description": "A job file, as text (docs/formats.md); 422 if invalid.",
        },
        id=_NAME,
        resume={"type": "string", "description": "A durable step, or newest."},
        priority=_PRIORITY,
        weight={"type": "number", "minimum": 0.001, "maximum": 1000},
    ),
    "Order": _object(
        id=_NAME,
        reason=_TEXT,
        leaves_at=_MOMENT,
        notice_s={"type": "number", "minimum": 0, "maximum": 86_400},
    ),
    "Budget": _object(
        ("max_usd_total",),
        id=_NAME,
        reason=_TEXT,
        max_usd_total={"type": "number", "exclusiveMinimum": 0},
    ),
    "Priority": _object(("priority",), id=_NAME, reason=_TEXT, priority=_PRIORITY),
    "Rollback": _object(id=_NAME, reason=_TEXT),
    "Report": _object(is_open=True),
    "CertificateRequest": {"type": "string", "description": "A request in PEM."},
    "Preemption": _object(is_open=True),
    "Capacity": _object(is_open=True),
    "Part": {"type": "string", "format": "binary"},
}
"""Schemas of request bodies; docs/api.md describes the signed ones."""

REFUSALS = {
    401: "The sender is not authenticated.",
    403: "The caller's role does not include this.",
    404: "It does not exist.",
    408: "The body did not arrive in time.",
    409: "It exists already, or the order would have no effect.",
    413: f"The body is larger than {BODY_BYTES_MAX} bytes.",
    422: "The request is invalid.",
    429: "Too many requests.",
    500: "An internal error; see sailord's log.",
    502: "The node's agent or the checkpoint storage did not answer.",
    503: "The store is unavailable, or no leader is elected yet.",
}
_CHOICES = re.compile(r"\{(\w+):([a-z|]+)\}")
_QUERIES: dict[str, dict[str, Any]] = {
    "events": {
        "after": {"type": "string", "pattern": r"^[0-9]{1,18}\Z"},
        "follow": {"type": "string", "enum": ["true", "false"]},
    },
    "live": {"job": {"type": "string", "description": "The job to show; else the first one."}},
    "status": {
        "job": {
            "type": "string",
            "description": "`job` is about this one, where several share the cluster.",
        },
    },
    "timeline": {"predicted": {"type": "string", "enum": ["true", "false"]}},
    "logs": {
        "rank": {"type": "string", "pattern": r"^[0-9]{0,5}\Z"},
        "setup": {"type": "string", "enum": ["true", "false"]},
        "ended": {"type": "string", "enum": ["true", "false"]},
        "after": {
            "type": "string",
            "pattern": r"^[A-Za-z0-9.:,_-]{0,4000}\Z",
            "description": "Sailor-Log-Mark of an answer: only what was written since.",
        },
    },
}


def document(routes: Iterable[Route]) -> dict[str, Any]:
    """Return the whole OpenAPI document."""
    paths: dict[str, dict[str, Any]] = {}
    schemas = dict(BODIES)
    for route in routes:
        choices = dict(_CHOICES.findall(route.path))
        path = _CHOICES.sub(r"{\1}", route.path)
        operation = _operation(route, path, choices, schemas)
        paths.setdefault(path, {})[route.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Sailor",
            "version": own_version(),
            "description": "The API of sailord, over its Unix socket or over TCP.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(
    route: Route, path: str, choices: dict[str, str], schemas: dict[str, Any]
) -> dict[str, Any]:
    assert route.handler.__doc__, f"{route.name} has no docstring"
    parameters = []
    for name in re.findall(r"\{(\w+)\}", path):
        schema: dict[str, Any] = (
            {"type": "string", "enum": choices[name].split("|")}
            if name in choices
            else {"type": "string", "minLength": 1}
        )
        parameters.append({"name": name, "in": "path", "required": True, "schema": schema})
    for name, schema in _QUERIES.get(route.name, {}).items():
        parameters.append({"name": name, "in": "query", "required": False, "schema": schema})
    content: dict[str, Any] = {}
    for each in route.answers:
        if isinstance(each, str):
            content[each] = {"schema": _STREAM if each == EVENTS else {"type": "string"}}
        else:
            content[JSON] = {"schema": schema_of(each, schemas)}
    refused = {JSON: {"schema": schema_of(RequestProblems, schemas)}}
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.handler.__doc__.splitlines()[0],
        "parameters": parameters,
        "responses": {
            str(route.success): {"description": "Done.", "content": content},
            **{
                str(status): {"description": REFUSALS[status], "content": refused}
                for status in sorted(refusals_of(route))
            },
        },
        "security": [{"token": []}] if route.auth == "token" else [],
    }
    for status, each in route.others.items():
        operation["responses"][str(status)]["content"] = {
            JSON: {
                "schema": {"anyOf": [schema_of(each, schemas), schema_of(RequestProblems, schemas)]}
            }
        }
    if route.body is not None:
        may_miss = route.body in ("Order", "Rollback")
        is_needed = bool(BODIES[route.body].get("required")) or not may_miss
        body = {"$ref": f"#/components/schemas/{route.body}"}
        kind = BYTES if route.body == "Part" else JSON
        operation["requestBody"] = {"required": is_needed, "content": {kind: {"schema": body}}}
    return operation


def refusals_of(route: Route) -> set[int]:
    """Return the statuses with which a route may refuse a request."""
    found = {429, 500, *route.refuses, *route.others}
    if route.auth == "token":
        found |= {401, 403}
    if route.served_by != "any":
        found.add(503)
    if "{" in route.path:
        found.add(404)
    if route.body is not None:
        found |= {408, 413, 422}
    if route.name in _QUERIES:
        found.add(422)
    return found
