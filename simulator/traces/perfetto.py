"""Traces in the Trace Event Format, which ui.perfetto.dev and chrome://tracing open."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def process_named(process: int, name: str) -> Iterator[dict[str, Any]]:
    """Name a process, and let processes stand in the order of their numbers."""
    yield _metadata("process_name", process, 0, name=name)
    yield _metadata("process_sort_index", process, 0, sort_index=process)


def thread_named(process: int, thread: int, name: str) -> Iterator[dict[str, Any]]:
    """Name a row of a process; no row is 0 or equal to a process, which traces keep for others."""
    yield _metadata("thread_name", process, thread, name=name)
    yield _metadata("thread_sort_index", process, thread, sort_index=thread)


def _metadata(kind: str, process: int, thread: int, **args: str | int) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": args}


def complete_event(
    name: str, process: int, thread: int, start_s: float, end_s: float, args: dict[str, Any]
) -> dict[str, Any]:
    """Draw something that lasts from one moment to another."""
    # Whole nanoseconds for both ends, so that neighbours touch and never overlap by rounding.
    start_ns, end_ns = round(start_s * 1e9), round(end_s * 1e9)
    return {
        "name": name,
        "ph": "X",
        "pid": process,
        "tid": thread,
        "ts": start_ns / 1000,
        "dur": (end_ns - start_ns) / 1000,
        "args": args,
    }


def span_text(layers: tuple[int, int]) -> str:
    """Layers as people count them, the last one included: ``0-12``."""
    first, last = layers[0], layers[1] - 1
    return str(first) if first == last else f"{first}-{last}"
