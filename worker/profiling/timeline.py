"""Records what each rank does, for traces, error messages and fault injection.

A trainer wraps each of its actions: ``with recorder.span("forward", micro_batch=3): ...``. Work
that continues in the background, such as gradient sums, uses ``begin`` and ``end``.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, assert_never

from simulator.traces.perfetto import complete_event, process_named, span_text, thread_named
from worker.layout.rank_layout import RankPlace
from worker.profiling.activity_board import ActivityBoard
from worker.profiling.fault_injection import FailFile, FailPoint, Milestone
from worker.types import Activity

# As in the simulator's traces: process 1 is the whole run; no row is 0 or equals a process.
_STEPS_PROCESS = 1
_ROWS = 10_000


@dataclass(slots=True)
class Span:
    """One action of a rank, with its start and end."""

    activity: Activity
    step: int
    start_ns: int
    end_ns: int = 0
    layer: int | None = None
    micro_batch: int | None = None
    in_background: bool = False


@dataclass(slots=True)
class Recorder:
    """Records what one rank does; nearly free if spans are not kept."""

    rank: int = 0
    board: ActivityBoard | None = None
    keeps_spans: bool = False
    fail_at: FailPoint | FailFile | None = None
    generation: int = 0
    finish_device_work: Callable[[], None] | None = None
    """Waits for the GPU, whose work ends later than the call that starts it."""
    step: int = 0
    spans: list[Span] = field(default_factory=list)
    _activity: Activity = "start"

    @property
    def activity_text(self) -> str:
        """Return what this rank does now, for peers that wait for it."""
        return f"in {self._activity} of step {self.step}"

    def at_step(self, step: int) -> None:
        """Set the step that the following actions belong to."""
        self.step = step

    def span(
        self, phase: Activity, *, layer: int | None = None, micro_batch: int | None = None
    ) -> _SpanContext:
        """Wrap an action of this thread; spans may be nested."""
        return _SpanContext(self, phase, layer, micro_batch)

    def begin(
        self, activity: Activity, *, layer: int | None = None, micro_batch: int | None = None
    ) -> Span:
        """Record the start of work that continues in the background."""
        self.set_activity(self.set_activity(activity))
        span = Span(
            activity, self.step, time.perf_counter_ns(), 0, layer, micro_batch, in_background=True
        )
        if self.keeps_spans:
            self.spans.append(span)
        return span

    def end(self, span: Span) -> None:
        """Record the end of background work; thread-safe."""
        span.end_ns = time.perf_counter_ns()

    def set_activity(self, activity: Activity) -> Activity:
        """Set this rank's activity on the board; return the previous one."""
        before, self._activity = self._activity, activity
        if self.board is not None:
            self.board.write(self.rank, self.step, activity)
        self.reached_point(activity)
        return before

    def reached_point(self, place: Activity | Milestone) -> None:
        """Kill this process if the fail point is here."""
        point = self.fail_at
        if point is not None and point.is_at(self.rank, place, self.step, self.generation):
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(slots=True)
class _SpanContext:
    """One action of a rank, as a context manager."""

    _recorder: Recorder
    _activity: Activity
    _layer: int | None
    _micro_batch: int | None
    _before: Activity = "start"
    _start_ns: int = 0

    def __enter__(self) -> None:
        self._before = self._recorder.set_activity(self._activity)
        self._start_ns = time.perf_counter_ns()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        recorder = self._recorder
        if kind is not None:
            return  # The board keeps showing where it failed.
        if recorder.keeps_spans:
            if recorder.finish_device_work is not None:
                recorder.finish_device_work()
            times_ns = self._start_ns, time.perf_counter_ns()
            place = self._layer, self._micro_batch
            recorder.spans.append(Span(self._activity, recorder.step, *times_ns, *place))
        recorder.set_activity(self._before)


# -- traces ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankTimeline:
    """All spans of one rank, with its position in the plan."""

    place: RankPlace
    spans: tuple[Span, ...]


def trace(ranks: Sequence[RankTimeline]) -> dict[str, Any]:
    """Convert a run to a Perfetto trace with the simulator's rows: pipelines and their ranks."""
    begin_ns = min((span.start_ns for rank in ranks for span in rank.spans), default=0)
    events = _steps(ranks, begin_ns)
    for pipeline in sorted({rank.place.pipeline for rank in ranks}):
        number = _STEPS_PROCESS + 1 + pipeline
        events += process_named(number, f"pipeline {pipeline}")
        rows = itertools.count(number * _ROWS)
        members = [rank for rank in ranks if rank.place.pipeline == pipeline]
        for member in sorted(members, key=lambda rank: (rank.place.stage, rank.place.index)):
            for title, spans in _rows(member):
                row = next(rows)
                events += thread_named(number, row, title)
                events += [_event(span, number, row, begin_ns) for span in spans]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _steps(ranks: Sequence[RankTimeline], begin_ns: int) -> list[dict[str, Any]]:
    """Return one event per step, from the first rank's start to the last rank's end."""
    spans: defaultdict[int, list[Span]] = defaultdict(list)
    for rank in ranks:
        for span in rank.spans:
            spans[span.step].append(span)
    row = _STEPS_PROCESS * _ROWS
    events = [*process_named(_STEPS_PROCESS, "steps"), *thread_named(_STEPS_PROCESS, row, "steps")]
    for step, done in sorted(spans.items()):
        start_s = (min(span.start_ns for span in done) - begin_ns) / 1e9
        end_s = (max(span.end_ns for span in done) - begin_ns) / 1e9
        events.append(complete_event(f"step {step}", _STEPS_PROCESS, row, start_s, end_s, {}))
    return events


def _rows(member: RankTimeline) -> Iterator[tuple[str, list[Span]]]:
    """Yield a rank's rows: one for its main thread, and as many as needed for background work."""
    place = member.place
    name = f"stage {place.stage}" + (f" TP {place.index}" if place.tp > 1 else "")
    in_turn = [span for span in member.spans if not span.in_background]
    if in_turn:
        layers = ", ".join(span_text(chunk.layers) for chunk in place.chunks)
        yield f"{name}: layers {layers}, rank {place.rank}", in_turn
    beside: list[list[Span]] = []
    for span in sorted(member.spans, key=lambda span: span.start_ns):
        if span.in_background and span.end_ns:
            free = next((row for row in beside if row[-1].end_ns <= span.start_ns), None)
            if free is None:
                beside.append([span])
            else:
                free.append(span)
    yield from ((f"{name}: gradient sync", row) for row in beside)


def _event(span: Span, number: int, row: int, begin_ns: int) -> dict[str, Any]:
    args: dict[str, Any] = {"step": span.step}
    if span.micro_batch is not None:
        args["micro_batch"] = span.micro_batch
    if span.layer is not None:
        args["layers"] = str(span.layer)
    match span.activity:
        case "forward" | "backward":
            name = f"{span.activity[0].upper()}{span.micro_batch}"
        case "sync":
            name = "sync" if span.layer is None else f"sync {span.layer}"
        case "step":
            name = "optimizer step"
        case "send" | "receive":
            which = "" if span.micro_batch is None else f" {span.micro_batch}"
            name = f"{span.activity}{which}"
        case "start" | "data" | "wait" | "snapshot" | "vote" | "end":
            name = span.activity
        case _:
            assert_never(span.activity)
    start_s, end_s = (span.start_ns - begin_ns) / 1e9, (span.end_ns - begin_ns) / 1e9
    return complete_event(name, number, row, start_s, end_s, args)
