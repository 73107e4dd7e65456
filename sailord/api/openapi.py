"""The API's own description, made from the table of routes that it serves."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from agents.protocol.names import JOB_ID_PATTERN
from sailord.api.app import BODY_BYTES_MAX, OWN_LOCK
from sailord.api.leader_proxy import OWN_VIEW
from sailord.api.request_schemas import schema_of
from sailord.api.types import Problems

if TYPE_CHECKING:
    from sailord.api.routes import Route

JSON = "application/json"
EVENTS = "text/event-stream"
_TEXT = {"type": "string", "pattern": r"^[^\u0000]*$"}
_NAME = {"type": "string", "pattern": rf"^{JOB_ID_PATTERN}\Z"}
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
    data={"type": "string", "contentMediaType": JSON, "description": "A Happening."},
)
"""One event of a stream."""

BODIES: dict[str, Any] = {
    "Submission": _object(
        ("job",),
        job={
            "type": "string",
            "minLength": 1,
            "description": "A job file, as text (docs/formats.md); one that cannot be used is 422.",
        },
        id=_NAME,
        resume={"type": "string", "description": "A step that is durable, or newest."},
        priority={"type": "integer", "minimum": -1_000_000, "maximum": 1_000_000},
    ),
    "Order": _object(id=_NAME, reason=_TEXT, leaves_at=_MOMENT),
    "Rollback": _object(id=_NAME, reason=_TEXT),
    "Report": _object(is_open=True),
    "Preemption": _object(is_open=True),
    "Capacity": _object(is_open=True),
}
"""What is sent. The last three are signed, and their forms stand in docs/api.md."""

REFUSALS = {
    401: "Who sends this did not show who it is.",
    404: "There is no such thing.",
    408: "The body did not come in time.",
    409: "There is one of that name already, or it would change nothing as things stand.",
    413: f"The body is larger than {BODY_BYTES_MAX} bytes.",
    422: "What was sent cannot be used.",
    429: "Too often, or too many at once.",
    500: "A fault of sailord, of which its log says more.",
    502: "The node's agent did not answer.",
    503: "The store is away, or nobody leads yet.",
}
_CHOICES = re.compile(r"\{(\w+):([a-z|]+)\}")
_QUERIES: dict[str, dict[str, Any]] = {
    "events": {
        "after": {"type": "string", "pattern": r"^[0-9]{1,18}\Z"},
        "follow": {"type": "string", "enum": ["true", "false"]},
    },
    "logs": {
        "rank": {"type": "string", "pattern": r"^[0-9]{0,5}\Z"},
        "after": {
            "type": "string",
            "pattern": r"^[A-Za-z0-9.:,_-]{0,4000}\Z",
            "description": "The Sailor-Log-Mark of an answer: what was written since.",
        },
    },
}


def document(routes: Iterable[Route]) -> dict[str, Any]:
    """The whole OpenAPI document."""
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
            "version": version("sailor"),
            "description": "What sailord answers, over its Unix socket or over TCP.",
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
    assert route.handler.__doc__, f"{route.name} does not say what it does"
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
    refused = {JSON: {"schema": schema_of(Problems, schemas)}}
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
        "security": [] if route.name in OWN_LOCK else [{"token": []}],
    }
    for status, each in route.others.items():
        operation["responses"][str(status)]["content"] = {
            JSON: {"schema": {"anyOf": [schema_of(each, schemas), schema_of(Problems, schemas)]}}
        }
    if route.body is not None:
        may_miss = route.body in ("Order", "Rollback")
        is_needed = bool(BODIES[route.body].get("required")) or not may_miss
        body = {"$ref": f"#/components/schemas/{route.body}"}
        operation["requestBody"] = {"required": is_needed, "content": {JSON: {"schema": body}}}
    return operation


def refusals_of(route: Route) -> set[int]:
    """The statuses with which an address may refuse."""
    found = {429, 500, *route.refuses, *route.others}
    if route.name not in OWN_LOCK:
        found.add(401)
    if route.name not in OWN_VIEW:
        found.add(503)
    if "{" in route.path:
        found.add(404)
    if route.body is not None:
        found |= {408, 413, 422}
    if route.name in _QUERIES:
        found.add(422)
    return found
