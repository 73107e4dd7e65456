"""Galvatron: a TP and data degree for every layer, by a knapsack over each stage's memory.

For each number of micro batches and power-of-two pipeline depth the layers are cut evenly, and a
dynamic program over whole megabytes chooses the strategy of each layer (Miao and others, VLDB
2023). It supports one kind of layer and equal devices, so it runs once per GPU kind, on the largest
power of two of them. Embedding and head count in memory only; transfers between stages are free.
Sharded parameters and recomputation, which it could also choose, are left out: the plan format has
no sharded parameters, and the published comparison switched both off.

``published`` drops a number of micro batches as soon as one depth would make micro batches of a
size that was not profiled (below 1 does not count), and gives all layers of a plan the first one's
strategy; ``fixed`` drops that depth alone and keeps the strategy of each stage. Both keep one plan
per number of micro batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from planner.baselines.shared import equal_gpus, proposals
from planner.baselines.shared.equal_gpus import MB, Fleet, ReplicatedStage
from planner.compare.interface import Case, Mode, ProposedPlan
from simulator.estimate.memory import state_bytes_per_parameter
from simulator.models.layers import FLOAT_BYTES
from simulator.spec.job import Job
from simulator.spec.plan import Plan

MICRO_BATCHES = (1, 2, 4)
"""Sizes of micro batch per device that were profiled; others are not considered."""
LARGE_MEMORY_MB = 20 * 1024
RESERVED_SHARE = 0.2
"""Share of the memory that stays free on GPUs with more than ``LARGE_MEMORY_MB``."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of embedding and head: a fixed part, and one per sample."""

    states_mb: float
    activation_mb: float


@dataclass(frozen=True, slots=True)
class GalvatronInputs:
    """Galvatron's inputs for a job on equal devices; sizes in MB of 2^20 bytes."""

    layers: int
    forward_ms: float
    """Forward of a layer for one sample on one device; TP divides it evenly (quirk, kept)."""
    parameter_mb: float
    activation_mb: Mapping[int, float]
    """Activations of a layer for one sample, by TP degree."""
    sequence: int
    hidden: int
    whole: Memory
    """Embedding and head in a pipeline of one stage."""
    first: Memory
    last: Memory
    all_reduce_gb_per_s: Mapping[tuple[int, bool], float]
    """Bandwidth by group size, and whether its ranks are consecutive; 1 GB/s is 1 MB per ms."""
    batch: int
    devices: int
    """A power of two."""
    memory_mb: int
    tp_max: int = 4
    chunk_counts: tuple[int, ...] = (1, 2, 4, 8, 16)
    overlap_slowdown: float = 1.3
    states_per_parameter: float = 4.0
    """Weight, gradient and two moments; the published comparison counted 1."""
    context_mb: float = 1024.0


@dataclass(frozen=True, slots=True)
class Strategy:
    """How a layer uses its stage's devices."""

    t: int
    d: int
    consecutive: bool = True
    """Whether TP groups are neighbours, and so data-parallel groups are strided."""


@dataclass(frozen=True, slots=True)
class GalvatronPlan:
    """A pipeline of equal device counts, with a strategy per layer."""

    seconds: float
    chunks: int
    division: tuple[int, ...]
    """Layers of each stage."""
    strategies: tuple[Strategy, ...]


# Cost ------------------------------------------------------------------------------------------


def layer_seconds(
    inputs: GalvatronInputs, strategy: Strategy, samples: float, *, sync: bool = True
) -> float:
    """Seconds of a layer for the samples of all replicas; with ``sync``, in the last pass."""
    t, d = strategy.t, strategy.d
    forward = inputs.forward_ms * (samples / d) / t
    backward = 2 * forward
    tp_ms = 0.0
    if t > 1:
        # Four all-reduces of four bytes an element.
        message = 2 * (t - 1) / t * (samples / d) * inputs.sequence * inputs.hidden * 16 / MB
        tp_ms = message / _bandwidth(inputs, strategy, of_tp=True)
    sync_ms = 0.0
    if sync and d > 1:
        message = 2 * (d - 1) / d * inputs.parameter_mb / t
        sync_ms = message / _bandwidth(inputs, strategy, of_tp=False)
    if t == 1 or d == 1 or t < t * d // 2:
        milliseconds = forward + _overlap_ms(inputs, backward, sync_ms) + tp_ms
    else:
        # Wide TP leaves only half of the backward pass to hide gradient sums behind.
        half = backward / 2
        milliseconds = forward + half + _overlap_ms(inputs, half, sync_ms) + tp_ms
    return milliseconds / 1000


