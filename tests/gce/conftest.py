"""Runs random scripts in parallel processes."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest

Play = Callable[[int], object]


@pytest.fixture(scope="session")
def play_all() -> Iterator[Callable[[Play, Iterable[int]], None]]:
    """Play the scripts of some seeds on all cores; the first that fails is raised."""
    # A fork would copy the threads that other tests have begun, in whatever state they are.
    context = multiprocessing.get_context("spawn")
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    cores = max(1, len(os.sched_getaffinity(0)) // processes)
    with ProcessPoolExecutor(cores, mp_context=context) as players:

        def play(script: Play, seeds: Iterable[int]) -> None:
            for _ in players.map(script, seeds, chunksize=2):
                pass

        yield play
