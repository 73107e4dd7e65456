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
iterations count on a stretch that begins with its machines while no plan runs, and ends with their
loss before another plan can begin; elsewhere parts of iterations count too, and no work is ever
rolled back. A plan whose loss is announced may train until then, or be left by a planned move. So
no policy with these plans trains more, and the true optimum may lie a little lower.

With a price in samples for each dollar the same program bounds dollars: for every price, no policy
that trains as many samples spends less (Lagrangian duality).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import lt

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
    """The beginning of a stretch that is still running."""

    lead: float
    """Its value less what the plan would have gained from 0 until training begins."""
    begin: float
    down_s: float
    before: _End
    is_fixed: bool
    """Whether it begins with its machines while no plan runs, so that it cannot begin later in
    favour of an earlier plan."""


@dataclass(frozen=True, slots=True, eq=False)
class _Leaving:
    """A stretch on machines whose loss is announced."""

    end: _End
    """Its end if the plan trains until they are lost, or the trace ends."""
    gain: float
    """Value of a second on them."""

    def at(self, now_s: float) -> _End:
        """Its end if the plan is left at this moment."""
        value = self.end.value - self.gain * (self.end.at - now_s)
        return replace(self.end, value=value, at=now_s)


@dataclass(slots=True)
class _Best:
    """The best schedules up to a moment, by how their last plan ended."""

    free: _End = _NEVER
    """It may go on, or be left by a planned move."""
    early: _End = _NEVER
    """It was left by a planned move before it lost machines."""
    warm: _End = _NEVER
    """It lost machines, and its state is still in memory."""
    cold: _End = _NEVER
    """It lost machines, and its state with them."""
    idle_warm: _End = _NEVER
    """Nothing has run for a while; the state is still in memory."""
    idle_cold: _End = _NEVER


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
    found = _worth(found, best.value if samples is None else min(best.value, samples))
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
        """A bound for policies that spend no more than a budget, and a schedule within it."""
        costs = [plan.usd_per_running_s for plan in self.figures]
        dearest = max(
            (usd or 0.0) / plan.rate for usd, plan in zip(costs, self.figures, strict=True)
        )
        least = math.inf
        idle = self.best(0.0, 1.0)
        found = _policy_result(self.figures, idle, "budget", self.spans)
        for number in range(_PRICES):
            price = 100 ** (number / (_PRICES - 1)) / 100 / max(dearest, 1e-12) * 10
            best = self.best(1.0, price)
            least = min(least, best.value + price * budget)
            other = _policy_result(self.figures, best, "budget", self.spans)
            if other.samples > found.samples and (other.usd or 0.0) <= budget:
                found = other
        most = least if samples is None else min(least, samples)
        each = self.figures[0].samples
        ended: Ending = "steps" if most == samples else "budget"
        return replace(found, samples=most, steps=most / each, usd=budget, ended=ended)

    def best(self, per_sample: float, per_usd: float, samples: float | None = None) -> _End:
        """The schedule of the largest value: ``per_sample`` for each sample less ``per_usd`` for
        each dollar. It ends as soon as ``samples`` are trained, if given."""
        spans, figures = self.spans, self.figures
        usd = [(plan.usd_per_s or 0.0) * per_usd for plan in figures]
        running = [(plan.usd_per_running_s or 0.0) * per_usd for plan in figures]
        gain = [per_sample * plan.rate - each for plan, each in zip(figures, running, strict=True)]
        going: list[list[_Begin]] = [[] for _ in figures]
        """The stretches on each plan that still run."""
        best = _Best(idle_cold=_End(0.0, 0.0))
        leaving: list[_Leaving] = []
        done = _NEVER
        for number, span in enumerate(spans):
            now_s, end_s = span.start_s, span.end_s
            best.free = max((best.free, *(each.at(now_s) for each in leaving)), key=_value)
            for way in range(len(figures)):
                if number == 0 or not self._goes_on(way, number):
                    going[way] = []
                for before, down_s, is_fixed in self._sources(way, number, best, leaving):
                    if before is not _NEVER:
                        begin_s = before.at
                        lead = before.value - usd[way] * down_s - gain[way] * (begin_s + down_s)
                        going[way].append(_Begin(lead, begin_s, down_s, before, is_fixed))
                going[way] = _drop_dominated(going[way])
            if samples is not None:
                done = self._find_earliest_end(samples, number, going, gain, done)
                if done is not _NEVER and done.at <= end_s:
                    return done
            then, announced = self._ends(number, going, gain)
            gone = [each.end for each in leaving if each.end.at <= end_s]
            warm = _idle(max(best.idle_warm, best.free, best.warm, *gone, key=_value), end_s)
            cold = _idle(max(best.idle_cold, best.cold, key=_value), end_s)
            leaving = [*(each for each in leaving if each.end.at > end_s), *announced]
            if number + 1 < len(spans) and self._is_wiped(number + 1):
                warm, cold = _NEVER, max(warm, cold, key=_value)
            then.idle_warm, then.idle_cold = warm, cold
            best = then
        ends = (best.free, best.warm, best.cold, best.idle_warm, best.idle_cold)
        return max(ends, key=_value)

    def _goes_on(self, way: int, number: int) -> bool:
        """Whether the machines of a plan were up before a span, and still are."""
        is_up = all(self.fits(way, self.spans[at].state) for at in (number - 1, number))
        return is_up and not self._is_hit(way, number)

    def _sources(
        self, way: int, number: int, best: _Best, leaving: Sequence[_Leaving]
    ) -> list[tuple[_End, float, bool]]:
        """The ends before a stretch that begins with a span, or when machines leave in it.

        Each comes with the seconds until the stretch trains, and whether its beginning is fixed.
        """
        span = self.spans[number]
        if not self.fits(way, span.state):
            return []
        if number == 0:
            return [(best.idle_cold, 0.0, True)]
        late = [(each.end, self.planned_s, False) for each in leaving if each.end.at < span.end_s]
        if self._goes_on(way, number):
            return [
                *late,
                (max(best.free, best.early, key=_value), self.planned_s, False),
                (best.idle_warm, self.warm_s, False),
                (best.idle_cold, self.cold_s, False),
            ]
        return [
            *late,
            (best.free, self.planned_s, False),
            (best.warm, self.warm_s, True),
            (best.cold, self.cold_s, True),
            (best.idle_warm, self.warm_s, True),
            (best.idle_cold, self.cold_s, True),
        ]

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

    def _lost_after_s(self, way: int, number: int) -> float | None:
        """How long after a span a plan loses machines by the next change; ``None``: it does not."""
        after = number + 1
        if after == len(self.spans):
            return None
        if self._is_hit(way, after) or not self.fits(way, self.spans[after].state):
            return self.spans[after].notice_s
        return None

    def _ends(
        self, number: int, going: Sequence[Sequence[_Begin]], gain: Sequence[float]
    ) -> tuple[_Best, list[_Leaving]]:
        """The best ends of stretches at the end of a span, and those that a notice postpones."""
        best = _Best()
        announced: list[_Leaving] = []
        end_s = self.spans[number].end_s
        for way, begins in enumerate(going):
            if not begins:
                continue
            first = max(begins, key=_lead)
            value = first.lead + gain[way] * end_s
            whole = _End(value, end_s, first.begin, first.down_s, way, None, first.before)
            more_s = self._lost_after_s(way, number)
            if more_s is None:
                best.free = max(best.free, whole, key=_value)
            elif more_s > 0:
                # It may train on until the machines are lost.
                at_s = min(end_s + more_s, self.spans[-1].end_s)
                last = replace(whole, value=value + gain[way] * (at_s - end_s), at=at_s)
                announced.append(_Leaving(last, gain[way]))
            else:
                best.early = max(best.early, whole, key=_value)
                ends = (self._cut_short(way, begin, gain[way], end_s) for begin in begins)
                lost = max(ends, key=_value)
                if self._survives(way, number + 1):
                    best.warm = max(best.warm, lost, key=_value)
                else:
                    best.cold = max(best.cold, lost, key=_value)
        return best, announced

    def _cut_short(self, way: int, begin: _Begin, gain: float, end_s: float) -> _End:
        """The end of a stretch that runs until a loss, before another plan can begin."""
        value, steps = begin.lead + gain * end_s, None
        trains_s = end_s - begin.begin - begin.down_s
        if begin.is_fixed and trains_s >= 0:
            # Leave out the iteration that the loss interrupts.
            each_s = self.figures[way].iteration_s
            steps = math.floor(trains_s / each_s + _EPS)
            value -= gain * (trains_s - steps * each_s)
        return _End(value, end_s, begin.begin, begin.down_s, way, steps, begin.before)

    def _find_earliest_end(
        self,
        samples: float,
        number: int,
        going: Sequence[Sequence[_Begin]],
        gain: Sequence[float],
        before: _End,
    ) -> _End:
        """The earliest end by which ``samples`` are trained: one found before, or by stretches that
        end with a span or the notice after it."""
        found = before
        for way, begins in enumerate(going):
            until_s = self.spans[number].end_s + (self._lost_after_s(way, number) or 0.0)
            for begin in begins:
                at_s = (samples - begin.lead) / gain[way]
                # An earlier stretch may have trained more before this one begins.
                is_within = begin.begin + begin.down_s <= at_s <= until_s
                if is_within and (found is _NEVER or at_s < found.at):
                    end = (begin.begin, begin.down_s, way, None, begin.before)
                    found = _End(samples, at_s, *end)
        return found