def _bandwidth(inputs: GalvatronInputs, strategy: Strategy, *, of_tp: bool) -> float:
    table = inputs.all_reduce_gb_per_s
    ranks = strategy.t if of_tp else strategy.d
    if strategy.t == 1 or strategy.d == 1:
        return table[ranks, True]
    return table[ranks, strategy.consecutive == of_tp]


def _overlap_ms(inputs: GalvatronInputs, compute_ms: float, sync_ms: float) -> float:
    """Compute and sums slow each other down while both run; then the longer one runs alone."""
    both = min(compute_ms, sync_ms)
    return both * inputs.overlap_slowdown + max(compute_ms, sync_ms) - both


def pipeline_seconds(
    inputs: GalvatronInputs, strategies: Sequence[Strategy], *, division: Sequence[int], chunks: int
) -> float:
    """Iteration time: the slowest stage's pace, plus gradient sums that are not hidden."""
    samples = inputs.batch / chunks
    ends = list(accumulate(division, initial=0))
    passes, last_passes = (
        [
            sum(layer_seconds(inputs, s, samples, sync=sync) for s in strategies[first:end])
            for first, end in pairwise(ends)
        ]
        for sync in (False, True)
    )
    drained = accumulate(passes)
    late = max(last - done for last, done in zip(last_passes, drained, strict=True))
    return max(passes) * (chunks - 1 + len(division)) + max(0.0, late)


def layer_mb(
    inputs: GalvatronInputs, strategy: Strategy, *, stage: int, stages: int, chunks: int
) -> float:
    """Memory of a layer on one device: states, and the activations of the samples in flight."""
    states = inputs.parameter_mb * inputs.states_per_parameter / strategy.t
    held = inputs.batch / strategy.d * _in_flight_share(stage, stages, chunks)
    return states + inputs.activation_mb[strategy.t] * held


