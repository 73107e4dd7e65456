"""Fetches the state that a rank holds, while it meets its peers and builds its trainer."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from types import TracebackType

from simulator.spec.job import Job
from worker.checkpoint.compatibility import model_of
from worker.checkpoint.fetch import FetchedPieces, fetch
from worker.checkpoint.placement import pieces_needed
from worker.control.assignment import Assignment
from worker.layout.rank_layout import Holdings

_POLL_S = 0.05
END_S = 5.0
"""How long the reads that are under way may take once the fetch was given up."""


class GivenUpError(Exception):
    """The state is not awaited any more."""


class StateFetch:
    """A fetch in a thread of its own, which goes on until its block ends.

    ``check_cancelled`` raises once the generation is over. Neither that nor an error of the block
    waits for storage that is slow or hangs: the fetch ends after the reads that are under way.
    """

    def __init__(
        self,
        about: Assignment,
        job: Job,
        holdings: Holdings,
        check_cancelled: Callable[[], None],
    ) -> None:
        self._about, self._job, self._holdings = about, job, holdings
        self._check_cancelled = check_cancelled
        self._given_up = threading.Event()
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="restore")

    def __enter__(self) -> StateFetch:
        self._found = self._pool.submit(self._fetch)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._given_up.set()
        self._pool.shutdown(wait=False)

    def wait(self) -> FetchedPieces | None:
        """Return the state; ``None``: training begins anew."""
        while not self._found.done():
            self._check_cancelled()
            concurrent.futures.wait([self._found], timeout=_POLL_S)
        return self._found.result()

    def has_ended(self) -> bool:
        """Return whether its thread has ended or does so soon; its memory is free then."""
        return bool(concurrent.futures.wait([self._found], timeout=END_S).done)

    def _fetch(self) -> FetchedPieces | None:
        groups = self._about.sources()
        if not groups:
            return None
        keys, model = pieces_needed(self._holdings, self._about.rank), model_of(self._job)
        return fetch(keys, groups, model=model, check_cancelled=self._check)

    def _check(self) -> None:
        self._check_cancelled()
        if self._given_up.is_set():
            raise GivenUpError
