"""Runs all ranks of a plan as threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from worker.distributed.in_process import ThreadTransport, ThreadWorld
from worker.distributed.interface import AbortedError

Result = TypeVar("Result")


def run_as_threads(
    size: int, body: Callable[[ThreadTransport], Result], *, deadline_s: float = 60.0
) -> list[Result]:
    """Run ``body`` in one thread per rank and return the results by rank.

    If one fails, the others are aborted and the first failure is raised.
    """
    world = ThreadWorld(size, deadline_s=deadline_s)
    results: dict[int, Result] = {}
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = body(world.transport(rank))
        except BaseException as failure:
            failures.append(failure)
            world.fail(AbortedError(f"{type(failure).__name__}: {failure}", rank=rank))

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [results[rank] for rank in range(size)]
