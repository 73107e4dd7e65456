"""Piper: minimises the slowest stage over all boundaries, data degrees, TP and recomputation.

A dynamic program over suffixes of the layer chain (Tarnawski, Narayanan, Phanishayee, NeurIPS
2021). It supports equal devices and one bandwidth, so it runs once per GPU kind; a sample is a
micro batch, so it runs once per micro batch size. A stage for which Piper would recompute only some
layers cannot be expressed.

``published`` uses one micro batch size (the smallest) and gives one plan; ``fixed`` tries all sizes
and gives the best plan for every number of devices and sum of data degrees at which more of them
help. Both keep Piper's quirks: filling and draining the pipeline are free, gradients are summed as
through a parameter server, and a layer has at most two variants.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from planner.baselines.shared import equal_gpus, proposals
from planner.baselines.shared.equal_gpus import Fleet, ReplicatedStage
from planner.compare.interface import Case, Mode, ProposedPlan
from planner.problem.job_options import recompute_choices
from simulator.arrays import Floats, Ints
from simulator.estimate.memory import state_bytes_per_parameter
from simulator.models.layers import FLOAT_BYTES, Recompute
from simulator.spec.job import Job
from simulator.spec.plan import Plan

SYNC_FACTOR = 4.0
"""Times that a replica moves its parameters per batch (quirk, kept: a ring moves them twice)."""
TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run a layer on one TP degree: plainly, or with its forward pass repeated."""

    seconds: float
    """Forward and backward of one sample."""
    parameter_bytes: float
    kept_bytes: float
    """Bytes kept for each sample in flight."""
    fixed_bytes: float
    sync_bytes: float = 0.0
    """What its TP ranks add to what crosses a cut next to it."""


@dataclass(frozen=True, slots=True)
class PiperInputs:
    """Piper's inputs for a job on equal devices."""

    layers: tuple[Mapping[int, tuple[Variant, ...]], ...]
    """One or two variants of each layer, by TP degree."""
    edge_bytes: tuple[float, ...]
    """What a sample sends behind each layer but the last; it is charged once per direction."""
    bandwidth_bytes_per_s: float
    devices: int
    micro_batches: int
    memory_bytes: float


@dataclass(frozen=True, slots=True)
class PiperStage:
    """Layers ``first`` to ``last``, both inclusive, on ``d`` replicas of ``t`` devices."""

    first: int
    last: int
    d: int
    t: int
    variants: tuple[int, ...]
    """The chosen variant of each layer: 0 plain, 1 recomputed."""


@dataclass(frozen=True, slots=True)
class PiperPlan:
    """Stages from first to last, and the seconds per sample in the steady state."""

    seconds_per_sample: float
    stages: tuple[PiperStage, ...]

    @property
    def devices(self) -> int:
        return sum(stage.d * stage.t for stage in self.stages)


# Cost ------------------------------------------------------------------------------------------


def stage_seconds(inputs: PiperInputs, stage: PiperStage) -> float:
    """Seconds per sample that a stage adds: work, both cut edges, its share of gradient sums."""
    bandwidth, d = inputs.bandwidth_bytes_per_s, stage.d
    chosen = _variants_of(inputs, stage)
    cut = 0.0
    if stage.first > 0:
        cut += 2 * (inputs.edge_bytes[stage.first - 1] + chosen[0].sync_bytes)
    if stage.last < len(inputs.layers) - 1:
        cut += 2 * (inputs.edge_bytes[stage.last] + chosen[-1].sync_bytes)
    weights = sum(variant.parameter_bytes for variant in chosen)
    sync = SYNC_FACTOR * (d - 1) * weights / (d * inputs.micro_batches * bandwidth)
    return sum(variant.seconds for variant in chosen) / d + cut / (d * bandwidth) + sync


def plan_seconds(inputs: PiperInputs, stages: Sequence[PiperStage]) -> float:
    """Seconds per sample: those of the slowest stage (quirk, kept: no fill, no drain)."""
    return max(stage_seconds(inputs, stage) for stage in stages)


def in_flight(stages: Sequence[PiperStage], index: int) -> int:
    """The most samples that a replica of a stage holds: those that later stages work on."""
    return math.ceil(sum(stage.d for stage in stages[index:]) / stages[index].d)


def stage_bytes(inputs: PiperInputs, stage: PiperStage, *, in_flight: int) -> float:
    """Memory of one device of a stage."""
    return sum(_bytes(variant, in_flight) for variant in _variants_of(inputs, stage))


def _variants_of(inputs: PiperInputs, stage: PiperStage) -> list[Variant]:
    layers = inputs.layers[stage.first : stage.last + 1]
    return [layer[stage.t][v] for layer, v in zip(layers, stage.variants, strict=True)]


def _bytes(variant: Variant, in_flight: int) -> float:
    return variant.kept_bytes * in_flight + variant.fixed_bytes


