"""What tests need of real processes: commands, waiting, proxies, what a cluster leaves behind."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import sailord.client
from agents.daemon.process_cleanup import cluster_pids
from sailord.client import ServerProblem
from sailord.local.paths import LocalFolders

SAILORCTL = (sys.executable, "-m", "sailord.cli.main")
sailord.client.TIMEOUT_S = 60.0
"""A machine that is busy otherwise may need longer for an answer than a person waits."""


def wait_until(holds: Callable[[], Any], *, within_s: float = 60.0) -> Any:
    """The first true answer; the last words of an error if there is none in time."""
    end, last = time.monotonic() + within_s, "it never held"
    while time.monotonic() < end:
        try:
            if value := holds():
                return value
        except (OSError, http.client.HTTPException, AssertionError, ServerProblem) as error:
            last = repr(error)
        time.sleep(0.03)
    raise TimeoutError(last)


def wait_for(
    what: str,
    holds: Callable[[], object],
    *,
    within_s: float,
    told: Callable[[], object],
    meanwhile: Callable[[], object] = lambda: None,
    every_s: float = 0.1,
) -> None:
    """Return once it holds; else fail with what is wrong and what is told of it."""
    end = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end, f"{what}: {told()}"
        meanwhile()
        time.sleep(every_s)


async def until(holds: Callable[[], Any], *, within_s: float = 60.0) -> Any:
    """Poll until the answer, or what it awaits, is true, and return it."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        value = holds()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return value
        await asyncio.sleep(0.02)
    raise TimeoutError("it never held")


def left_behind(place: LocalFolders) -> list[str]:
    """Return what remains of a cluster: processes, files, mounts."""
    return [
        *(f"process {pid}" for pid in cluster_pids(place.folder)),
        *(str(path) for path in (place.folder, place.memory) if path.exists()),
    ]


def carry(one: socket.socket, other: socket.socket) -> None:
    """Pass on what comes in at one end of a proxy, until either end is closed."""
    with contextlib.suppress(OSError):
        while data := one.recv(1 << 16):
            other.sendall(data)
    with contextlib.suppress(OSError):
        other.shutdown(socket.SHUT_RDWR)
