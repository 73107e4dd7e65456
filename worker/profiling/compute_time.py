"""How long a rank computes in a step: its own work, without what it waits for from other nodes.

The passes and the optimizer's update count; messages between stages, sums of gradients, the vote
and the copying of snapshots do not. What the ranks of one tensor-parallel group wait for each
other inside a pass does: they stand in one machine, and predictions hold it too.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import torch

SLOW = "SAILOR_SLOW"
"""Environment variable that names a file which makes nodes slow (for tests): ``NODE TIMES`` in
each line, by name or by id. It is read anew before every step."""
STEPS_KEPT = 8
"""One step may be held up by chance; of the last ones the median is told."""

Mark = float | torch.cuda.Event


class ComputeTimer:
    """One rank's account; wrap each piece of work in it.

    On an accelerator moments of the device are noted, without waiting for it, and read when the
    next step ends.
    """

    def __init__(
        self, device: torch.device | str = "cpu", *, times_slower: Callable[[], float] | None = None
    ) -> None:
        self._is_cuda = torch.device(device).type == "cuda"
        self.times_slower = times_slower
        self._times = 1.0
        self._begun: Mark = 0.0
        self._marks: list[tuple[Mark, Mark]] = []
        self._before: list[tuple[Mark, Mark]] = []
        self._steps: deque[float] = deque(maxlen=STEPS_KEPT)

    def __enter__(self) -> None:
        self._begun = self._now()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            return
        if self._times > 1:
            self._linger()
        self._marks.append((self._begun, self._now()))

    def begin_step(self) -> None:
        """Forget what was noted of a step that did not come to its end."""
        self._marks.clear()
        if self.times_slower is not None:
            self._times = self.times_slower()

    def end_step(self) -> None:
        """Count what was noted since the step began."""
        ended, self._before = (self._before if self._is_cuda else self._marks), self._marks
        self._marks = []
        # The device is done with all of a step before the vote of the next one is read.
        if ended and all(_is_over(end) for _, end in ended):
            self._steps.append(sum(_seconds(begin, end) for begin, end in ended))

    @property
    def typical_s(self) -> float | None:
        """Of a step, lately; ``None``: too few were done, and the first is slow everywhere."""
        enough = len(self._steps) > STEPS_KEPT // 2
        return statistics.median(self._steps) if enough else None

    def _now(self) -> Mark:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch does not type it
        event.record()
        return event

    def _linger(self) -> None:
        """Be as slow as a test wants it."""
        if isinstance(self._begun, torch.cuda.Event):
            torch.cuda.synchronize()
            end = self._now()
            torch.cuda.synchronize()
        else:
            end = self._now()
        time.sleep((self._times - 1) * _seconds(self._begun, end))


def _is_over(end: Mark) -> bool:
    return isinstance(end, float) or bool(end.query())  # type: ignore[no-untyped-call]  # torch does not type it


def _seconds(begin: Mark, end: Mark) -> float:
    if isinstance(begin, torch.cuda.Event):
        assert isinstance(end, torch.cuda.Event)
        return float(begin.elapsed_time(end)) / 1e3
    assert isinstance(end, float)
    return end - begin


def slowed_by_file(node: str) -> Callable[[], float] | None:
    """How many times slower a node is to be; ``None`` outside of such tests."""
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