def choose_variants(
    layers: Sequence[tuple[Variant, ...]], *, in_flight: int, memory_bytes: float
) -> tuple[int, ...] | None:
    """The fastest variants, then the cheapest swaps that save memory until it fits.

    The last swap may save more than needed; ``None`` if even the smallest variants do not fit.
    """
    fastest = [[one.seconds for one in v].index(min(one.seconds for one in v)) for v in layers]
    used = sum(_bytes(v[i], in_flight) for v, i in zip(layers, fastest, strict=True))
    if used <= memory_bytes:
        return tuple(fastest)
    swaps = []
    for index, (variants, fast) in enumerate(zip(layers, fastest, strict=True)):
        for other in range(len(variants)):
            saved = _bytes(variants[fast], in_flight) - _bytes(variants[other], in_flight)
            if saved > 0:
                extra = variants[other].seconds - variants[fast].seconds
                swaps.append((extra / saved, index, other, saved))
    if used - sum(saved for *_, saved in swaps) > memory_bytes:
        return None
    for _, index, other, saved in sorted(swaps):
        fastest[index] = other
        used -= saved
        if used <= memory_bytes:
            break
    return tuple(fastest)


# Search ----------------------------------------------------------------------------------------


def search(inputs: PiperInputs, *, mode: Mode = "fixed") -> list[PiperPlan]:
    """The best plan, or with ``fixed`` that of each frontier point, the fastest first."""
    tables = _Tables(inputs)
    final = tables.best[0]
    if not np.isfinite(final).any():
        return []
    if mode == "published":
        # The smallest budgets win among equals: no device is used that does not help.
        points = np.argwhere(final <= final.min() + TOLERANCE)[:1]
    else:
        fewer_devices = np.full_like(final, np.inf)
        fewer_devices[1:] = final[:-1]
        fewer_replicas = np.full_like(final, np.inf)
        fewer_replicas[:, 1:] = final[:, :-1]
        points = np.argwhere(final < np.minimum(fewer_devices, fewer_replicas))
    found = {tables.stages(int(k), int(s)): float(final[k, s]) for k, s in points}
    plans = [PiperPlan(seconds, stages) for stages, seconds in found.items()]
    return sorted(plans, key=lambda plan: (plan.seconds_per_sample, plan.devices))


