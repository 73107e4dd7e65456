"""The API's own description, made from the table of routes that it serves."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sailord.api.routes import Route

_TEXT = {"type": "string"}
_NAME = {"type": "string", "pattern": "^[A-Za-z0-9]([A-Za-z0-9._-]{0,126}[A-Za-z0-9])?$"}
_MOMENT = {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 4e9}


def _object(required: tuple[str, ...] = (), *, is_open: bool = False, **properties: Any) -> Any:
    described: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        described["required"] = list(required)
    if not is_open:
        described["additionalProperties"] = False
    return described


SCHEMAS: dict[str, Any] = {
    "Any": {},
    "Problems": _object(
        ("problems",),
        problems={
            "type": "array",
            "items": _object(("place", "what", "cure"), place=_TEXT, what=_TEXT, cure=_TEXT),
        },
    ),
    "Submission": _object(
        ("job",),
        job={"type": "string", "description": "A job file, as text (docs/formats.md)."},
        id=_NAME,
        priority={"type": "integer", "minimum": -1_000_000, "maximum": 1_000_000},
    ),
    "Job": _object(
        ("id", "state"),
        is_open=True,
        id=_TEXT,
        state={
            "enum": ["queued", "running", "paused", "held", "done", "failed", "cancelled"],
        },
    ),
    "Order": _object(id=_NAME, reason=_TEXT, leaves_at=_MOMENT),
    "Taken": _object(("id", "is_new"), id=_TEXT, is_new={"type": "boolean"}),
    "Report": _object(is_open=True),
    "Preemption": _object(is_open=True),
    "Capacity": _object(is_open=True),
    "Accepted": _object(("accepted", "new"), accepted={"type": "integer"}, new={"type": "integer"}),
}
_CHOICES = re.compile(r"\{(\w+):([a-z|]+)\}")


def document(routes: Iterable[Route]) -> dict[str, Any]:
    """The whole OpenAPI document."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        choices = dict(_CHOICES.findall(route.path))
        path = _CHOICES.sub(r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, path, choices)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Sailor", "version": version("sailor")},
        "paths": paths,
        "components": {
            "schemas": SCHEMAS,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}],
    }


def _operation(route: Route, path: str, choices: dict[str, str]) -> dict[str, Any]:
    assert route.handler.__doc__, f"{route.name} does not say what it does"
    parameters = []
    for name in re.findall(r"\{(\w+)\}", path):
        schema: dict[str, Any] = (
            {"type": "string", "enum": choices[name].split("|")} if name in choices else _NAME
        )
        parameters.append({"name": name, "in": "path", "required": True, "schema": schema})
    for name, schema in _QUERIES.get(route.name, {}).items():
        parameters.append({"name": name, "in": "query", "required": False, "schema": schema})
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.handler.__doc__.splitlines()[0],
        "parameters": parameters,
        "responses": {
            str(route.success): {"description": "Done.", "content": _content(route.answer)},
            "default": {"description": "Refused.", "content": _content("Problems")},
        },
    }
    if route.body is not None:
        is_needed = bool(SCHEMAS[route.body].get("required"))
        operation["requestBody"] = {"required": is_needed, "content": _content(route.body)}
    return operation


_QUERIES: dict[str, dict[str, Any]] = {
    "events": {
        "after": {"type": "string", "pattern": "^[0-9]{1,18}$"},
        "follow": {"type": "string", "enum": ["true", "false"]},
    },
    "logs": {"rank": {"type": "string", "pattern": "^[0-9]{0,5}$"}},
}


def _content(schema: str) -> dict[str, Any]:
    if "/" in schema:
        return {schema: {"schema": {"type": "string"}}}
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
