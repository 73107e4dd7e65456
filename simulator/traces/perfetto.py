"""Events of the Trace Event Format, for ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def process_named(process: int, name: str) -> Iterator[dict[str, Any]]:
    """Name a process, and sort processes by their numbers."""
    yield _metadata("process_name", process, 0, name=name)
    yield _metadata("process_sort_index", process, 0, sort_index=process)


def thread_named(process: int, thread: int, name: str) -> Iterator[dict[str, Any]]:
    """Name a row of a process. Its number must not be 0 or a process's number."""
    yield _metadata("thread_name", process, thread, name=name)
    yield _metadata("thread_sort_index", process, thread, sort_index=thread)


def _metadata(kind: str, process: int, thread: int, **args: str | int) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": args}


def complete_event(
    name: str, process: int, thread: int, start_s: float, end_s: float, args: dict[str, Any]
) -> dict[str, Any]:
    """Return an event with a start and an end."""
    # Both ends are rounded to nanoseconds, so that neighbours touch without overlap.
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
    """Write a layer range with its last layer included: ``0-12``."""
    first, last = layers[0], layers[1] - 1
    return str(first) if first == last else f"{first}-{last}"
