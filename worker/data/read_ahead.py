"""Loads a rank's next samples in a thread, while the rank computes."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from worker.data.batch import DataSource, Samples
from worker.data.loader_processes import LoaderProcesses, Micro

AHEAD = 2
"""How many micro batches are loaded ahead."""
_CHECK_S = 0.1
"""How often a rank that waits for samples looks whether others were lost."""


class ReadAhead:
    """The micro batches of one rank, which asks for the same positions in every step.

    They are loaded one after the other, in the order of use. An exception of a data set is raised
    when its micro batch is asked for. If a rank asks for another micro batch than the expected one,
    as when it repeats a step, loading continues from there.
    """

    def __init__(
        self,
        source: DataSource,
        positions: Sequence[range],
        *,
        steps: int | None,
        check: Callable[[], None],
        processes: int = 0,
    ) -> None:
        """Load micro batches at these positions of steps below ``steps``, if that is known.

        With ``processes`` the thread does not load, but waits for them. ``check`` raises what ends
        the rank's wait, such as the loss of another rank.
        """
        self._queue = _BatchQueue(source, tuple(positions), steps)
        if processes:
            self._queue.source = LoaderProcesses(source, self._queue.after, processes)
        self._check = check
        self.waited_s = 0.0
        """How long the rank has waited for samples."""
        # The thread refers to the queue only, so it ends when this object is deleted. Do not wait
        # for it then: the caller may hold a lock that the thread waits for.
        weakref.finalize(self, self._queue.end).atexit = False

    def batch(self, step: int, positions: range) -> Samples:
        """Return a micro batch; waits until it is loaded."""
        assert positions in self._queue.positions, "a rank's micro batches are known beforehand"
        begun_s = time.perf_counter()
        found = self._queue.take((step, positions), self._check)
        self.waited_s += time.perf_counter() - begun_s
        return found

    def close(self) -> None:
        """Stop loading; wait for the micro batch that is being loaded."""
        self._queue.close()


@dataclass(eq=False)
class _BatchQueue:
    """The micro batches loaded ahead, and the thread that loads them."""

    source: DataSource
    positions: tuple[range, ...]
    steps: int | None
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _loaded: deque[tuple[Micro, Samples | BaseException]] = field(default_factory=deque)
    _next: Micro | None = None
    """The micro batch to load next, or being loaded; ``None``: none until one is asked for."""
    _turn: int = 0
    """Grows when another micro batch than the next is asked for."""
    _is_closed: bool = False
    _thread: threading.Thread | None = None

    def take(self, asked: Micro, check: Callable[[], None]) -> Samples:
        with self._changed:
            coming = self._loaded[0][0] if self._loaded else self._next
            if coming != asked:
                self._loaded.clear()
                self._next = asked
                self._turn += 1
                self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._load, name="data", daemon=True)
                self._thread.start()
                # The process would crash if the thread still computed while the interpreter exits.
                atexit.register(self.close)
            while not self._loaded:
                assert not self._is_closed, "nothing is asked for after the end"
                check()
                self._changed.wait(_CHECK_S)
            _, found = self._loaded.popleft()
            self._changed.notify_all()
        if isinstance(found, BaseException):
            raise found
        return found

    def end(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        atexit.unregister(self.close)

    def close(self) -> None:
        self.end()
        if self._thread is not None:
            self._thread.join()

    def _load(self) -> None:
        try:
            self._load_all()
        finally:
            if isinstance(self.source, LoaderProcesses):
                self.source.close()

    def _load_all(self) -> None:
        while True:
            with self._changed:
                while not self._is_closed and (self._next is None or len(self._loaded) >= AHEAD):
                    self._changed.wait()
                if self._is_closed or self._next is None:
                    return
                micro, turn = self._next, self._turn
            found: Samples | BaseException
            try:
                found = self.source.batch(*micro)
            except BaseException as error:
                # Raised in the rank, once it asks for this micro batch.
                found = error
            with self._changed:
                if turn == self._turn:
                    self._loaded.append((micro, found))
                    failed = isinstance(found, BaseException)
                    self._next = None if failed else self.after(micro)
                    self._changed.notify_all()

    def after(self, micro: Micro) -> Micro | None:
        """Return the micro batch after one, if there is one."""
        step, positions = micro
        number = self.positions.index(positions) + 1
        if number < len(self.positions):
            return step, self.positions[number]
        is_last = self.steps is not None and step + 1 >= self.steps
        return None if is_last else (step + 1, self.positions[0])