def _drop_dominated(begins: Sequence[_Begin]) -> list[_Begin]:
    """All stretches with a fixed beginning, as whole iterations decide among them, and the best
    of the others.
    """
    others = [begin for begin in begins if not begin.is_fixed]
    fixed = [begin for begin in begins if begin.is_fixed]
    return [*fixed, max(others, key=_lead)] if others else fixed


def _lead(begin: _Begin) -> float:
    return begin.lead


def _value(end: _End) -> float:
    return end.value


def _idle(before: _End, end_s: float) -> _End:
    if before.value == -math.inf:
        return _NEVER
    return _End(before.value, end_s, before.at, 0.0, None, None, before)


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


def _worth(found: PolicyResult, samples: float) -> PolicyResult:
    """The result with the samples of its schedule.

    A stretch that is left before it trains counts against them, and its segments do not show that.
    """
    share = samples / found.samples if found.samples else 1.0
    if share > 1 - _EPS:
        return replace(found, samples=samples)
    lost_s = found.lost_s + found.useful_s * (1 - share)
    steps, useful_s = found.steps * share, found.useful_s * share
    return replace(found, samples=samples, steps=steps, useful_s=useful_s, lost_s=lost_s)


def ideal_samples(
    spans: Sequence[AvailabilitySpan],
    figures: Sequence[PlanFigures],
    fits: Fits,
    until_s: float = math.inf,
) -> float:
    """Samples if the fastest plan of each moment ran and reconfigurations cost nothing.

    On machines whose loss is announced it runs until they are lost.
    """
    total = 0.0
    fastest: list[tuple[float, float]] = []
    """Samples per second of the fastest plans so far, and when they lose machines."""
    for number, span in enumerate(spans):
        if number and (any(span.lost) or any(map(lt, span.up, spans[number - 1].up))):
            leaves_s = span.start_s + span.notice_s
            fastest = [(rate, min(at_s, leaves_s)) for rate, at_s in fastest]
        rates = [plan.rate for way, plan in enumerate(figures) if fits(way, span.state)]
        fastest = [each for each in fastest if span.start_s < each[1] < math.inf]
        fastest.append((max(rates, default=0.0), math.inf))
        now_s, end_s = span.start_s, min(span.end_s, until_s)
        for at_s in sorted(min(at_s, end_s) for _, at_s in fastest):
            rate = max(rate for rate, leaves_s in fastest if leaves_s > now_s)
            total += rate * max(0.0, at_s - now_s)
            now_s = max(now_s, at_s)
    return total
