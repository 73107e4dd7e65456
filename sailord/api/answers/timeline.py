"""The schedule of one step: as predicted, and as the ranks have measured it.

A rank knows its times from the beginning of a step, by its own clock. The rows of several ranks are
put on one axis at the end of the step's vote, whose result all of them get within a message's
latency, so that no clocks are compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agents.protocol.records import KeptStep, KeptSteps, TimedPass


@dataclass(frozen=True, slots=True)
class MeasuredGroup:
    """When the passes of a stage group's first rank ran; seconds as in the whole schedule."""

    stage: int
    rank: int
    passes: tuple[TimedPass, ...]
    """At most 512."""
    update: tuple[float, ...]
    """Beginning and end of the optimizer step; empty: none was applied."""
    sync: tuple[tuple[float, float], ...] = ()
    """Beginning and end of gradient sums; at most 512."""
    why_none: str = ""
    """Why nothing is known of it."""


@dataclass(frozen=True, slots=True)
class MeasuredPipeline:
    """One pipeline, in the order of the predicted groups."""

    number: int
    groups: tuple[MeasuredGroup, ...]


@dataclass(frozen=True, slots=True)
class MeasuredSchedule:
    """One step as it was measured; times are seconds from the first rank's beginning."""

    step: int
    age_s: float
    """How long ago it ended."""
    length_s: float
    """Until the last rank's end."""
    pipelines: tuple[MeasuredPipeline, ...]
    """Of those that were predicted alike, the first."""


@dataclass(frozen=True, slots=True)
class TimelineView:
    """The schedule of one iteration, as predicted and as measured."""

    sha256: str
    """The plan's hash."""
    timeline: Mapping[str, Any] | None
    """Different pipelines with the passes of each stage group; null: see ``why_none``."""
    why_none: str = ""
    measured: MeasuredSchedule | None = None
    """A step of this generation; null until one was measured."""


def measured_schedule(
    predicted: Mapping[str, Any], found: Mapping[int, KeptSteps | str]
) -> MeasuredSchedule | None:
    """Put what ranks have kept on one axis; a text says why a rank did not answer."""
    kept = {
        rank: {each.step: each for each in said.steps}
        for rank, said in found.items()
        if isinstance(said, KeptSteps)
    }
    counts = Counter(step for steps in kept.values() for step in steps)
    if not counts:
        return None
    # The newest of those that most ranks have.
    step = max(counts, key=lambda step: (counts[step], step))
    rows = {rank: steps[step] for rank, steps in kept.items() if step in steps}
    voted_s = max(row.voted_s for row in rows.values())

    def group_of(stage: int, rank: int) -> MeasuredGroup:
        row, said = rows.get(rank), found.get(rank, "was not asked")
        if row is None:
            why = said if isinstance(said, str) else f"has not kept step {step}"
            return MeasuredGroup(stage, rank, (), (), why_none=why)

        def on_axis(time_s: float) -> float:
            return round(time_s - row.voted_s + voted_s, 6)

        passes = tuple((kind, on_axis(a), on_axis(b), batch) for kind, a, b, batch in row.passes)
        sync = tuple((on_axis(begun), on_axis(ended)) for begun, ended in row.sums)
        return MeasuredGroup(stage, rank, passes, tuple(map(on_axis, row.update)), sync)

    return MeasuredSchedule(
        step,
        age_s=max(min(_age_s(found[rank], row) for rank, row in rows.items()), 0.0),
        length_s=max(voted_s - row.voted_s + _end_s(row) for row in rows.values()),
        pipelines=tuple(
            MeasuredPipeline(
                each["numbers"][0],
                tuple(group_of(group["stage"], group["rank"]) for group in each["groups"]),
            )
            for each in predicted["pipelines"]
        ),
    )


def _age_s(said: KeptSteps | str, row: KeptStep) -> float:
    assert isinstance(said, KeptSteps)
    return said.now - row.at


def _end_s(row: KeptStep) -> float:
    ends = (*(end for _, end in row.sums), *(end for _, _, end, _ in row.passes))
    return max(row.voted_s, *row.update, *ends)
