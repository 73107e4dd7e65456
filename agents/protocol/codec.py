"""Encodes records as JSON, and decodes them with a check of every field against its type.

A reader passes over fields that it does not know: a newer version wrote them (ADR 70).
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import json
import math
import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from agents.protocol import records, versions

T = TypeVar("T")

MEMBERS_MAX = 100_000
"""The longest list that is accepted."""


class WireError(ValueError):
    """The data is not a valid record; the message says where and why."""


def encode(value: object, keeping: Mapping[str, Any] | None = None) -> bytes:
    """Return a record as one line of JSON; equal records give equal bytes.

    ``keeping``: fields that a newer version wrote (``unknown_fields``), and that stay.
    """
    raw = plain(value)
    if keeping:
        _keep(raw, keeping)
    return json.dumps(raw, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def decode(kind: type[T], data: bytes | str) -> T:
    """Decode a record; raises ``WireError`` if the data is invalid."""
    try:
        raw = json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise WireError(f"{kind.__name__}: not JSON: {error}") from None
    return read(kind, raw)


def unknown_fields(kind: type, data: bytes) -> dict[str, Any]:
    """Return the fields of a readable record, and of records in it, that its type lacks.

    Not those of records in lists: where a list is written anew, they are lost.
    """
    return _find_unknown(kind, json.loads(data))


def _find_unknown(kind: type, raw: Mapping[str, Any]) -> dict[str, Any]:
    names, inner = _field_names(kind) or (), _inner_records(kind)
    found = {name: each for name, each in raw.items() if name not in names}
    for name, inner_kind in inner.items():
        if isinstance(raw.get(name), dict) and (deeper := _find_unknown(inner_kind, raw[name])):
            found[name] = deeper
    return found


def _keep(raw: dict[str, Any], keeping: Mapping[str, Any]) -> None:
    for name, each in keeping.items():
        if name not in raw:
            raw[name] = each
        elif isinstance(raw[name], dict) and isinstance(each, dict):
            _keep(raw[name], each)


def read(kind: type[T], raw: object) -> T:
    """Build a record from the values of a JSON document; raises ``WireError`` if invalid."""
    any_kind: Any = kind
    needs = raw.get(versions.NEEDS) if isinstance(raw, dict) else None
    if isinstance(needs, int) and needs > versions.SPEAKS:
        raise WireError(
            f"{kind.__name__}: its reader must speak protocol {needs}, and this version speaks "
            f"{versions.SPEAKS}: upgrade this machine first"
        )
    try:
        value = _reader(any_kind)(raw)
    except _Wrong as wrong:
        raise WireError(f"{kind.__name__}{wrong.place}: {wrong.what}") from None
    assert isinstance(value, kind)
    return value


def plain(value: object) -> Any:
    """Replace records by dictionaries, tuples by lists, and bytes by base64."""
    kind: Any = type(value)
    names = _field_names(kind)
    if names is not None:
        return {name: plain(getattr(value, name)) for name in names}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value


@functools.cache
def _field_names(kind: type) -> tuple[str, ...] | None:
    """Return the fields of a record type; ``None``: it is no record type."""
    is_record = dataclasses.is_dataclass(kind)
    return tuple(field.name for field in dataclasses.fields(kind)) if is_record else None


@functools.cache
def _type_hints(kind: type) -> dict[str, Any]:
    # Annotations are strings in the modules of records; this resolves them.
    return typing.get_type_hints(kind, vars(records) | vars(sys.modules[kind.__module__]))


@functools.cache
def _inner_records(kind: type) -> dict[str, type]:
    """Return the fields that hold one record, also if it may be missing."""
    hints = {name: _type_hints(kind)[name] for name in _field_names(kind) or ()}
    inner = {name: [hint, *typing.get_args(hint)] for name, hint in hints.items()}
    is_tuple = {name for name, hint in hints.items() if typing.get_origin(hint) is tuple}
    return {
        name: each
        for name, kinds in inner.items()
        if name not in is_tuple
        for each in kinds
        if dataclasses.is_dataclass(each) and isinstance(each, type)
    }


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number")


# ---- one reader per type, made once -----------------------------------------------------------


class _Wrong(Exception):  # noqa: N818 - never leaves this module
    """Invalid data; its place is put together as this propagates, so valid data costs nothing."""

    def __init__(self, what: str, place: str = "") -> None:
        super().__init__(what)
        self.what, self.place = what, place


@functools.cache
def _reader(kind: Any) -> Callable[[object], object]:
    kind = getattr(kind, "__supertype__", kind)  # A NewType is read as its base type.
    origin = typing.get_origin(kind)
    if origin is types.UnionType or origin is typing.Union:
        return _union_reader(kind)
    if origin is typing.Literal:
        return _literal_reader(kind)
    if origin is tuple:
        return _tuple_reader(kind)
    if dataclasses.is_dataclass(kind):
        return _record_reader(kind)
    if kind is bytes:
        return _read_bytes
    return _read_float if kind is float else _value_reader(kind)


def _union_reader(kind: Any) -> Callable[[object], object]:
    members = typing.get_args(kind)
    kinds = [member for member in members if member is not types.NoneType]
    assert len(kinds) == 1 < len(members), f"{kind}: unions other than X | None are not supported"
    reader = _reader(kinds[0])
    return lambda raw: None if raw is None else reader(raw)


def _literal_reader(kind: Any) -> Callable[[object], object]:
    known = typing.get_args(kind)

    def read_literal(raw: object) -> object:
        if raw not in known or isinstance(raw, bool):
            raise _Wrong(f"{_shorten(raw)} is not one of {', '.join(map(str, known))}")
        return raw

    return read_literal


def _tuple_reader(kind: Any) -> Callable[[object], object]:
    items = typing.get_args(kind)
    readers = [_reader(item) for item in items if item is not Ellipsis]
    is_any_length = items[-1] is Ellipsis

    def of_each(raw: list[object]) -> list[Callable[[object], object]]:
        return readers * len(raw) if is_any_length else readers

    def read_tuple(raw: object) -> object:
        if not isinstance(raw, list):
            raise _Wrong(f"{_shorten(raw)} is not a list")
        if len(raw) > MEMBERS_MAX:
            raise _Wrong(f"the list has {len(raw)} entries, more than {MEMBERS_MAX}")
        if not is_any_length and len(raw) != len(readers):
            raise _Wrong(f"{len(raw)} entries, not {len(readers)}")
        values: list[object] = []
        try:
            for reader, each in zip(of_each(raw), raw, strict=True):
                values.append(reader(each))
        except _Wrong as wrong:
            raise _Wrong(wrong.what, f"[{len(values)}]{wrong.place}") from None
        return tuple(values)

    return read_tuple


def _record_reader(kind: Any) -> Callable[[object], object]:
    hints = _type_hints(kind)
    readers = {field.name: _reader(hints[field.name]) for field in dataclasses.fields(kind)}
    required = [f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING]

    def read_record(raw: object) -> object:
        if not isinstance(raw, dict):
            raise _Wrong(f"{_shorten(raw)} is not an object")
        values: dict[str, object] = {}
        for name, each in raw.items():
            reader = readers.get(name)
            if reader is None:
                continue
            try:
                values[name] = reader(each)
            except _Wrong as wrong:
                raise _Wrong(wrong.what, f".{name}{wrong.place}") from None
        for name in required:
            if name not in values:
                raise _Wrong(f"{name} is missing")
        return kind(**values)

    return read_record


def _read_float(raw: object) -> object:
    if not isinstance(raw, int | float) or isinstance(raw, bool):
        raise _Wrong(f"{_shorten(raw)} is not a number")
    try:
        number = float(raw)
    except OverflowError:  # JSON's integers have any length.
        raise _Wrong(f"{_shorten(raw)} is too large") from None
    if not math.isfinite(number):
        raise _Wrong(f"{raw} is not finite")
    return number


def _read_bytes(raw: object) -> object:
    try:
        return base64.b64decode(raw, validate=True)  # type: ignore[arg-type]  # raises TypeError
    except (TypeError, ValueError):
        raise _Wrong(f"{_shorten(raw)} is not base64") from None


_WORDS = {int: "an integer", str: "a string", bool: "true or false"}


def _value_reader(kind: Any) -> Callable[[object], object]:
    assert kind in _WORDS, f"fields of type {kind} are not supported"

    def read_value(raw: object) -> object:
        if type(raw) is not kind:
            raise _Wrong(f"{_shorten(raw)} is not {_WORDS[kind]}")
        return raw

    return read_value


def _shorten(raw: object) -> str:
    text = json.dumps(raw, default=str)
    return text if len(text) <= 40 else f"{text[:40]}..."
