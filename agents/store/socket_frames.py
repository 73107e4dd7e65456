"""The protocol of the embedded store's socket: frames of JSON.

A frame is a length of four bytes, big-endian, and one JSON object. A request has an ``id`` and what
to ``do``; an answer has the ``id``, and either a ``result`` or an ``error``.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Sequence
from typing import Any

from agents.store.interface import (
    Change,
    Changed,
    Compacted,
    Compare,
    CreatedAt,
    Delete,
    Entry,
    Lease,
    LeaseGone,
    LeaseIs,
    ModifiedAt,
    Operation,
    Outcome,
    Put,
    Snapshot,
    StoreError,
    StoreRefused,
    StoreUnavailable,
    ValueIs,
    WriteUnknown,
)

FRAME_BYTES_MAX = 256 << 20
"""Longer frames are refused; a snapshot of ten thousand nodes has some megabytes."""

Frame = dict[str, Any]
ERRORS: dict[str, type[StoreError]] = {
    kind.__name__: kind for kind in (LeaseGone, StoreRefused, StoreUnavailable, WriteUnknown)
}
COMPARES: dict[str, type[ModifiedAt] | type[CreatedAt] | type[LeaseIs]] = {
    "modified": ModifiedAt,
    "created": CreatedAt,
    "lease": LeaseIs,
}


class FrameError(ValueError):
    """The data is not a valid frame."""


async def read_frame(reader: asyncio.StreamReader) -> Frame | None:
    """Read the next frame; ``None``: the connection was closed."""
    try:
        length = int.from_bytes(await reader.readexactly(4), "big")
        if length > FRAME_BYTES_MAX:
            raise FrameError(f"a frame of {length} bytes is too long")
        frame = json.loads(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    except (ValueError, RecursionError) as error:
        raise FrameError(str(error)) from None
    if not isinstance(frame, dict):
        raise FrameError("the frame is not an object")
    return frame


def write_frame(writer: asyncio.StreamWriter, frame: Frame) -> None:
    """Write a frame; the caller drains."""
    data = json.dumps(frame, separators=(",", ":")).encode()
    writer.write(len(data).to_bytes(4, "big") + data)


def pack_transaction(compares: Sequence[Compare], orders: Sequence[Operation]) -> Frame:
    """Encode a transaction."""
    return {
        "compares": [_pack_compare(each) for each in compares],
        "orders": [_pack_order(each) for each in orders],
    }


def read_transaction(frame: Frame) -> tuple[list[Compare], list[Operation]]:
    """Decode a transaction; raises ``KeyError``, ``TypeError`` or ``ValueError`` if it is
    invalid."""
    compares = [_read_compare(*each) for each in frame["compares"]]
    return compares, [_read_order(*each) for each in frame["orders"]]


def pack_answer(answer: object) -> Any:
    """Encode the result of a call, or an item of a watch."""
    match answer:
        case None | bool() | int():
            return answer
        case Entry(key, value, created, modified, lease):
            return [key, _text(value), created, modified, lease]
        case Snapshot(revision, entries):
            return [revision, [pack_answer(each) for each in entries]]
        case Outcome(is_applied, revision):
            return [is_applied, revision]
        case Lease(id_, ttl_s):
            return [id_, ttl_s]
        case Changed(revision, changes):
            return [revision, [[each.key, pack_answer(each.entry)] for each in changes]]
        case Compacted(revision):
            return revision
        case _:
            raise AssertionError(answer)


def read_entry(packed: Any) -> Entry | None:
    """Decode an entry, or none."""
    if packed is None:
        return None
    key, value, created, modified, lease = packed
    return Entry(key, _bytes(value), created, modified, lease)


def read_snapshot(packed: Any) -> Snapshot:
    """Decode a snapshot."""
    revision, entries = packed
    found = [read_entry(each) for each in entries]
    return Snapshot(revision, tuple(each for each in found if each is not None))


def read_news(packed: Any) -> Changed | Compacted:
    """Decode an item of a watch."""
    if isinstance(packed, int):
        return Compacted(packed)
    revision, changes = packed
    return Changed(revision, tuple(Change(key, read_entry(entry)) for key, entry in changes))


def pack_error(error: StoreError) -> list[str]:
    """Encode an error."""
    return [type(error).__name__, str(error)]


def read_error(packed: Any) -> StoreError:
    """Decode an error."""
    name, text = packed
    return ERRORS[name](text)


def _pack_compare(compare: Compare) -> list[Any]:
    match compare:
        case ModifiedAt(key, revision):
            return ["modified", key, revision]
        case CreatedAt(key, revision):
            return ["created", key, revision]
        case LeaseIs(key, lease):
            return ["lease", key, lease]
        case ValueIs(key, value):
            return ["value", key, _text(value)]


def _read_compare(kind: str, key: str, what: Any) -> Compare:
    if kind == "value":
        return ValueIs(_checked(key, str), _bytes(what))
    return COMPARES[kind](_checked(key, str), _checked(what, int))


def _pack_order(order: Operation) -> list[Any]:
    match order:
        case Put(key, value, lease):
            return [key, _text(value), lease]
        case Delete(key):
            return [key]


def _read_order(key: str, value: str | None = None, lease: int = 0) -> Operation:
    if value is None:
        return Delete(_checked(key, str))
    return Put(_checked(key, str), _bytes(value), _checked(lease, int))


def _checked(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r} is not {kind.__name__}")
    return value


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
