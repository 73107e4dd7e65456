"""The protocol of the embedded store's socket: frames of JSON.

A frame is a length of four bytes, big-endian, and one JSON object. A request has an ``id`` and what
to ``do``; an answer has the ``id``, and either a ``result`` or an ``error``. Entries, compares and
operations are encoded like all records (``agents.protocol.codec``).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any, get_args

from agents.protocol.codec import plain, read
from agents.store.interface import (
    Compare,
    LeaseGone,
    Operation,
    StoreError,
    StoreRefused,
    StoreUnavailable,
    WriteRejected,
    WriteUnknown,
)

FRAME_BYTES_MAX = 256 << 20
"""Longer frames are refused; a snapshot of ten thousand nodes has some megabytes."""

Frame = dict[str, Any]
ERRORS = {
    kind.__name__: kind
    for kind in (LeaseGone, StoreRefused, StoreUnavailable, WriteRejected, WriteUnknown)
}
COMPARES: dict[str, type[Compare]] = {kind.__name__: kind for kind in get_args(Compare)}
OPERATIONS: dict[str, type[Operation]] = {kind.__name__: kind for kind in get_args(Operation)}


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

    def packed(parts: Sequence[Compare | Operation]) -> list[Any]:
        return [[type(part).__name__, plain(part)] for part in parts]

    return {"compares": packed(compares), "orders": packed(orders)}


def read_transaction(frame: Frame) -> tuple[list[Compare], list[Operation]]:
    """Decode a transaction; ``KeyError``, ``TypeError`` or ``ValueError`` if invalid."""
    compares = [read(COMPARES[kind], raw) for kind, raw in frame["compares"]]
    return compares, [read(OPERATIONS[kind], raw) for kind, raw in frame["orders"]]


def pack_error(error: StoreError) -> list[str]:
    """Encode an error."""
    return [type(error).__name__, str(error)]


def read_error(packed: Any) -> StoreError:
    """Decode an error."""
    name, text = packed
    return ERRORS.get(name, StoreRefused)(text)  # Another name is of a newer version.