def other_mb(inputs: GalvatronInputs, *, stage: int, stages: int, chunks: int) -> float:
    """Memory of a stage's devices apart from its layers."""
    if stages == 1:
        other = inputs.whole
    elif stage == 0:
        other = inputs.first
    elif stage == stages - 1:
        other = inputs.last
    else:
        other = Memory(0.0, 0.0)
    held = inputs.batch / (inputs.devices // stages) * _in_flight_share(stage, stages, chunks)
    return other.states_mb + other.activation_mb * held + inputs.context_mb


def _in_flight_share(stage: int, stages: int, chunks: int) -> float:
    return min(stages - stage, chunks) / chunks


def switch_seconds(
    inputs: GalvatronInputs, before: Strategy, after: Strategy, samples: float
) -> float:
    """Seconds to convert a layer's output to the layout that the next strategy needs."""
    t, both = after.t, before.t > 1 < before.d and after.t > 1 < after.d
    other_ranks = both and before.consecutive != after.consecutive
    if not (t > before.t or (other_ranks and t <= before.t)):
        return 0.0
    return (t - 1) / t * 2 * samples / after.d / _bandwidth(inputs, after, of_tp=True) * 0.001


# Search ----------------------------------------------------------------------------------------


def choose(
    memory: int,
    mb: Sequence[Sequence[int]],
    intra: Sequence[Sequence[float]],
    inter: Sequence[Sequence[float]],
) -> tuple[float, tuple[int, ...], int] | None:
    """The strategy of each layer that costs least within the memory, in whole megabytes.

    ``mb`` and ``intra`` are by layer and strategy, ``inter`` by the strategies of a layer and the
    next. Gives the cost, the strategies and the memory left, the first strategies among equals.
    """
    count, switch = len(intra[0]), np.array(inter)
    room = min(memory, sum(map(max, mb)))  # More than all can take makes no difference.
    cost = np.zeros((count, room + 1))
    came_from = []
    for layer, needs in enumerate(mb):
        reached = np.full((count, room + 1), np.inf)
        came = np.zeros((count, room + 1), dtype=np.int64)
        for s, need in enumerate(needs):
            if need <= room:
                paths = cost[:, : room + 1 - need] + (switch[:, [s]] if layer else 0.0)
                came[s, need:] = paths.argmin(axis=0)
                reached[s, need:] = paths.min(axis=0) + intra[layer][s]
        cost = reached
        came_from.append(came)
    s, left = int(cost[:, room].argmin()), room
    total = float(cost[s, room])
    if math.isinf(total):
        return None
    chosen = []
    for came, needs in zip(reversed(came_from), reversed(mb), strict=True):
        chosen.append(s)
        s, left = int(came[s, left]), left - needs[s]
    return total, tuple(reversed(chosen)), memory - room + left


def search(inputs: GalvatronInputs, *, mode: Mode = "fixed") -> list[GalvatronPlan]:
    """The best plan of each number of micro batches, best first."""
    plans = []
    for chunks in inputs.chunk_counts:
        found = [_plan(inputs, stages, chunks) for stages in _depths(inputs, chunks, mode)]
        fitting = [plan for plan in found if plan is not None]
        if fitting:
            plans.append(min(fitting, key=_rank))
    return sorted(plans, key=_rank)


def _rank(plan: GalvatronPlan) -> tuple[float, int, int]:
    """Sort by time; times that differ by rounding only go by fewer micro batches and stages."""
    return round(plan.seconds, 12), plan.chunks, len(plan.division)


def _depths(inputs: GalvatronInputs, chunks: int, mode: Mode) -> list[int]:
    """The numbers of stages whose micro batches have a profiled size."""
    depths = [p for p in _powers(inputs.devices) if p <= inputs.layers]
    size = {p: inputs.batch / (inputs.devices // p) / chunks for p in depths}
    if mode == "published" and any(size[p] >= 1 and size[p] not in MICRO_BATCHES for p in depths):
        return []  # The defect: one depth takes all others down with it.
    return [p for p in depths if size[p] in MICRO_BATCHES]


def _plan(inputs: GalvatronInputs, stages: int, chunks: int) -> GalvatronPlan | None:
    samples = inputs.batch / chunks
    options = list(strategies(inputs, stages))
    inter = [[switch_seconds(inputs, a, b, samples) for b in options] for a in options]
    intra = [layer_seconds(inputs, s, samples) for s in options]
    each = inputs.layers // stages
    division = (*([each] * (stages - 1)), inputs.layers - each * (stages - 1))
    memory = inputs.memory_mb
    if memory > LARGE_MEMORY_MB:
        memory = int(memory * (1 - RESERVED_SHARE))
    chosen: list[Strategy] = []
    for stage, layers in enumerate(division):
        left = memory - math.ceil(other_mb(inputs, stage=stage, stages=stages, chunks=chunks))
        if left < 0:
            return None
        needs = [
            math.ceil(layer_mb(inputs, s, stage=stage, stages=stages, chunks=chunks))
            for s in options
        ]
        found = choose(left, [needs] * layers, [intra] * layers, inter)
        if found is None:
            return None
        chosen += [options[s] for s in found[1]]
    seconds = pipeline_seconds(inputs, chosen, division=division, chunks=chunks)
    return GalvatronPlan(seconds, chunks, division, tuple(chosen))


def strategies(inputs: GalvatronInputs, stages: int) -> Iterator[Strategy]:
    """All ways to use the devices of one of ``stages`` stages, narrow TP first."""
    devices = inputs.devices // stages
    for t in _powers(min(devices, inputs.tp_max)):
        d = devices // t
        if t > 1 and d > 1:
            yield Strategy(t, d, consecutive=False)
        yield Strategy(t, d)


def _powers(most: int) -> list[int]:
    return [1 << k for k in range(most.bit_length())]


# Conversion to and from the planner's interface ------------------------------------------


def inputs_from(case: Case, fleet: Fleet) -> GalvatronInputs:
    """Galvatron's inputs for a fleet."""
    job, costs = case.job, case.costs
    width = FLOAT_BYTES[job.precision]
    blocks = slice(1, costs.layer_count - 1)
    degrees = equal_gpus.tp_degrees(case, fleet.gpus_per_machine)
    parameter_mb = width * costs.parameters(1) / MB
    recompute = equal_gpus.recompute_of(job)
    asked: dict[str, Any] = {"samples": 1, "recompute": recompute, "gpu": fleet.gpu}
    kept = {t: costs.kept_bytes(tp=t, **asked) / MB for t in degrees}
    forward = costs.times(fleet.gpu, tp=1, samples=1).forward
    states = state_bytes_per_parameter(job) / width
    first = Memory(states * float(parameter_mb[0]), float(kept[1][0]))
    last = Memory(states * float(parameter_mb[-1]), float(kept[1][-1]))
    whole = Memory(
        first.states_mb + last.states_mb - states * costs.tied_parameters(1) * width / MB,
        first.activation_mb + last.activation_mb,
    )
    devices = 1 << (fleet.gpus.bit_length() - 1)
    chunks = [c for c in _powers(job.global_batch) if job.global_batch % c == 0]
    return GalvatronInputs(
        layers=costs.layer_count - 2,
        forward_ms=1e3 * float(forward[blocks].mean()),
        parameter_mb=float(parameter_mb[blocks].mean()),
        activation_mb={t: float(kept[t][blocks].mean()) for t in degrees},
        sequence=job.sequence,
        hidden=job.model.hidden,
        whole=whole,
        first=first,
        last=last,
        all_reduce_gb_per_s=_all_reduce_table(case, fleet, devices),
        batch=job.global_batch,
        devices=devices,
        memory_mb=int(case.facts.capacity_bytes(fleet.place) / MB),
        tp_max=max(degrees),
        chunk_counts=tuple(chunks),
        states_per_parameter=states,
    )


def _all_reduce_table(case: Case, fleet: Fleet, devices: int) -> dict[tuple[int, bool], float]:
    """Consecutive ranks share a machine while they fit; strided ones only if all ranks do."""
    between = equal_gpus.fleet_bytes_per_s(case, fleet) / MB / 1e3
    size, within = fleet.gpus_per_machine, math.inf
    if size > 1:
        message = 64e6
        seconds = case.network.within_node(fleet.place, gpus=size, bytes_each=message)
        within = message / seconds / MB / 1e3
    return {
        (ranks, consecutive): within if (ranks if consecutive else devices) <= size else between
        for ranks in _powers(devices)
        for consecutive in (False, True)
    }


def to_plan(own: GalvatronPlan, job: Job, fleet: Fleet, *, mode: Mode = "fixed") -> Plan | str:
    """The plan, or why it cannot be expressed; embedding and head join the ends."""
    ends = list(accumulate(own.division, initial=0))
    samples, rest = divmod(job.global_batch, own.chunks)
    if rest:
        return f"{own.chunks} micro batches do not divide the global batch of {job.global_batch}"
    shapes = []
    for stage, (first, end) in enumerate(pairwise(ends)):
        mine = {(s.t, s.d) for s in own.strategies[first:end]}
        if mode == "published":  # The defect: the first layer speaks for all.
            mine = {(own.strategies[0].t, own.strategies[0].d)}
        if len(mine) > 1:
            return f"the layers of stage {stage} differ in their TP degree"
        ((t, d),) = mine
        whole = (first + (stage > 0), end + 1 + (stage == len(own.division) - 1))
        shapes.append(ReplicatedStage(whole, t, d, equal_gpus.recompute_of(job)))
    if any(samples % shape.replicas for shape in shapes):
        return f"its micro batches of {samples} samples do not divide among the replicas"
    rows = equal_gpus.folded(shapes)
    return equal_gpus.placed_plan(fleet, job, rows, size=samples // len(rows))


@dataclass(frozen=True, slots=True)
class GalvatronPlanner:
    """Galvatron, run once per GPU kind."""

    name: str = "galvatron"

    def proposals(self, case: Case, mode: Mode) -> list[ProposedPlan]:
        """The plans of all kinds, best first by Galvatron's estimate."""
        found = []
        if case.costs.layer_count < 3:
            return []  # No block between the embedding and the head.
        for fleet in equal_gpus.fleets_of(case):
            inputs = inputs_from(case, fleet)
            for own in search(inputs, mode=mode):
                plan = to_plan(own, case.job, fleet, mode=mode)
                found.append((inputs.devices, proposals.proposal(own.seconds, plan)))
        return proposals.ranked(found)
