"""How the embedded store and its users on one machine speak: JSON in frames over a Unix socket.

A frame is four bytes of length, most significant first, and one JSON object. Requests carry an
``id`` and what to ``do``; answers carry the ``id``, and either a ``result`` or an ``error``.
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
"""Longer is not one of ours; a snapshot of ten thousand nodes is some megabytes."""

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
    """What came is no frame of ours."""


async def read_frame(reader: asyncio.StreamReader) -> Frame | None:
    """Wait for the next frame; ``None``: the other side has gone."""
    try:
        length = int.from_bytes(await reader.readexactly(4), "big")
        if length > FRAME_BYTES_MAX:
            raise FrameError(f"a frame of {length} bytes")
        frame = json.loads(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    except (ValueError, RecursionError) as error:
        raise FrameError(str(error)) from None
    if not isinstance(frame, dict):
        raise FrameError("a frame that is no object")
    return frame


def write_frame(writer: asyncio.StreamWriter, frame: Frame) -> None:
    """Hand a frame over in one piece; ``drain`` is the caller's."""
    data = json.dumps(frame, separators=(",", ":")).encode()
    writer.write(len(data).to_bytes(4, "big") + data)


def pack_transaction(compares: Sequence[Compare], orders: Sequence[Operation]) -> Frame:
    """Say what a transaction compares and changes."""
    return {
        "compares": [_pack_compare(each) for each in compares],
        "orders": [_pack_order(each) for each in orders],
    }


def read_transaction(frame: Frame) -> tuple[list[Compare], list[Operation]]:
    """Undo ``pack_transaction``; ``KeyError``, ``TypeError`` or ``ValueError`` if it is none."""
    compares = [_read_compare(*each) for each in frame["compares"]]
    return compares, [_read_order(*each) for each in frame["orders"]]


def pack_answer(answer: object) -> Any:
    """Say what a call returned, or what a watch yielded."""
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
    """Undo ``pack_answer`` of an entry, or of none."""
    if packed is None:
        return None
    key, value, created, modified, lease = packed
    return Entry(key, _bytes(value), created, modified, lease)


def read_snapshot(packed: Any) -> Snapshot:
    """Undo ``pack_answer`` of a snapshot."""
    revision, entries = packed
    found = [read_entry(each) for each in entries]
    return Snapshot(revision, tuple(each for each in found if each is not None))


def read_news(packed: Any) -> Changed | Compacted:
    """Undo ``pack_answer`` of what a watch yielded."""
    if isinstance(packed, int):
        return Compacted(packed)
    revision, changes = packed
    return Changed(revision, tuple(Change(key, read_entry(entry)) for key, entry in changes))


def pack_error(error: StoreError) -> list[str]:
    """Say which error it was, and its text."""
    return [type(error).__name__, str(error)]


def read_error(packed: Any) -> StoreError:
    """Undo ``pack_error``."""
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
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
