"""The schedule of each stage group in one iteration, also as a trace for Perfetto.

Equal pipelines have equal schedules and are shown once. The trace is in the Trace Event Format,
which ui.perfetto.dev and chrome://tracing open.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, assert_never

from simulator.documents.problems import InputError, Problem
from simulator.estimate.event_estimator import EventEstimator, IterationDetails
from simulator.estimate.stage_times import PipelineTimes
from simulator.spec.plan import Pipeline, Plan
from simulator.traces.perfetto import complete_event, process_named, span_text, thread_named

_GroupId = tuple[int, int, int]
"""(pipeline, stage, index within the stage's split), as in the estimator's details."""

PASSES_MAX = 200_000
"""Largest number of passes in one picture; Perfetto loads it in a few seconds."""

# Traces reserve thread 0 and the thread with the process's number.
_THREADS = 10_000

BarKind = Literal["forward", "backward", "weights", "sync", "optimizer"]
KIND_OF: Mapping[str, BarKind] = {"F": "forward", "B": "backward", "W": "weights"}
"""Of each pass; ``weights`` is the gradient of the weights, where a backward is divided."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A pass, a gradient sync or an optimizer step of a stage group."""

    kind: BarKind
    start_s: float
    end_s: float
    layers: tuple[int, int] | None = None
    """First layer, and the one after the last; ``None`` for an optimizer step: all of them."""
    micro_batch: int | None = None
    algorithm: str = ""
    """That of the simulator's ``SyncJob``."""


@dataclass(frozen=True, slots=True)
class Row:
    """The schedule of one stage group."""

    stage: int
    share: int
    """Index in a split stage."""
    name: str
    layers: str
    devices: str
    work: tuple[Bar, ...]
    """Passes, then the optimizer step; they do not overlap."""
    sync: tuple[Bar, ...]
    """Gradient syncs; they do not overlap each other, but may overlap passes."""


@dataclass(frozen=True, slots=True)
class Lane:
    """One pipeline, for all that are equal to it."""

    pipelines: tuple[int, ...]
    rows: tuple[Row, ...]

    @property
    def title(self) -> str:
        """Number of the first pipeline, and how many there are."""
        first, count = self.pipelines[0], len(self.pipelines)
        return f"pipeline {first}" + (f" (x{count})" if count > 1 else "")


def lanes_of(plan: Plan, judge: EventEstimator) -> tuple[Lane, ...]:
    """Return every different pipeline of a plan, with its schedule."""
    shapes = [plan.pipelines[same[0]] for same in _equal_pipelines(plan)]
    each = 3 if plan.schedule == "zero-bubble" else 2
    passes = sum(
        each * shape.micro_batches * sum(len(stage.places) for stage in shape.stages)
        for shape in shapes
    )
    if passes > PASSES_MAX:
        have = f"its {len(shapes)} different pipelines have {passes:,} passes"
        what = f"{have}, more than the {PASSES_MAX:,} that a picture can hold"
        cure = "draw a copy with fewer micro batches (the schedule repeats itself) or pipelines"
        raise InputError(Problem("plan", what, cure))
    details = judge.details(plan)
    sync = _sync_bars(plan, details)
    # Pipelines of one shape may differ in their links, which depend on their nodes.
    equal = _equal_pipelines(plan, details.pipelines)
    return tuple(Lane(same, _rows(plan, same[0], details, sync)) for same in equal)


def trace(plan: Plan, judge: EventEstimator, *, iteration_s: float) -> dict[str, Any]:
    """Return an iteration in the Trace Event Format: a process per pipeline, a thread per group."""
    title = f"one iteration, {plan.samples_per_iteration:,} samples"
    events = [*process_named(1, title), *thread_named(1, _THREADS, "iteration")]
    events.append(complete_event("iteration", 1, _THREADS, 0.0, iteration_s, {}))
    for process, lane in enumerate(lanes_of(plan, judge), start=2):
        threads = itertools.count(process * _THREADS)
        events += process_named(process, lane.title)
        for row in lane.rows:
            thread = next(threads)
            events += thread_named(process, thread, f"{row.name}: {row.layers}, {row.devices}")
            events += [_event(bar, process, thread) for bar in row.work]
            if row.sync:
                thread = next(threads)
                events += thread_named(process, thread, f"{row.name}: gradient sync")
                events += [_event(bar, process, thread) for bar in row.sync]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def write_timeline(plan: Plan, judge: EventEstimator, path: Path) -> None:
    """Write the trace of a checked plan."""
    document = trace(plan, judge, iteration_s=judge.estimate(plan).iteration_s)
    try:
        with path.open("w", encoding="utf-8") as file:
            json.dump(document, file, separators=(",", ":"), allow_nan=False)
            file.write("\n")
    except OSError as error:
        raise unwritable(path, error) from None


def unwritable(path: Path, error: OSError) -> InputError:
    """Return the error for a path that cannot be written."""
    reason = error.strerror or str(error)
    return InputError(Problem(str(path), f"cannot be written: {reason}", "name another file"))


# -- from details to rows -------------------------------------------------------------------------


def bare_lanes(plan: Plan) -> tuple[Lane, ...]:
    """Return the different pipelines of a plan without a schedule."""
    equal = _equal_pipelines(plan)
    return tuple(
        Lane(
            same,
            tuple(
                _row(plan, plan.pipelines[same[0]], s, i, work=(), sync=())
                for s, stage in enumerate(plan.owning_stages(plan.pipelines[same[0]]))
                for i in range(len(stage.places))
            ),
        )
        for same in equal
    )


def _equal_pipelines(
    plan: Plan, works: Sequence[PipelineTimes] | None = None
) -> list[tuple[int, ...]]:
    """Return the numbers of equal pipelines with equal schedules, as groups."""
    same: defaultdict[object, list[int]] = defaultdict(list)
    for p, pipeline in enumerate(plan.pipelines):
        # A stage's node matters only by its links, which are in its times.
        stages = tuple(
            (
                *(stage.layers, stage.tp, stage.recompute, stage.offload, stage.split),
                *((place.gpu, place.machine, place.zone) for place in stage.places),
            )
            for stage in pipeline.stages
        )
        work = None if works is None else id(works[p])
        runs = pipeline.micro_batches, plan.size_of(pipeline)
        same[work, runs, stages].append(p)
    return [tuple(numbers) for numbers in same.values()]


def _sync_bars(plan: Plan, details: IterationDetails) -> dict[_GroupId, list[Bar]]:
    """Return the gradient syncs of each stage group, over all its chunks."""
    bars: defaultdict[_GroupId, list[Bar]] = defaultdict(list)
    for start, job in details.sync:
        bar = Bar("sync", start, start + job.seconds, job.layers, algorithm=job.algorithm)
        owners = ((p, s % plan.group_count(plan.pipelines[p]), i) for p, s, i in job.holders)
        for owner in dict.fromkeys(owners):
            bars[owner].append(bar)
    return bars


def _rows(
    plan: Plan, p: int, details: IterationDetails, sync: Mapping[_GroupId, Sequence[Bar]]
) -> tuple[Row, ...]:
    pipeline, work = plan.pipelines[p], details.pipelines[p]
    owners = plan.group_count(pipeline)
    done: defaultdict[tuple[int, int], list[Bar]] = defaultdict(list)
    for span in details.passes[p].spans:
        s, i = work.groups[span.group]
        kind = KIND_OF[span.kind]
        layers = pipeline.stages[s].layers
        done[s % owners, i].append(Bar(kind, span.start, span.end, layers, span.micro_batch))
    for (s, i), bars in done.items():
        end = details.step_end[p, s, i]
        bars.append(Bar("optimizer", end - details.optimizer_s[p, s, i], end))
    return tuple(
        _row(plan, pipeline, s, i, work=done[s, i], sync=sync.get((p, s, i), ()))
        for s, i in sorted(done)
    )


def _row(
    plan: Plan, pipeline: Pipeline, s: int, i: int, *, work: Sequence[Bar], sync: Sequence[Bar]
) -> Row:
    chunks = pipeline.stages[s :: plan.group_count(pipeline)]
    place, is_split = chunks[0].places[i], len(chunks[0].places) > 1
    layers = ", ".join(span_text(chunk.layers) for chunk in chunks)
    return Row(
        stage=s,
        share=i,
        name=f"stage {s} share {i}" if is_split else f"stage {s}",
        layers=f"layers {layers}",
        devices=f"{place.gpu} x{chunks[0].tp} in {place.zone}",
        work=tuple(work),
        sync=tuple(sync),
    )


# -- from rows to trace events --------------------------------------------------------------------


def _event(bar: Bar, process: int, thread: int) -> dict[str, Any]:
    layers = "" if bar.layers is None else span_text(bar.layers)
    match bar.kind:
        case "forward" | "backward" | "weights":
            name = f"{bar.kind[0].upper()}{bar.micro_batch}"
            args = {"micro_batch": bar.micro_batch, "layers": layers}
        case "sync":
            name, args = f"sync {layers}", {"layers": layers, "way": bar.algorithm}
        case "optimizer":
            name, args = "optimizer step", {}
        case _:
            assert_never(bar.kind)
    return complete_event(name, process, thread, bar.start_s, bar.end_s, args)
