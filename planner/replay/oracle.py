"""The most that any policy can train on a trace: a dynamic program that knows the future.

A policy's time is cut into stretches on one plan each, or on none. On a stretch of length ``l``
with plan ``w`` it trains at most ``rate(w) * (l - d)``, where ``d`` is the least downtime of any
move: less if an iteration stays unfinished or is rolled back. With the order of plans fixed, that
sum is convex in the moments of change, so it is largest where each moment is one at which
capacity changes. The program finds the largest of all such sums; so no policy among these plans
trains more, whatever it knows.
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
    """A stretch that could end at some moment, and the moment at which it would begin."""

    begin: int
    way: int | None


def foresee(
    spells: Sequence[AvailabilitySpan],
    ways: Sequence[PlanFigures],
    fits: Fits,
    costs: ReconfigurationCosts,
) -> PolicyResult:
    """What a policy would train at the very most that knows the whole trace."""
    down_s = min(costs.planned_s, costs.unplanned_s, costs.restart_s)
    moments = [spell.start_s for spell in spells] + [spells[-1].end_s]
    rates = [way.samples / way.iteration_s for way in ways]
    most = [0.0] * len(moments)
    """Samples that can be trained up to each moment."""
    chosen: list[_Stretch] = [_Stretch(0, None)] * len(moments)
    # Of each plan: samples at the best beginning so far, less what it would train from 0 until
    # then; and that beginning. Only while it fits without a break.
    lead = [-math.inf] * len(ways)
    begin = [0] * len(ways)
    for number, spell in enumerate(spells):
        most[number + 1], chosen[number + 1] = most[number], _Stretch(number, None)
        for way, rate in enumerate(rates):
            if not fits(way, spell.state):
                lead[way] = -math.inf
                continue
            # The job begins on its first plan: that costs nothing.
            fixed_s = down_s if number else 0.0
            here = most[number] - rate * (moments[number] + fixed_s)
            if here > lead[way]:
                lead[way], begin[way] = here, number
            reached = lead[way] + rate * moments[number + 1]
            if reached > most[number + 1]:
                most[number + 1] = reached
                chosen[number + 1] = _Stretch(begin[way], way)
    return _tale(moments, ways, chosen, down_s)


def _tale(
    moments: Sequence[float], ways: Sequence[PlanFigures], chosen: Sequence[_Stretch], down_s: float
) -> PolicyResult:
    """The best stretches as a tale; iterations count in fractions."""
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
    steps = {way: seconds / ways[way].iteration_s for way, seconds in ran.items()}
    places = len(ways[0].gpus) if ways else 0
    return PolicyResult(
        policy=ORACLE,
        duration_s=moments[-1],
        samples=sum(count * ways[way].samples for way, count in steps.items()),
        steps=sum(steps.values()),
        steps_lost=0,
        reconfigurations=moves,
        losses=0,
        useful_s=sum(ran.values()),
        lost_s=0.0,
        downtime_s=downtime_s,
        idle_s=idle_s,
        gpu_seconds=tuple(
            sum(ways[way].gpus[place] * seconds for way, seconds in held.items())
            for place in range(places)
        ),
        usd=total_usd(ways, held, ran),
        segments=tuple(reversed(segments)),
    )


def ideal_samples(
    spells: Sequence[AvailabilitySpan], ways: Sequence[PlanFigures], fits: Fits
) -> float:
    """What the fastest plan of each moment would train if changes cost nothing."""
    total = 0.0
    for spell in spells:
        rates = (
            way.samples / way.iteration_s
            for number, way in enumerate(ways)
            if fits(number, spell.state)
        )
        total += max(rates, default=0.0) * (spell.end_s - spell.start_s)
    return total
