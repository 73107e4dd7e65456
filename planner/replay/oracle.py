"""Upper bounds for every policy on a trace: a dynamic program that knows the future.

It knows which machines each loss takes. A policy's time is divided into stretches on one plan each,
or on none; a stretch ends at the latest when a loss takes machines of its plan. On a stretch of
length ``l`` a plan trains at most ``rate * (l - d)``, where ``d`` is the least downtime with which
it can begin there:

- a planned reconfiguration, if the machines of both plans are up at one moment;
- one after a loss, if enough machines of the plan before survive;
- otherwise a restart from the durable checkpoint.

For a fixed order of plans the sum is linear in the times of change, so it is largest where each
change coincides with a change of capacity. The program finds the largest such sum. Only whole
iterations count on a stretch that begins with its machines and ends with their loss; elsewhere
parts of iterations count too, and no work is ever rolled back. So no policy with these plans trains
more, and the true optimum may lie a little lower.

With a price in samples for each dollar the same program bounds dollars: for every price, no policy
that trains as many samples spends less (Lagrangian duality).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from simulator.traces.play_types import (
    NO_LIMITS,
    AvailabilitySpan,
    Ending,
    Fits,
    PlanFigures,
    PolicyResult,
    ReconfigurationCosts,
    RunLimits,
    RunSegment,
    total_usd,
)

ORACLE = "oracle"
_EPS = 1e-6
_PRICES = 24
"""Number of prices tried for each bound of dollars."""


@dataclass(frozen=True, slots=True, eq=False)
class _End:
    """The best value of a schedule up to a moment, and its last stretch."""

    value: float
    at: float
    begin: float = 0.0
    down_s: float = 0.0
    way: int | None = None
    steps: int | None = None
    """Whole iterations of the stretch, if only these count."""
    before: _End | None = None


_NEVER = _End(-math.inf, 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class _Begin:
    """The best beginning of a stretch that is still running."""

    lead: float
    """Its value less what the plan would have gained from 0 until training begins."""
    begin: float
    down_s: float
    before: _End


def best_possible(
    spans: Sequence[AvailabilitySpan],
    figures: Sequence[PlanFigures],
    fits: Fits,
    costs: ReconfigurationCosts,
    limits: RunLimits = NO_LIMITS,
) -> PolicyResult:
    """The most that any policy could train, knowing the whole trace."""
    program = _Program(spans, figures, fits, costs)
    samples = None
    if limits.steps is not None and figures:
        samples = float(limits.steps * figures[0].samples)
    best = program.best(1.0, 0.0, samples)
    found = _policy_result(figures, best, "trace" if samples is None else "steps", spans)
    found = replace(found, samples=best.value)
    budget = limits.max_usd
    if budget is None or found.usd is None or found.usd <= budget:
        return found
    return program.within(budget, samples)


def least_usd(
    spans: Sequence[AvailabilitySpan],
    figures: Sequence[PlanFigures],
    fits: Fits,
    costs: ReconfigurationCosts,
    samples: Sequence[float],
) -> list[float | None]:
    """The least dollars for which any policy could train each of these numbers of samples."""
    if not figures or any(plan.usd_per_s is None for plan in figures):
        return [None] * len(samples)
    program = _Program(spans, figures, fits, costs)
    cheapest = min((plan.usd_per_running_s or 0.0) / plan.rate for plan in figures)
    # Dollars per sample: from those of the cheapest plan to a hundred times as much.
    prices = [cheapest * 100 ** (number / (_PRICES - 1)) for number in range(_PRICES)]
    gain = [program.best(price, 1.0).value for price in prices]
    return [
        max(0.0, *(price * count - value for price, value in zip(prices, gain, strict=True)))
        for count in samples
    ]


class _Program:
    """The dynamic program of one trace."""

    def __init__(
        self,
        spans: Sequence[AvailabilitySpan],
        figures: Sequence[PlanFigures],
        fits: Fits,
        costs: ReconfigurationCosts,
    ) -> None:
        self.spans, self.figures, self.fits = spans, figures, fits
        self.planned_s = min(costs.planned_s, costs.unplanned_s, costs.restart_s)
        self.warm_s = min(costs.unplanned_s, costs.restart_s)
        self.cold_s = costs.restart_s
        self.survive_share = costs.survive_share

    def within(self, budget: float, samples: float | None) -> PolicyResult:
        """A bound for policies that spend no more than a budget."""
        costs = [plan.usd_per_running_s for plan in self.figures]
        dearest = max(
            (usd or 0.0) / plan.rate for usd, plan in zip(costs, self.figures, strict=True)
        )
        least, kept = math.inf, _NEVER
        for number in range(_PRICES):
            price = 100 ** (number / (_PRICES - 1)) / 100 / max(dearest, 1e-12) * 10
            best = self.best(1.0, price)
            if best.value + price * budget < least:
                least, kept = best.value + price * budget, best
        found = _policy_result(self.figures, kept, "budget", self.spans)
        most = least if samples is None else min(least, samples)
        each = self.figures[0].samples
        ended: Ending = "steps" if most == samples else "budget"
        return replace(found, samples=most, steps=most / each, usd=budget, ended=ended)

    def best(self, per_sample: float, per_usd: float, samples: float | None = None) -> _End:
        """The schedule of the largest value: ``per_sample`` for each sample less ``per_usd`` for
        each dollar. It ends as soon as ``samples`` are trained, if given."""
        spans, figures, fits = self.spans, self.figures, self.fits
        usd = [(plan.usd_per_s or 0.0) * per_usd for plan in figures]
        running = [(plan.usd_per_running_s or 0.0) * per_usd for plan in figures]
        gain = [per_sample * plan.rate - each for plan, each in zip(figures, running, strict=True)]
        ways = range(len(figures))
        goes_on: list[_Begin | None] = [None] * len(figures)
        from_start: list[_Begin | None] = [None] * len(figures)
        # The best schedules up to now. ``free``: the last plan may go on, or be left by a planned
        # move; ``warm``, ``cold``: it lost machines, and its state is still in memory or not;
        # ``idle_*``: nothing runs.
        free, warm, cold = _NEVER, _NEVER, _NEVER
        idle_warm, idle_cold = _NEVER, _End(0.0, 0.0)
        up = [False] * len(figures)
        """Whether the machines of each plan were up just before."""
        for number, span in enumerate(spans):
            hit = [self._is_hit(way, number) for way in ways]
            now_s, end_s = span.start_s, span.end_s
            any_warm = max(free, warm, cold, key=_value)
            for way in ways:
                if not fits(way, span.state):
                    goes_on[way] = from_start[way] = None
                    continue
                was_up = up[way] and not hit[way]
                if not was_up:
                    goes_on[way] = from_start[way] = None
                if number == 0:
                    options = [(idle_cold, 0.0)]
                elif was_up:
                    options = [
                        (any_warm, self.planned_s),
                        (idle_warm, self.warm_s),
                        (idle_cold, self.cold_s),
                    ]
                else:
                    options = [
                        (free, self.planned_s),
                        (warm, self.warm_s),
                        (cold, self.cold_s),
                        (idle_warm, self.warm_s),
                        (idle_cold, self.cold_s),
                    ]
                for before, down_s in options:
                    if before.value == -math.inf:
                        continue
                    lead = before.value - usd[way] * down_s - gain[way] * (now_s + down_s)
                    present = goes_on[way] if was_up else from_start[way]
                    if present is None or lead > present.lead:
                        begin = _Begin(lead, now_s, down_s, before)
                        if was_up:
                            goes_on[way] = begin
                        else:
                            from_start[way] = begin
            if samples is not None:
                done = self._reached(samples, end_s, goes_on, from_start, gain)
                if done is not None:
                    return done
            ends = self._ends(number, goes_on, from_start, gain)
            stays = max(idle_warm, free, warm, key=_value)
            stays_cold = max(idle_cold, cold, key=_value)
            is_wiped = number + 1 < len(spans) and self._is_wiped(number + 1)
            idle = [_idle(stays, now_s, end_s), _idle(stays_cold, now_s, end_s)]
            if is_wiped:
                idle = [_NEVER, max(idle, key=_value)]
            free, warm, cold = ends
            idle_warm, idle_cold = idle
            up = [fits(way, span.state) for way in ways]
        return max(free, warm, cold, idle_warm, idle_cold, key=_value)

    def _is_hit(self, way: int, number: int) -> bool:
        """Whether the change at the start of a span takes machines of a plan that ran before."""
        if not number:
            return False
        span = self.spans[number]
        return any(
            slots and slots[0] < count
            for slots, count in zip(span.lost, self.figures[way].gpus, strict=True)
        )

    def _is_wiped(self, number: int) -> bool:
        """Whether no GPU survives the change at the start of a span."""
        before = self.spans[number - 1].up
        return sum(map(len, self.spans[number].lost)) >= sum(before)

    def _survives(self, way: int, number: int) -> bool:
        """Whether enough GPUs of a plan survive a change to keep its state in memory."""
        gpus = self.figures[way].gpus
        hits = sum(
            sum(slot < count for slot in slots)
            for slots, count in zip(self.spans[number].lost, gpus, strict=True)
        )
        return sum(gpus) - hits >= self.survive_share * sum(gpus)

    def _ends(
        self,
        number: int,
        goes_on: Sequence[_Begin | None],
        from_start: Sequence[_Begin | None],
        gain: Sequence[float],
    ) -> tuple[_End, _End, _End]:
        """The best ends of stretches at the end of a span."""
        free = warm = cold = _NEVER
        end_s = self.spans[number].end_s
        following = number + 1 if number + 1 < len(self.spans) else None
        for way, plan in enumerate(self.figures):
            options = [begin for begin in (goes_on[way], from_start[way]) if begin is not None]
            if not options:
                continue
            best = max(options, key=lambda begin: begin.lead)
            is_lost = following is not None and (
                self._is_hit(way, following) or not self.fits(way, self.spans[following].state)
            )
            if not is_lost:
                value = best.lead + gain[way] * end_s
                if value > free.value:
                    free = _End(value, end_s, best.begin, best.down_s, way, None, best.before)
                continue
            assert following is not None
            more_s = self.spans[following].notice_s
            found = _NEVER
            if more_s > 0:
                # It may train on until the machines are lost.
                value = best.lead + gain[way] * end_s + max(0.0, gain[way]) * more_s
                found = _End(value, end_s, best.begin, best.down_s, way, None, best.before)
                if value > free.value:
                    free = found
                continue
            first = from_start[way]
            later = goes_on[way]
            if later is not None:
                value = later.lead + gain[way] * end_s
                found = _End(value, end_s, later.begin, later.down_s, way, None, later.before)
            if first is not None:
                trains_s = max(0.0, end_s - first.begin - first.down_s)
                steps = math.floor(trains_s / plan.iteration_s + _EPS)
                # Leave out the iteration that the loss interrupts.
                spared_s = trains_s - steps * plan.iteration_s
                value = first.lead + gain[way] * (end_s - spared_s)
                if end_s - first.begin < first.down_s:
                    value = first.lead + gain[way] * end_s
                if value > found.value:
                    found = _End(value, end_s, first.begin, first.down_s, way, steps, first.before)
            if self._survives(way, following):
                warm = max(warm, found, key=_value)
            else:
                cold = max(cold, found, key=_value)
        return free, warm, cold

    def _reached(
        self,
        samples: float,
        end_s: float,
        goes_on: Sequence[_Begin | None],
        from_start: Sequence[_Begin | None],
        gain: Sequence[float],
    ) -> _End | None:
        """The earliest end in a span by which ``samples`` are trained."""
        found: _End | None = None
        for way, each in enumerate(gain):
            for begin in (goes_on[way], from_start[way]):
                if begin is None:
                    continue
                at_s = (samples - begin.lead) / each
                if at_s <= end_s and (found is None or at_s < found.at):
                    found = _End(samples, at_s, begin.begin, begin.down_s, way, None, begin.before)
        return found


def _value(end: _End) -> float:
    return end.value


def _idle(before: _End, begin_s: float, end_s: float) -> _End:
    if before.value == -math.inf:
        return _NEVER
    return _End(before.value, end_s, begin_s, 0.0, None, None, before)


def _policy_result(
    figures: Sequence[PlanFigures],
    best: _End,
    ended: str,
    spans: Sequence[AvailabilitySpan],
) -> PolicyResult:
    """The best stretches as a policy result, with fractional iterations."""
    segments: list[RunSegment] = []
    held: dict[int, float] = {}
    ran: dict[int, float] = {}
    steps: dict[int, float] = {}
    idle_s = downtime_s = lost_s = 0.0
    moves = 0
    is_complete = best.at < spans[-1].end_s
    end: _End | None = best
    while end is not None and end.at > 0:
        begin_s, end_s, way = end.begin, end.at, end.way
        if way is None:
            segments.append(RunSegment(begin_s, end_s, "idle", None))
            idle_s += end_s - begin_s
        else:
            resumes_s = min(begin_s + end.down_s, end_s)
            if end_s > resumes_s:
                segments.append(RunSegment(resumes_s, end_s, "training", way))
            if begin_s > 0:
                moves += 1
            if resumes_s > begin_s:
                segments.append(RunSegment(begin_s, resumes_s, "reconfiguring", way))
            downtime_s += resumes_s - begin_s
            held[way] = held.get(way, 0.0) + end_s - begin_s
            ran[way] = ran.get(way, 0.0) + end_s - resumes_s
            each_s = figures[way].iteration_s
            count = (end_s - resumes_s) / each_s if end.steps is None else end.steps
            lost_s += end_s - resumes_s - count * each_s
            steps[way] = steps.get(way, 0.0) + count
        end = end.before
    places = len(figures[0].gpus) if figures else 0
    return PolicyResult(
        policy=ORACLE,
        duration_s=best.at,
        samples=sum(count * figures[way].samples for way, count in steps.items()),
        steps=sum(steps.values()),
        steps_lost=0,
        reconfigurations=moves,
        losses=0,
        useful_s=sum(count * figures[way].iteration_s for way, count in steps.items()),
        lost_s=lost_s,
        downtime_s=downtime_s,
        idle_s=idle_s,
        gpu_seconds=tuple(
            sum(figures[way].gpus[place] * seconds for way, seconds in held.items())
            for place in range(places)
        ),
        usd=total_usd(figures, held, ran),
        segments=tuple(reversed(segments)),
        ended="steps" if ended == "steps" and is_complete else "trace",
    )


def ideal_samples(
    spans: Sequence[AvailabilitySpan],
    figures: Sequence[PlanFigures],
    fits: Fits,
    until_s: float = math.inf,
) -> float:
    """Samples if the fastest plan of each span ran and reconfigurations cost nothing."""
    total = 0.0
    for span in spans:
        rates = (plan.rate for number, plan in enumerate(figures) if fits(number, span.state))
        total += max(rates, default=0.0) * max(0.0, min(span.end_s, until_s) - span.start_s)
    return total
