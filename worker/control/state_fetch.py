"""Fetches the state that a rank holds, while it meets its peers and builds its trainer.

Until there is a trainer to copy it to, the state is in host memory: what other nodes send takes
memory of its own, and fetching pauses when there is too much of it.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from types import TracebackType

from simulator.spec.job import Job
from worker.checkpoint.compatibility import model_of
from worker.checkpoint.fetch import FetchReport, fetch
from worker.checkpoint.piece_queue import PieceQueue
from worker.checkpoint.piece_sources import PieceBytes
from worker.checkpoint.placement import PieceKey, pieces_needed
from worker.control.assignment import Assignment
from worker.layout.rank_layout import Holdings

_POLL_S = 0.05
HELD_BYTES_MAX = 4 << 30
"""The most bytes of pieces from elsewhere that a rank holds, unless one piece has more."""
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
        self._arrived = PieceQueue(HELD_BYTES_MAX)
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="restore")

    def __enter__(self) -> StateFetch:
        self._found = self._pool.submit(self._fetch)
        self._found.add_done_callback(lambda _: self._arrived.close())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._given_up.set()
        self._pool.shutdown(wait=False)

    def fill(self, copy: Callable[[PieceKey, PieceBytes], None]) -> FetchReport | None:
        """Hand each piece to ``copy`` as it arrives; ``None``: training begins anew."""
        while True:
            has_ended = self._found.done()
            for key, body in self._arrived.drain():
                self._check_cancelled()
                copy(key, body)
                del body  # Its memory is counted as free from now on.
            if has_ended:
                return self._found.result()
            self._check_cancelled()
            self._arrived.wait_for_piece(_POLL_S)

    def has_ended(self) -> bool:
        """Return whether its thread has ended or does so soon; its memory is free then."""
        return bool(concurrent.futures.wait([self._found], timeout=END_S).done)

    def _fetch(self) -> FetchReport | None:
        groups = self._about.sources()
        if not groups:
            return None
        wanted = pieces_needed(self._holdings, self._about.rank, zero=self._job.zero)
        return fetch(
            wanted,
            groups,
            model=model_of(self._job),
            into=self._arrived,
            check_cancelled=self._check,
        )

    def _check(self) -> None:
        self._check_cancelled()
        if self._given_up.is_set():
            raise GivenUpError
