"""JSON schemas made from types, so that the document cannot say anything else than the code."""

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
    """The schema of a type; those of the dataclasses in it are added to ``found`` by name."""
    kind = getattr(kind, "__supertype__", kind)  # An identity is a text with a name of its own.
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
        found[name] = {}  # So that a record may hold others of its kind.
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
