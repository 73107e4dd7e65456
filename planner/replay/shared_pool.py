"""Which machines each of several jobs has on a trace, as spans of availability for the player.

Machines are whole, and each belongs to one job at a time. A running job keeps what it gives up for
a handover, in which it finishes its step and moves to its new plan; the receiver waits.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import floordiv, mul

from planner.library.plan_library import PlanLibrary
from planner.share.split_machines import Claim, MachineCounts, PlanChoice, split_machines
from simulator.traces.play_types import AvailabilitySpan
from simulator.traces.trace import LostSlots, Trace

EVENT_PRIOR_S = 1800.0
"""Expected time between two changes before any was seen."""


@dataclass(frozen=True, slots=True)
class DivisionFacts:
    """What is known when machines are divided."""

    now_s: float
    changes: int
    """Changes of the trace so far."""
    up: MachineCounts
    absent: tuple[int, ...]
    """Jobs that are done or have not arrived yet."""
    broken: frozenset[int]
    """Jobs that have just lost machines."""


@dataclass(frozen=True, slots=True)
class JobShare:
    """What a job is given."""

    machines: MachineCounts
    handover_s: float = 0.0
    """How long it goes on using machines after they are taken from it."""


Divide = Callable[[DivisionFacts], Sequence[JobShare]]


@dataclass(frozen=True, slots=True)
class OneAfterAnother:
    """One job after another has the whole cluster, in the order of arrival."""

    begins: Sequence[float]
    """When each job arrives; ties go to the lower index."""

    def __call__(self, moment: DivisionFacts) -> list[JobShare]:
        jobs = range(len(self.begins))
        there = [job for job in jobs if job not in moment.absent]
        first = min(there, key=lambda job: self.begins[job], default=None)
        nothing = JobShare((0,) * len(moment.up))
        return [JobShare(moment.up) if job == first else nothing for job in jobs]


@dataclass(frozen=True, slots=True)
class RunningShare:
    """A job that shares the cluster."""

    choices: tuple[PlanChoice, ...]
    weight: float
    down_s: Mapping[int, float]
    """Seconds that the end of the running step and a planned move take, by plan."""


@dataclass(slots=True, eq=False)
class SideBySide:
    """All jobs run at once on parts of the cluster, by proportional fairness.

    A job moves if that is worth its downtime until the next change, which is expected after as long
    as earlier ones took on average.
    """

    jobs: Sequence[RunningShare]
    running: list[PlanChoice | None] = field(default_factory=list)
    known: dict[object, tuple[PlanChoice | None, ...]] = field(default_factory=dict)
    """Splits already computed, by all that they depend on."""

    def __call__(self, moment: DivisionFacts) -> list[JobShare]:
        if moment.now_s == 0:
            self.running = [None] * len(self.jobs)
        gone = {*moment.absent, *moment.broken}
        keeps = tuple(None if job in gone else own for job, own in enumerate(self.running))
        # Rounded to a power of 2, so that few splits have to be computed.
        exponent = round(math.log2((EVENT_PRIOR_S + moment.now_s) / (1 + moment.changes)))
        key = (moment.up, moment.absent, keeps, exponent)
        if key not in self.known:
            claims = [
                self._claim(job, keeps[job], moment, 2.0**exponent) for job in self._all_jobs()
            ]
            self.known[key] = split_machines(claims, moment.up)
        self.running = list(self.known[key])
        return [self._part(job, moment.up) for job in self._all_jobs()]

    def _all_jobs(self) -> range:
        return range(len(self.jobs))

    def _claim(
        self, job: int, keeps: PlanChoice | None, moment: DivisionFacts, until_s: float
    ) -> Claim:
        asks = self.jobs[job]
        share = 0.0 if keeps is None else asks.down_s[keeps.plan] / until_s
        choices = () if job in moment.absent else asks.choices
        return Claim(choices, asks.weight, keeps, share)

    def _part(self, job: int, up: MachineCounts) -> JobShare:
        choice = self.running[job]
        if choice is None:
            return JobShare((0,) * len(up))
        return JobShare(choice.machines, self.jobs[job].down_s[choice.plan])


@dataclass(slots=True, eq=False)
class _Holding:
    """The machines of one job, by pool."""

    given: list[list[int]]
    """Machines given to it, including those that another job still uses."""
    has: list[list[int]]
    """Machines that it may use, in the order in which it got them."""
    handover_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Pool:
    """The machines of the cluster while a trace is walked through."""

    up: list[list[int]]
    """Machines that are up, by pool, the longest up first."""
    holdings: list[_Holding]
    free_s: dict[int, float] = field(default_factory=dict)
    """When machines that were given up may be used by others."""
    made: int = 0

    def change(
        self, counts: MachineCounts, lost: LostSlots, sizes: Sequence[int]
    ) -> list[LostSlots]:
        """Lose and add machines; return which of its GPUs each job lost, as the player counts."""
        gone: set[int] = set()
        for machines, slots, size, count in zip(self.up, lost, sizes, counts, strict=True):
            gone |= {machines[slot // size] for slot in slots}
            machines[:] = [each for each in machines if each not in gone]
            added = count - len(machines)
            machines.extend(range(self.made, self.made + added))
            self.made += added
        return [self._lose(holding, gone, sizes) for holding in self.holdings]

    def _lose(self, holding: _Holding, gone: set[int], sizes: Sequence[int]) -> LostSlots:
        found = []
        for given, has, size in zip(holding.given, holding.has, sizes, strict=True):
            numbers = [number for number, machine in enumerate(has) if machine in gone]
            found.append(tuple(n * size + gpu for n in numbers for gpu in range(size)))
            for machines in (given, has):
                machines[:] = [each for each in machines if each not in gone]
        return tuple(found)

    def end(self, job: int) -> None:
        """Free the machines of a job that is done."""
        for lists in (self.holdings[job].given, self.holdings[job].has):
            for of_pool in lists:
                of_pool.clear()

    def give(self, parts: Sequence[JobShare], now_s: float) -> dict[int, float]:
        """Give each job its part; return how long jobs go on using what is taken from them."""
        handing: dict[int, float] = {}
        for job, (holding, part) in enumerate(zip(self.holdings, parts, strict=True)):
            for given, has, count in zip(holding.given, holding.has, part.machines, strict=True):
                # Take machines that have not arrived yet first, then the latest.
                order = {machine: number for number, machine in enumerate(has)}
                given.sort(key=lambda machine: order.get(machine, len(order)))
                for machine in given[count:]:
                    if machine in order:
                        has.remove(machine)
                        self.free_s[machine] = now_s + holding.handover_s
                        handing[job] = holding.handover_s
                del given[count:]
            holding.handover_s = part.handover_s
        owned = {each for holding in self.holdings for given in holding.given for each in given}
        for pool, machines in enumerate(self.up):
            left = [each for each in machines if each not in owned]
            left.sort(key=lambda each: max(now_s, self.free_s.get(each, 0.0)))
            for holding, part in zip(self.holdings, parts, strict=True):
                missing = part.machines[pool] - len(holding.given[pool])
                holding.given[pool] += left[:missing]
                del left[:missing]
        return handing

    def arrive(self, now_s: float) -> None:
        """Let jobs use the machines that were given to them and are free by now."""
        for holding in self.holdings:
            for given, has in zip(holding.given, holding.has, strict=True):
                has += [
                    each
                    for each in given
                    if each not in has and self.free_s.get(each, 0.0) <= now_s
                ]

    def next_arrival_s(self, now_s: float) -> float:
        """When the next machine can be used by the job that it was given to."""
        given = (each for holding in self.holdings for pool in holding.given for each in pool)
        times = (self.free_s.get(each, 0.0) for each in given)
        return min((at_s for at_s in times if at_s > now_s), default=math.inf)


def spans_by_job(
    trace: Trace,
    taken: Sequence[LostSlots],
    plans: Sequence[PlanLibrary],
    divide: Divide,
    begins: Sequence[float],
    ends: Mapping[int, float],
) -> list[list[AvailabilitySpan]]:
    """Walk through a trace, and return the spans of each job, given when jobs arrive and end.

    The machines are divided anew at each change, arrival and end.
    """
    sizes = [pool.gpus_per_machine for pool in plans[0].pools]
    pool = _Pool([[] for _ in sizes], [_holding(len(sizes)) for _ in plans])
    spans: list[list[AvailabilitySpan]] = [[] for _ in plans]
    changes = {each.start_s: number for number, each in enumerate(trace.intervals)}
    comings = {*begins, *ends.values()}
    moments = sorted({*changes, *(at_s for at_s in comings if at_s < trace.end_s), trace.end_s})
    now_s, change = 0.0, 0
    while now_s < trace.end_s:
        lost: list[LostSlots] = [()] * len(plans)
        handing: dict[int, float] = {}
        if now_s in changes:
            change = changes[now_s]
            counts = tuple(map(floordiv, trace.intervals[change].gpus, sizes))
            lost = pool.change(counts, taken[change], sizes)
        broken = frozenset(job for job, slots in enumerate(lost) if any(slots))
        ended = {job for job, at_s in ends.items() if at_s <= now_s}
        for job in ended:
            pool.end(job)
        if now_s in changes or now_s in comings:
            up = tuple(map(len, pool.up))
            absent = ended | {job for job, at_s in enumerate(begins) if at_s > now_s}
            moment = DivisionFacts(now_s, change, up, tuple(sorted(absent)), broken)
            handing = pool.give(divide(moment), now_s)
        pool.arrive(now_s)
        until_s = min(moments[bisect_right(moments, now_s)], pool.next_arrival_s(now_s))
        for job, (holding, of_job) in enumerate(zip(pool.holdings, spans, strict=True)):
            gpus = tuple(map(mul, map(len, holding.has), sizes))
            if of_job and of_job[-1].up == gpus and not any(lost[job]):
                of_job[-1] = replace(of_job[-1], end_s=until_s)
                continue
            notice_s = handing.get(job, 0.0) if job not in broken else trace.notice_s
            state, slots = plans[job].state(gpus), lost[job] or ((),) * len(sizes)
            of_job.append(AvailabilitySpan(now_s, until_s, state, gpus, slots, notice_s))
        now_s = until_s
    return spans


def _holding(pools: int) -> _Holding:
    return _Holding([[] for _ in range(pools)], [[] for _ in range(pools)])
