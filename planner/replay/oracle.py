"""An upper bound for every policy on a trace: a dynamic program that knows the future.

A policy's time is divided into stretches on one plan each, or on none. On a stretch of length ``l``
with plan ``w`` it trains at most ``rate(w) * (l - d)``, where ``d`` is the least downtime of any
reconfiguration; less if an iteration stays unfinished or is rolled back. For a fixed order of plans
this sum is convex in the times of change, so it is largest where each change coincides with a
change of capacity. The program finds the largest such sum, so no policy with these plans trains
more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from simulator.traces.player import (
    AvailabilitySpan,
    Fits,
    PlanFigures,
    PolicyResult,
    ReconfigurationCosts,
    RunSegment,
    total_usd,
)

ORACLE = "oracle"


@dataclass(frozen=True, slots=True)
class _Stretch:
    """A stretch that could end at some time: where it begins, and its plan."""

    begin: int
    way: int | None


def best_possible(
    spans: Sequence[AvailabilitySpan],
    figures: Sequence[PlanFigures],
    fits: Fits,
    costs: ReconfigurationCosts,
) -> PolicyResult:
    """The most that any policy could train, knowing the whole trace."""
    down_s = min(costs.planned_s, costs.unplanned_s, costs.restart_s)
    moments = [span.start_s for span in spans] + [spans[-1].end_s]
    rates = [way.samples / way.iteration_s for way in figures]
    most = [0.0] * len(moments)
    """Samples that can be trained up to each moment."""
    chosen: list[_Stretch] = [_Stretch(0, None)] * len(moments)
    # For each plan, while it fits without a break: samples at its best beginning so far, less what
    # it would have trained from 0 until then; and that beginning.
    lead = [-math.inf] * len(figures)
    begin = [0] * len(figures)
    for number, span in enumerate(spans):
        most[number + 1], chosen[number + 1] = most[number], _Stretch(number, None)
        for way, rate in enumerate(rates):
            if not fits(way, span.state):
                lead[way] = -math.inf
                continue
            # The job begins on its first plan without downtime.
            fixed_s = down_s if number else 0.0
            here = most[number] - rate * (moments[number] + fixed_s)
            if here > lead[way]:
                lead[way], begin[way] = here, number
            reached = lead[way] + rate * moments[number + 1]
            if reached > most[number + 1]:
                most[number + 1] = reached
                chosen[number + 1] = _Stretch(begin[way], way)
    return _policy_result(moments, figures, chosen, down_s)


def _policy_result(
    moments: Sequence[float],
    figures: Sequence[PlanFigures],
    chosen: Sequence[_Stretch],
    down_s: float,
) -> PolicyResult:
    """The best stretches as a policy result, with fractional iterations."""
    segments: list[RunSegment] = []
    held: dict[int, float] = {}
    ran: dict[int, float] = {}
    idle_s = downtime_s = 0.0
    moves = 0
    end = len(moments) - 1
    while end > 0:
        stretch = chosen[end]
        begin_s, end_s = moments[stretch.begin], moments[end]
        way = stretch.way
        if way is None:
            segments.append(RunSegment(begin_s, end_s, "idle", None))
            idle_s += end_s - begin_s
        else:
            resumes_s = begin_s + (down_s if stretch.begin else 0.0)
            segments.append(RunSegment(resumes_s, end_s, "training", way))
            if stretch.begin:
                segments.append(RunSegment(begin_s, resumes_s, "reconfiguring", way))
                moves += 1
            downtime_s += resumes_s - begin_s
            held[way] = held.get(way, 0.0) + end_s - begin_s
            ran[way] = ran.get(way, 0.0) + end_s - resumes_s
        end = stretch.begin
    steps = {way: seconds / figures[way].iteration_s for way, seconds in ran.items()}
    places = len(figures[0].gpus) if figures else 0
    return PolicyResult(
        policy=ORACLE,
        duration_s=moments[-1],
        samples=sum(count * figures[way].samples for way, count in steps.items()),
        steps=sum(steps.values()),
        steps_lost=0,
        reconfigurations=moves,
        losses=0,
        useful_s=sum(ran.values()),
        lost_s=0.0,
        downtime_s=downtime_s,
        idle_s=idle_s,
        gpu_seconds=tuple(
            sum(figures[way].gpus[place] * seconds for way, seconds in held.items())
            for place in range(places)
        ),
        usd=total_usd(figures, held, ran),
        segments=tuple(reversed(segments)),
    )


def ideal_samples(
    spans: Sequence[AvailabilitySpan], figures: Sequence[PlanFigures], fits: Fits
) -> float:
    """Samples if the fastest plan of each span ran and reconfigurations cost nothing."""
    total = 0.0
    for span in spans:
        rates = (
            way.samples / way.iteration_s
            for number, way in enumerate(figures)
            if fits(number, span.state)
        )
        total += max(rates, default=0.0) * (span.end_s - span.start_s)
    return total
