"""The planner of the SOSP'25 paper: runs its search, with the published habits or without them.

For each number of stages (layers divided evenly, the rest to the last stages), micro batch and
number of replicas, the stages take GPUs one after the other: a number of replicas of each kind, TP
by rule, all in one region, zone after zone. A stage keeps the choice that makes itself and the
stages after it fastest together. Replicas are tried from many to few until a plan gets slower;
where cost is the goal, from few to many until one gets dearer. The batch is rounded up in its time
estimates, and met exactly in the returned plan.

``published`` keeps these habits, ``fixed`` mends them:

* with cost as the goal it drops all plans of more than one stage;
* a budget is split over stages to the cent; a remainder that rounds to 0 counts as no limit, and
  of joined stages only the messages count against it;
* remaining GPUs are cached by their sum over zones, and the last stage steps on to the next zone
  once per replica, so that plans may use GPUs that do not exist;
* an answer for some GPUs is reused although other regions could follow now;
* the slowest link of a gradient sum is searched between zones, but the one within the first zone
  is used, and a fitted bandwidth below zero makes a time below zero;
* unmeasured times count as 0 s, and one replica per GPU is never tried.

It uses three GPU kinds: the first by name as published, those with the most GPUs as fixed. Of
consecutive mixes with equal times only the first is followed. State that the published program
keeps between calls is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from planner.baselines.sailor_sosp25.cost import End, MeasuredGpu, Sosp25Inputs
from planner.baselines.sailor_sosp25.search import Sosp25Goal, Sosp25Plan, search
from planner.baselines.shared.equal_gpus import (
    Fleet,
    even_counts,
    fleets_of,
    recompute_of,
    tp_degrees,
)
from planner.baselines.shared.proposals import micro_batch_sizes, proposal
from planner.compare.interface import Case, Mode, ProposedPlan
from simulator.arrays import Floats, prefix_sums
from simulator.models.layers import FLOAT_BYTES
from simulator.network.curves import Curve
from simulator.spec.plan import Pipeline, Place, Plan, Stage

KINDS_MAX = 3
DEGREES = (1, 2, 4)
PROBE_BYTES = 2.0**30
"""Message size at which the largest bandwidth of a link without a measured curve is taken."""


def inputs_from(case: Case, fleets: Sequence[Fleet], mode: Mode) -> Sosp25Inputs:
    """The planner's inputs: measured where a profile has them, computed elsewhere."""
    width = FLOAT_BYTES[case.job.precision]
    costs = case.costs
    # Of equally large zones, the published planner takes the last by name first.
    zones = sorted({place.zone for fleet in fleets for place, _ in fleet.machines}, reverse=True)
    links = _Links(case, zones, [fleet.gpu for fleet in fleets], mode)
    return Sosp25Inputs(
        global_batch=case.job.global_batch,
        float_bytes=width,
        kinds=tuple(_kind(case, fleet, mode) for fleet in fleets),
        zones=tuple(
            (zone, case.cluster.region_of(zone) or zone, tuple(_gpus(f, zone) for f in fleets))
            for zone in zones
        ),
        parameters={tp: prefix_sums(costs.parameters(tp)) for tp in DEGREES},
        kept={
            tp: prefix_sums(costs.kept_bytes(tp=tp, samples=1, recompute="none") / width)
            for tp in DEGREES
        },
        outputs=np.array([costs.output_bytes(k) / width for k in range(costs.layer_count)]),
        send_s=links.send_s,
        top_speed=links.top_speed,
        egress_usd_per_byte=links.egress_usd_per_byte,
    )


def _kind(case: Case, fleet: Fleet, mode: Mode) -> MeasuredGpu:
    seconds: dict[tuple[int, int], Floats] = {}
    update_s: dict[tuple[int, int], float] = {}
    job, costs, profile = case.job, case.costs, case.costs.profile
    as_measured = (
        profile is not None
        and (profile.sequence, profile.precision) == (job.sequence, job.precision)
        and bool(profile.degrees(fleet.gpu))
    )
    size = fleet.gpus_per_machine
    if mode == "published":
        # Kept from the original: a machine with fewer GPUs up is still asked for all of its GPUs.
        size = max(p.gpus_per_machine for p in case.cluster.pools if p.gpu == fleet.gpu)
    for tp in tp_degrees(case, size):
        if tp not in DEGREES:
            continue
        sizes: Sequence[int] = micro_batch_sizes(job)
        if as_measured and profile is not None:
            measured = profile.micro_batches(fleet.gpu, tp)
            sizes = [b for b in job.micro_batches or measured if b in measured]
        for b in sizes:
            if as_measured and profile is not None:
                timing = profile.timings[fleet.gpu, tp, b]
                seconds[tp, b] = prefix_sums(timing.forward_s + timing.backward_s)
                update_s[tp, b] = timing.optimizer_s or 0.0
            else:
                times = costs.times(fleet.gpu, tp=tp, samples=b)
                seconds[tp, b] = prefix_sums(times.forward + times.backward)
                each = float(costs.parameters(tp).mean())
                update_s[tp, b] = times.optimizer_s_per_parameter * each
    price = case.facts.price_usd_per_gpu_hour(fleet.place) or 0.0
    capacity = float(case.cluster.catalogue.gpu(fleet.gpu).memory_bytes)
    return MeasuredGpu(fleet.gpu, price / 3600, capacity, seconds, update_s)


