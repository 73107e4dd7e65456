"""Derives JSON schemas from the answer types, so that document and code cannot disagree."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any

_PLAIN: dict[type, dict[str, Any]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    dict: {"type": "object"},
}


def schema_of(kind: Any, found: dict[str, Any]) -> dict[str, Any]:
    """Return a type's schema; schemas of dataclasses in it are added to ``found`` by name."""
    kind = getattr(kind, "__supertype__", kind)  # A NewType is described as its base type.
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return {}
    if kind is types.NoneType:
        return {"type": "null"}
    if origin in (types.UnionType, typing.Union):
        return {"anyOf": [schema_of(each, found) for each in inner]}
    if origin is typing.Literal:
        return {"enum": list(inner)}
    if origin is tuple:
        return _schema_of_tuple(inner, found)
    if origin is Mapping:
        return {"type": "object", "additionalProperties": schema_of(inner[1], found)}
    if dataclasses.is_dataclass(kind):
        assert isinstance(kind, type)
        return _schema_of_record(kind, found)
    return dict(_PLAIN[kind])


def _schema_of_tuple(inner: tuple[Any, ...], found: dict[str, Any]) -> dict[str, Any]:
    if inner[-1] is Ellipsis:
        return {"type": "array", "items": schema_of(inner[0], found)}
    count = len(inner)
    items = [schema_of(each, found) for each in inner]
    return {"type": "array", "prefixItems": items, "minItems": count, "maxItems": count}


def _schema_of_record(kind: type, found: dict[str, Any]) -> dict[str, Any]:
    name = kind.__name__
    if name not in found:
        found[name] = {}  # Entered first, so that a recursive type terminates.
        hints = typing.get_type_hints(kind)
        names = [field.name for field in dataclasses.fields(kind)]
        assert kind.__doc__ is not None
        found[name] = {
            "type": "object",
            "description": " ".join(kind.__doc__.partition("\n\n")[0].split()),
            "properties": {each: schema_of(hints[each], found) for each in names},
            "required": names,
            "additionalProperties": False,
        }
    return {"$ref": f"#/components/schemas/{name}"}
