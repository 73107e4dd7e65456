"""Records and reports as JSON, and back: what comes from outside is checked against its type."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from typing import Any, TypeVar

from agents import protocol

T = TypeVar("T")

MEMBERS_MAX = 100_000
"""A list that is longer than this is not one of ours."""


class WireError(ValueError):
    """What arrived is not what it should be; the message says where and how."""


def encode(value: object) -> bytes:
    """Write a record in one line of JSON, the same bytes for the same record."""
    text = json.dumps(plain(value), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode()


def decode(kind: type[T], data: bytes | str) -> T:
    """Read a record of this kind; ``WireError`` says what is wrong with it."""
    try:
        raw = json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise WireError(f"{kind.__name__}: not JSON: {error}") from None
    return read(kind, raw)


def read(kind: type[T], raw: object) -> T:
    """Check plain values, as JSON gives them, against a record's fields."""
    value = _read(kind, raw, kind.__name__)
    assert isinstance(value, kind)
    return value


def plain(value: object) -> Any:
    """Return dictionaries, lists, numbers and texts in the place of records."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number")


def _read(kind: Any, raw: object, place: str) -> object:
    kind = getattr(kind, "__supertype__", kind)  # An identity is a text with a name of its own.
    origin = typing.get_origin(kind)
    if origin is types.UnionType or origin is typing.Union:
        return _read_union(kind, raw, place)
    if origin is typing.Literal:
        if raw not in typing.get_args(kind) or isinstance(raw, bool):
            known = ", ".join(map(str, typing.get_args(kind)))
            raise WireError(f"{place}: {_shown(raw)} is none of {known}")
        return raw
    if origin is tuple:
        return _read_tuple(kind, raw, place)
    if dataclasses.is_dataclass(kind):
        return _read_record(kind, raw, place)
    return _read_value(kind, raw, place)


def _read_union(kind: Any, raw: object, place: str) -> object:
    members = typing.get_args(kind)
    if raw is None and types.NoneType in members:
        return None
    kinds = [member for member in members if member is not types.NoneType]
    assert len(kinds) == 1, f"{place}: only a value or nothing can be told apart"
    return _read(kinds[0], raw, place)


def _read_tuple(kind: Any, raw: object, place: str) -> object:
    item, rest = typing.get_args(kind)
    assert rest is Ellipsis, f"{place}: tuples of records have any length"
    if not isinstance(raw, list):
        raise WireError(f"{place}: {_shown(raw)} is no list")
    if len(raw) > MEMBERS_MAX:
        raise WireError(f"{place}: {len(raw)} entries are too many")
    return tuple(_read(item, each, f"{place}[{i}]") for i, each in enumerate(raw))


def _read_record(kind: Any, raw: object, place: str) -> object:
    if not isinstance(raw, dict):
        raise WireError(f"{place}: {_shown(raw)} is no object")
    # Annotations are texts in the modules that define records; this gives the types themselves.
    hints = typing.get_type_hints(kind, vars(protocol))
    fields = {field.name: field for field in dataclasses.fields(kind)}
    unknown = sorted(set(raw) - set(fields))
    if unknown:
        raise WireError(f"{place}: has {', '.join(map(str, unknown))}, which nobody knows")
    values = {}
    for name, field in fields.items():
        if name in raw:
            values[name] = _read(hints[name], raw[name], f"{place}.{name}")
        elif field.default is dataclasses.MISSING:
            raise WireError(f"{place}: {name} is missing")
    return kind(**values)


def _read_value(kind: Any, raw: object, place: str) -> object:
    if kind is float and isinstance(raw, int | float) and not isinstance(raw, bool):
        if not math.isfinite(raw):
            raise WireError(f"{place}: {raw} is not finite")
        return float(raw)
    if kind in {int, str, bool} and type(raw) is kind:
        return raw
    raise WireError(f"{place}: {_shown(raw)} is no {kind.__name__}")


def _shown(raw: object) -> str:
    text = json.dumps(raw, default=str)
    return text if len(text) <= 40 else f"{text[:40]}..."