class _Links:
    """Times and prices of links between (zone, GPU kind, TP degree)."""

    def __init__(self, case: Case, zones: Sequence[str], kinds: Sequence[str], mode: Mode) -> None:
        self.case, self.zones, self.kinds, self.mode = case, zones, kinds, mode
        self.places = {(p.zone, p.gpu): p.place for p in case.cluster.pools}
        self.known: dict[tuple[End, End, float], float] = {}

    def send_s(self, one: End, other: End, size: float) -> float:
        """Seconds of a message, by the unclamped fitted curve where there is one."""
        key = (one, other, size)
        if key not in self.known:
            self.known[key] = self._send_s(one, other, size)
        return self.known[key]

    def _send_s(self, one: End, other: End, size: float) -> float:
        curve = self._curve(one, other)
        if curve is None or curve.polynomial is None:
            ends = self._place(one), self._place(other)
            return self.case.network.between_nodes(*ends, flows=1, bytes_each=size)
        speed = curve.polynomial_bytes_per_s(size)
        if speed <= 0 and self.mode == "fixed":
            return math.inf
        return size / speed if speed else math.inf

    def top_speed(self, one: End, other: End) -> float:
        curve = self._curve(one, other)
        if curve is not None:
            return curve.flows * curve.sizes_bytes[-1] / curve.seconds[-1]
        return PROBE_BYTES / self._send_s(one, other, PROBE_BYTES)

    def egress_usd_per_byte(self, one: int, other: int) -> float:
        return self.case.network.egress_usd_per_byte(self.zones[one], self.zones[other])

    def _curve(self, one: End, other: End) -> Curve | None:
        sides = [(self.zones[zone], self.kinds[kind]) for zone, kind, _ in (one, other)]
        curves = self.case.network.measured.raw_between.get((sides[0], sides[1]), {})
        return curves.get((one[2], other[2]))

    def _place(self, end: End) -> Place:
        zone, kind, _ = end
        gpu = self.kinds[kind]
        # The search also asks about kinds that a zone lacks; any machine of the kind will do.
        return self.places.get((self.zones[zone], gpu)) or Place(
            gpu, next(p.machine for p in self.places.values() if p.gpu == gpu), self.zones[zone]
        )


def to_plan(
    found: Sosp25Plan, case: Case, fleets: Sequence[Fleet], zones: Sequence[str]
) -> Plan | str:
    """The plan, or why it cannot be expressed."""
    replicas = sum(count for _, count in found.columns[0])
    counts = even_counts(case.job, size=found.micro_batch, pipelines=replicas)
    if isinstance(counts, str):
        return counts
    recompute = recompute_of(case.job)
    wanted: dict[tuple[int, int], list[int]] = {}
    for column in found.columns:
        for (zone, kind, tp), count in column:
            wanted.setdefault((zone, kind), []).extend([tp] * count)
    places: dict[tuple[int, int], Iterator[Place]] = {}
    for (zone, kind), tps in wanted.items():
        here = [one for one in fleets[kind].machines if one[0].zone == zones[zone]]
        handed = Fleet(fleets[kind].gpu, tuple(here)).hand_out(tps) if here else None
        if handed is None:
            return f"it uses more {fleets[kind].gpu} than fit the machines of {zones[zone]}"
        places[zone, kind] = iter(handed)
    columns = [
        [
            Stage(layers, tp, (next(places[zone, kind]),), recompute)
            for (zone, kind, tp), count in column
            for _ in range(count)
        ]
        for layers, column in zip(pairwise(found.cuts), found.columns, strict=True)
    ]
    pipelines = zip(counts, zip(*columns, strict=True), strict=True)
    return Plan(found.micro_batch, tuple(Pipeline(n, stages) for n, stages in pipelines))


class SailorPaperPlanner:
    """The published planner, with its own estimates of time and memory."""

    name = "sailor-paper"

    def proposals(self, case: Case, mode: Mode) -> Sequence[ProposedPlan]:
        """Its plans, best first, by time or dollars according to the job's goal."""
        fleets = [fleet for fleet in fleets_of(case) if _kind(case, fleet, mode).seconds]
        if mode == "fixed":
            fleets.sort(key=lambda fleet: -fleet.gpus)
        fleets = sorted(fleets[:KINDS_MAX], key=lambda fleet: fleet.gpu)
        if not fleets:
            return []
        inputs = inputs_from(case, fleets, mode)
        zones = [zone for zone, _, _ in inputs.zones]
        objective = case.job.objective
        if objective.goal == "cost":
            least = objective.min_iterations_per_s
            goal = Sosp25Goal(by_cost=True, seconds_max=1 / least if least else math.inf)
        else:
            goal = Sosp25Goal(usd_max=objective.max_usd_per_iteration or math.inf)
        found = dict.fromkeys(search(inputs, goal, mode))
        return [
            replace(proposal(one.seconds, to_plan(one, case, fleets, zones)), usd=one.usd)
            for one in found
        ]


def _gpus(fleet: Fleet, zone: str) -> int:
    return sum(size for place, size in fleet.machines if place.zone == zone)
