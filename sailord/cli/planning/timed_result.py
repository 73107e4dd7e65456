"""Runs a search in a process of its own, and measures its time and peak memory."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Generic, TypeVar

from sailord.cli.shared.child_process import killed_text

_Result = TypeVar("_Result")


class SearchKilled(Exception):  # noqa: N818 - an outcome of the search, not a failure of ours
    """A signal ended the process of a search."""


@dataclass(frozen=True, slots=True)
class TimedResult(Generic[_Result]):
    """A result, and what it took."""

    result: _Result
    seconds: float
    peak_bytes: int | None
    """Memory beyond what the process had before; ``None`` where the system does not say."""


def measured(search: Callable[[], _Result]) -> TimedResult[_Result]:
    """Run a search in a fork of this process, so that none uses what another one left behind.

    Raises ``SearchKilled`` if a signal ended it.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(search, theirs))
    process.start()
    theirs.close()
    try:
        found = ours.recv()
    except EOFError:
        process.join()
        if process.exitcode is not None and process.exitcode < 0:
            raise SearchKilled(f"its process {killed_text(process.exitcode)}") from None
        raise RuntimeError(f"a search ended with status {process.exitcode}") from None
    finally:
        ours.close()
        process.join()
    assert isinstance(found, TimedResult)
    return found


def _run(search: Callable[[], _Result], answer: Connection) -> None:
    before = _reset_peak()
    started = time.perf_counter()
    result = search()
    seconds = time.perf_counter() - started
    peak = _status_bytes("VmHWM")
    grown = None if before is None or peak is None else max(0, peak - before)
    answer.send(TimedResult(result, seconds, grown))


def _reset_peak() -> int | None:
    """Let the kernel count the peak from here; returns the memory in use."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return None
    return _status_bytes("VmRSS")


def _status_bytes(name: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    kib = next((line.split()[1] for line in lines if line.startswith(name + ":")), None)
    return None if kib is None else int(kib) * 1024
