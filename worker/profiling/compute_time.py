"""When a rank computes in its steps, and for how long, without waits for other nodes.

Forward and backward passes and the optimizer step count. Messages between stages, gradient sums,
the vote and snapshot copies do not. Waits within a TP group inside a pass do count: the group is in
one machine, and predictions include them.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, Self

import torch

SLOW = "SAILOR_SLOW"
"""Environment variable with a file that slows nodes down, for tests: one ``NODE TIMES`` per line,
by name or id. It is read before every step."""
STEPS_KEPT = 8
"""The reported time is the median of the last 8 steps, since one step may be delayed by chance."""

TimeMark = float | torch.cuda.Event
ComputeKind = Literal["F", "B", "update"]
"""A forward or a backward pass, or the optimizer step."""


class TimedPiece(NamedTuple):
    """One piece of a step's work."""

    kind: ComputeKind
    micro_batch: int
    begun: TimeMark
    ended: TimeMark


@dataclass(slots=True)
class TimedStep:
    """What one rank computed in a step."""

    number: int
    begun: TimeMark
    voted: TimeMark | None = None
    """When it read the result of the vote, which all ranks get at once."""
    pieces: list[TimedPiece] = field(default_factory=list)
    sums: list[tuple[TimeMark, TimeMark]] = field(default_factory=list)
    """When gradient sums were requested, and when it was seen that they had ended: on a GPU once
    their result is needed."""

    def is_done(self) -> bool:
        """Return whether the device has finished it."""
        marks = [self.voted, *(piece.ended for piece in self.pieces), *(s[1] for s in self.sums)]
        return all(mark.query() for mark in marks if isinstance(mark, torch.cuda.Event))  # type: ignore[no-untyped-call]  # torch does not type it

    def compute_s(self) -> float:
        """Return how long it computed."""
        return sum(seconds_between(piece.begun, piece.ended) for piece in self.pieces)


class ComputeTimer:
    """Measures one rank's compute time; each piece of work is done in a context of it.

    On a GPU it records events without synchronising, and reads them when the next step ends.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        times_slower: Callable[[], float] | None = None,
        keep: Callable[[TimedStep], None] | None = None,
    ) -> None:
        """``keep`` is called with each step that has ended."""
        self._is_cuda = torch.device(device).type == "cuda"
        self.times_slower = times_slower
        self._keep = keep
        self._slowdown = 1.0
        self._begun: TimeMark = 0.0
        self._least_s: dict[int, float] = {}
        """The least time on a core of each piece of a step, by its number."""
        self._used = (0.0, 0.0)
        """This thread's seconds on a core, and those that it waited for one, when work began."""
        self._kind: ComputeKind = "F"
        self._micro_batch = 0
        self._step = TimedStep(0, 0.0)
        self._previous: TimedStep | None = None
        self._steps: deque[float] = deque(maxlen=STEPS_KEPT)

    @property
    def runs_ahead(self) -> bool:
        """Return whether the host is ahead of the device, so that it cannot tell what has ended."""
        return self._is_cuda

    def piece(self, kind: ComputeKind, micro_batch: int = 0) -> Self:
        """Return the context of the next piece of work."""
        self._kind, self._micro_batch = kind, micro_batch
        return self

    def __enter__(self) -> None:
        if self._slowdown > 1 and not self._is_cuda:
            self._used = core_seconds()
        self._begun = self.now()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            return
        if self._slowdown > 1:
            self._slow_down()
        piece = TimedPiece(self._kind, self._micro_batch, self._begun, self.now())
        self._step.pieces.append(piece)

    def begin_step(self, number: int = 0) -> None:
        """Discard what was measured of an unfinished step."""
        self._step = TimedStep(number, self.now())
        if self.times_slower is not None:
            self._slowdown = self.times_slower()

    def now(self) -> TimeMark:
        """Return a mark of this moment on the device."""
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch does not type it
        event.record()
        return event

    def end_sum(self, begun: TimeMark) -> None:
        """Note that a gradient sum has ended; it is no compute time."""
        self._step.sums.append((begun, self.now()))

    def end_vote(self) -> None:
        """Note that this rank has read the result of the vote."""
        self._step.voted = self.now()

    def end_step(self) -> None:
        """Add up what was measured since the step began."""
        ended, self._previous = (self._previous if self._is_cuda else self._step), self._step
        # The device has finished a step before the vote of the next one is read.
        if ended is not None and ended.pieces and ended.is_done():
            self._steps.append(ended.compute_s())
            if self._keep is not None:
                self._keep(ended)

    @property
    def typical_s(self) -> float | None:
        """Return the median of the last steps; ``None``: too few yet (the first are slow)."""
        enough = len(self._steps) > STEPS_KEPT // 2
        return statistics.median(self._steps) if enough else None

    def _slow_down(self) -> None:
        """Sleep until the work has taken as long as the test wants.

        On a CPU this is a multiple of the least time on a core that this piece of a step has taken
        so far. Waits for a core, and slowdowns by other processes that share the caches, would not
        occur on a node of its own: both are taken off the sleep. Waits for peers stay.
        """
        if isinstance(self._begun, torch.cuda.Event):
            end = self.now()
            assert isinstance(end, torch.cuda.Event)
            # The whole device would also wait for receives that were requested ahead.
            end.synchronize()
            time.sleep((self._slowdown - 1) * seconds_between(self._begun, end))
            return
        used, waited = (
            after - before for after, before in zip(core_seconds(), self._used, strict=True)
        )
        piece = len(self._step.pieces)
        self._least_s[piece] = least_s = min(used, self._least_s.get(piece, used))
        time.sleep(max(self._slowdown * least_s - used - waited, 0.0))


def seconds_between(begin: TimeMark, end: TimeMark) -> float:
    """Return the time from one mark to another; the device has passed both."""
    if isinstance(begin, torch.cuda.Event):
        assert isinstance(end, torch.cuda.Event)
        return float(begin.elapsed_time(end)) / 1e3
    assert isinstance(end, float)
    return end - begin


def core_seconds() -> tuple[float, float]:
    """Return this thread's seconds on a core, and those that it was ready to run and waited."""
    try:
        with open("/proc/thread-self/schedstat", encoding="ascii") as file:
            # The first figure there lags behind by up to a tick.
            _, waiting, _ = file.read().split()
    except (OSError, ValueError):  # A kernel without these figures.
        return time.thread_time(), 0.0
    return time.thread_time(), int(waiting) / 1e9


def slowed_by_file(node: str) -> Callable[[], float] | None:
    """Return a function for the slowdown of a node; ``None`` outside of such tests."""
    named = os.environ.get(SLOW)
    if named is None:
        return None
    path = Path(named)

    def times_slower() -> float:
        try:
            lines = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
        except OSError:
            return 1.0
        mine = (node, node.partition(".")[0])
        return max((float(times) for name, times in lines if name in mine), default=1.0)

    return times_slower