class _Tables:
    """Per suffix of the layers, the least largest stage time within k devices and s replicas.

    ``raw`` judges the first stage's memory as if all s replicas were used, as the recurrence does;
    ``best`` is the least over these and all smaller budgets.
    """

    def __init__(self, inputs: PiperInputs) -> None:
        self.inputs = inputs
        self.count = len(inputs.layers)
        replicas = min(inputs.micro_batches, inputs.devices)
        degrees = [d for d in range(1, replicas + 1) if inputs.micro_batches % d == 0]
        self.widths = sorted({t for layer in inputs.layers for t in layer})
        self.moves = [
            (end, d, t)
            for end in range(1, self.count + 1)
            for t in self.widths
            for d in degrees
            if d * t <= inputs.devices
        ]
        self.rows, self.columns = inputs.devices + 1, replicas + 1
        self._variants: dict[tuple[int, int, int, int], tuple[int, ...] | None] = {}
        self._seconds: dict[PiperStage, float] = {}
        self.raw: dict[int, Floats] = {}
        self.move: dict[int, Ints] = {}
        self.best: dict[int, Floats] = {self.count: np.zeros((self.rows, self.columns))}
        for first in reversed(range(self.count)):
            self._extend(first)

    def _extend(self, first: int) -> None:
        rows, columns = self.rows, self.columns
        raw = np.full((rows, columns), np.inf)
        move = np.full((rows, columns), -1)
        for number, (end, d, t) in enumerate(self.moves):
            if end <= first:
                continue
            stage = np.array([self._load(first, end, d, t, s) for s in range(d, columns)])
            load = np.maximum(self.best[end][: rows - d * t, : columns - d], stage)
            better = load < raw[d * t :, d:]
            raw[d * t :, d:][better] = load[better]
            move[d * t :, d:][better] = number
        self.raw[first], self.move[first] = raw, move
        self.best[first] = np.minimum.accumulate(np.minimum.accumulate(raw, axis=0), axis=1)

    def _load(self, first: int, end: int, d: int, t: int, s: int) -> float:
        stage = self._stage(first, end, d, t, s)
        if stage is None:
            return math.inf
        if stage not in self._seconds:
            self._seconds[stage] = stage_seconds(self.inputs, stage)
        return self._seconds[stage]

    def _stage(self, first: int, end: int, d: int, t: int, s: int) -> PiperStage | None:
        """The stage as it fits in memory when it and all later ones are ``s`` replicas."""
        held = -(-s // d)
        key = (first, end, t, held)
        if key not in self._variants:
            layers = self.inputs.layers[first:end]
            self._variants[key] = (
                choose_variants(
                    [layer[t] for layer in layers],
                    in_flight=held,
                    memory_bytes=self.inputs.memory_bytes,
                )
                if all(t in layer for layer in layers)
                else None
            )
        variants = self._variants[key]
        return None if variants is None else PiperStage(first, end - 1, d, t, variants)

    def stages(self, k: int, s: int) -> tuple[PiperStage, ...]:
        """Trace a budget back to the stages that reach its best value."""
        found: list[PiperStage] = []
        first = 0
        while first < self.count:
            reached = self.raw[first][: k + 1, : s + 1] == self.best[first][k, s]
            k, s = (int(axis[0]) for axis in np.nonzero(reached))
            end, d, t = self.moves[self.move[first][k, s]]
            stage = self._stage(first, end, d, t, s)
            assert stage is not None, "the table has only stages that fit"
            found.append(stage)
            first, k, s = end, k - d * t, s - d
        return tuple(found)


# Conversion to and from the planner's interface ------------------------------------------


def inputs_from(case: Case, fleet: Fleet, *, micro_batch_size: int) -> PiperInputs:
    """Piper's inputs for a fleet; its sample is one micro batch of that size."""
    job, costs = case.job, case.costs
    count = costs.layer_count
    layers: list[dict[int, tuple[Variant, ...]]] = [{} for _ in range(count)]
    for t in equal_gpus.tp_degrees(case, fleet.gpus_per_machine):
        times = costs.times(fleet.gpu, tp=t, samples=micro_batch_size)
        parameters = costs.parameters(t)
        kept = {
            way: costs.kept_bytes(tp=t, samples=micro_batch_size, recompute=way, gpu=fleet.gpu)
            for way in recompute_choices(job)
        }
        for i in range(count):
            ahead, back = float(times.forward[i]), float(times.backward[i])
            again = ahead if i < count - 1 else 0.0  # Nothing lies between the head's passes.
            layers[i][t] = tuple(
                Variant(
                    seconds=ahead + back + (again if way == "full" else 0.0),
                    parameter_bytes=FLOAT_BYTES[job.precision] * float(parameters[i]),
                    kept_bytes=float(kept[way][i]),
                    fixed_bytes=state_bytes_per_parameter(job) * float(parameters[i]),
                )
                for way in kept
            )
    return PiperInputs(
        layers=tuple(layers),
        edge_bytes=tuple(micro_batch_size * costs.output_bytes(i) for i in range(count - 1)),
        bandwidth_bytes_per_s=equal_gpus.fleet_bytes_per_s(case, fleet),
        devices=fleet.gpus,
        micro_batches=job.global_batch // micro_batch_size,
        memory_bytes=case.facts.capacity_bytes(fleet.place),
    )


def to_plan(
    own: PiperPlan, inputs: PiperInputs, job: Job, fleet: Fleet, *, micro_batch_size: int
) -> Plan | str:
    """The plan, or why it cannot be expressed.

    Piper gives whole samples to replicas in turn, as pipelines do. There are as many pipelines as
    divide all degrees; the rest of a degree splits a micro batch, which grows accordingly.
    """
    shapes = []
    for stage in own.stages:
        layers = inputs.layers[stage.first : stage.last + 1]
        # A layer that keeps as much either way is never swapped, and is the same either way.
        matters = [
            variant
            for layer, variant in zip(layers, stage.variants, strict=True)
            if len({_bytes(one, 1) for one in layer[stage.t]}) > 1
        ]
        if len(set(matters)) > 1:
            return f"recomputes {sum(matters)} of the layers {stage.first} to {stage.last} only"
        recompute: Recompute = "full" if job.recompute == "full" or any(matters) else "none"
        shapes.append(ReplicatedStage((stage.first, stage.last + 1), stage.t, stage.d, recompute))
    rows = equal_gpus.folded(shapes)
    size = micro_batch_size * math.lcm(*(shape.replicas for shape in rows[0]))
    return equal_gpus.placed_plan(fleet, job, rows, size=size)


@dataclass(frozen=True, slots=True)
class PiperPlanner:
    """Piper, run once per GPU kind."""

    name: str = "piper"

    def proposals(self, case: Case, mode: Mode) -> list[ProposedPlan]:
        """The plans of all kinds and micro batch sizes, best first by Piper's estimate."""
        found = []
        sizes = proposals.micro_batch_sizes(case.job)
        for fleet in equal_gpus.fleets_of(case):
            for size in sizes[:1] if mode == "published" else sizes:
                inputs = inputs_from(case, fleet, micro_batch_size=size)
                for own in search(inputs, mode=mode):
                    plan = to_plan(own, inputs, case.job, fleet, micro_batch_size=size)
                    seconds = own.seconds_per_sample * inputs.micro_batches
                    found.append((own.devices, proposals.proposal(seconds, plan)))
        return proposals.ranked(found)
