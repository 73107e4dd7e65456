"""Oobleck: a pipeline template for every number of nodes, and the best mix of templates.

Templates come from a divide and conquer over layers and nodes; instances of them fill all nodes,
with micro batches shared out so that all take about as long (Jang and others, SOSP 2023). It
supports equal nodes, so it runs once per GPU kind, on nodes with a power of two of GPUs. Its
recovery (a smaller template takes over, or nodes are borrowed or merged) is a policy for changes,
not a plan, and is left out; ``copies`` keeps templates small enough for that many of them.

In Oobleck's estimate the GPUs of a stage share its work; in our plan format that is tensor
parallelism where the job allows the degree, or else a split of each micro batch. Both modes are the
same, because none of its quirks is a defect. Templates and mixes are bounded by counts, small mixes
first, where the published program solves integer programs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, islice

import numpy as np

from planner.baselines.shared import equal_gpus, proposals
from planner.baselines.shared.equal_gpus import Fleet, ReplicatedStage
from planner.compare.interface import Case, Mode, ProposedPlan
from simulator.arrays import Floats
from simulator.models.layers import FLOAT_BYTES
from simulator.spec.job import Job
from simulator.spec.plan import Plan

STATES_PER_PARAMETER = 6
"""Copies of the parameters that Oobleck counts, to find the fewest nodes that hold the model."""


@dataclass(frozen=True, slots=True)
class OobleckInputs:
    """Oobleck's inputs for a job on equal nodes, in any unit of time."""

    forward: tuple[float, ...]
    """Time of each layer, for one micro batch on one GPU."""
    backward: tuple[float, ...]
    within: Mapping[int, tuple[float, ...]]
    """All-reduce of each layer by number of GPUs of a node, in powers of two."""
    between: tuple[float, ...]
    """All-reduce of the first layer by number of pipelines, from 0 on."""
    memory_bytes: tuple[float, ...]
    """Memory of each layer: 6 x its parameters, and its activations."""
    node_memory_bytes: float
    nodes: int
    gpus_per_node: int
    micro_batches: int
    copies: int = 1
    """Least number of pipelines: one more than the failures to survive."""
    template_nodes_max: int = 8
    mixes_max: int = 200


@dataclass(frozen=True, slots=True)
class OobleckTemplate:
    """A pipeline for a number of nodes: its stages as (first layer, last layer, GPUs)."""

    nodes: int
    time: float
    slowest: int
    stages: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Instances:
    """Equal pipelines of one template, each with its number of micro batches."""

    template: OobleckTemplate
    count: int
    micro_batches: int


@dataclass(frozen=True, slots=True)
class OobleckPlan:
    """A mix of templates that uses all nodes, and Oobleck's time for an iteration."""

    time: float
    mix: tuple[Instances, ...]


# Cost ------------------------------------------------------------------------------------------


def stage_time(inputs: OobleckInputs, first: int, last: int, gpus: int) -> float:
    """Forward and backward of a stage within one node, with an all-reduce per layer in each."""
    work = sum(inputs.forward[first : last + 1]) + sum(inputs.backward[first : last + 1])
    return work / gpus + 2 * sum(inputs.within[gpus][first : last + 1])


def pipeline_time(stages: Sequence[float]) -> tuple[float, int]:
    """The time of stages in a row, and the slowest of them; the last one among equals.

    The time is that of one micro batch in all stages, of the other micro batches in the slowest
    stage, and of one more from the slowest stage on. It counts two micro batches per stage, where
    the paper has four (quirk, kept).
    """
    if len(stages) == 1:
        return 4 * stages[0], 0  # Kept as published: the formula below would make it five.
    slowest = max(range(len(stages)), key=lambda i: (stages[i], i))
    steady = (2 * len(stages) + slowest + 1) * stages[slowest]
    return sum(stages) + steady + sum(stages[slowest:]), slowest


# Templates -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Pipelines:
    """The best pipelines with this many stages on some GPUs, for all layer ranges [row, column)."""

    total: Floats
    sum: Floats
    slowest: Floats
    slowest_index: Floats
    from_slowest: Floats
    parts: tuple[tuple[_Pipelines, _Pipelines], ...] = ()
    part: Floats | None = None
    cut: Floats | None = None
    gpus: int = 0
    """GPUs of a pipeline of a single stage."""
    stages: int = 1

    def split(self, first: int, end: int) -> list[tuple[int, int, int]]:
        """The stages of one range."""
        if self.part is None or self.cut is None:
            return [(first, end - 1, self.gpus)]
        left, right = self.parts[int(self.part[first, end])]
        cut = int(self.cut[first, end])
        return left.split(first, cut) + right.split(cut, end)


class OobleckTemplates:
    """Templates of one job, found by splitting nodes, then halving the GPUs of the last node."""

    def __init__(self, inputs: OobleckInputs) -> None:
        self.inputs = inputs
        self.layers = len(inputs.forward)
        self._found: dict[tuple[int, int, int], _Pipelines | None] = {}

    def template(self, nodes: int) -> OobleckTemplate | None:
        """The best pipeline for ``nodes`` nodes, the one with the fewest stages among equals."""
        best = None
        for stages in range(nodes, self.layers + 1):
            found = self._pipelines(stages, nodes, self.inputs.gpus_per_node)
            if found is None:
                continue
            time = float(found.total[0, self.layers])
            if math.isfinite(time) and (best is None or time < best.time):
                slowest = int(found.slowest_index[0, self.layers])
                best = OobleckTemplate(nodes, time, slowest, tuple(found.split(0, self.layers)))
        return best

    def _pipelines(self, stages: int, nodes: int, gpus: int) -> _Pipelines | None:
        key = (stages, nodes, gpus)
        if key not in self._found:
            self._found[key] = self._find(stages, nodes, gpus)
        return self._found[key]

    def _find(self, stages: int, nodes: int, gpus: int) -> _Pipelines | None:
        if stages < nodes or stages > nodes * gpus:
            return None
        if stages == 1:
            return self._one_stage(gpus) if gpus in self.inputs.within else None
        if nodes > 1:
            halves = [((n, gpus), (nodes - n, gpus)) for n in range(1, nodes)]
        else:
            halves = [((1, gpus // 2), (1, gpus // 2))] if gpus % 2 == 0 else []
        parts = []
        for here, there in halves:
            for s in range(1, stages):
                left, right = self._pipelines(s, *here), self._pipelines(stages - s, *there)
                if left is not None and right is not None:
                    parts.append((left, right))
        return _join(parts, stages) if parts else None

    def _one_stage(self, gpus: int) -> _Pipelines:
        time = np.full((self.layers + 1, self.layers + 1), np.inf)
        for first in range(self.layers):
            for end in range(first + 1, self.layers + 1):
                time[first, end] = stage_time(self.inputs, first, end - 1, gpus)
        return _Pipelines(4 * time, time, time, np.zeros_like(time), time, gpus=gpus)


def _join(parts: Sequence[tuple[_Pipelines, _Pipelines]], stages: int) -> _Pipelines:
    """The best of all ways to concatenate two pipelines, with any boundary."""
    shape = parts[0][0].total.shape
    best = [np.full(shape, np.inf) for _ in range(5)]
    chosen, cuts = np.zeros(shape), np.zeros(shape)
    for number, (left, right) in enumerate(parts):
        # Axes: first layer, cut, end. The left part's slowest must be slower to count.
        leads = left.slowest[:, :, None] > right.slowest[None]
        together = left.sum[:, :, None] + right.sum[None]
        slowest = np.maximum(left.slowest[:, :, None], right.slowest[None])
        index = np.where(
            leads, left.slowest_index[:, :, None], right.slowest_index[None] + left.stages
        )
        rest = np.where(
            leads, left.from_slowest[:, :, None] + right.sum[None], right.from_slowest[None]
        )
        time = together + (2 * stages + index + 1) * slowest + rest
        cut = time.argmin(axis=1)
        rows = [
            np.take_along_axis(values, cut[:, None], axis=1)[:, 0]
            for values in (time, together, slowest, index, rest)
        ]
        better = rows[0] < best[0]
        for kept, row in zip(best, rows, strict=True):
            kept[better] = row[better]
        chosen[better], cuts[better] = number, cut[better]
    total, together, slowest, index, rest = best
    return _Pipelines(
        total, together, slowest, index, rest, tuple(parts), chosen, cuts, stages=stages
    )


# Instances -------------------------------------------------------------------------------------


def search(inputs: OobleckInputs) -> list[OobleckPlan]:
    """Mixes of templates that use every node, at most ``mixes_max``, the fastest first."""
    fewest = math.ceil(sum(inputs.memory_bytes) / inputs.node_memory_bytes)
    most = min(
        inputs.nodes - (inputs.copies - 1) * fewest, inputs.template_nodes_max, len(inputs.forward)
    )
    templates = OobleckTemplates(inputs)
    found = [templates.template(nodes) for nodes in range(max(fewest, 1), most + 1)]
    known = [template for template in found if template is not None]
    return instantiate(inputs, known)


def instantiate(inputs: OobleckInputs, templates: Sequence[OobleckTemplate]) -> list[OobleckPlan]:
    """The first mixes of these templates that use every node, the fastest first."""
    plans = []
    for counts in islice(_mixes(templates, inputs.nodes), inputs.mixes_max):
        pipelines = sum(counts.values())
        shared = share_micro_batches(
            inputs.micro_batches,
            [counts[i] for i in counts],
            [templates[i].time / len(templates[i].stages) for i in counts],
        )
        if shared is None or pipelines < inputs.copies:
            continue
        mix = tuple(
            Instances(templates[i], count, share)
            for (i, count), share in zip(counts.items(), shared, strict=True)
        )
        # The whole template's time per micro batch is far too long (quirk, kept); it ranks only.
        time = max(one.template.time * one.micro_batches for one in mix)
        plans.append(OobleckPlan(time + inputs.between[pipelines], mix))
    return sorted(plans, key=lambda plan: plan.time)


def _mixes(templates: Sequence[OobleckTemplate], nodes: int) -> Iterator[dict[int, int]]:
    """How many of which templates use all nodes exactly, those of few kinds first."""
    for kinds in range(1, len(templates) + 1):
        for chosen in combinations(range(len(templates)), kinds):
            for counts in _positive_sums([templates[i].nodes for i in chosen], nodes):
                yield dict(zip(chosen, counts, strict=True))


def _positive_sums(weights: Sequence[int], total: int) -> Iterator[tuple[int, ...]]:
    """Positive counts whose weighted sum is the total, the most of the first weight last."""
    first, *rest = weights
    if not rest:
        if total > 0 and total % first == 0:
            yield (total // first,)
        return
    for count in range(1, (total - sum(rest)) // first + 1):
        for more in _positive_sums(rest, total - count * first):
            yield (count, *more)


def share_micro_batches(
    total: int, counts: Sequence[int], pace: Sequence[float]
) -> tuple[int, ...] | None:
    """Micro batches per instance, at least one, that make all kinds take about as long.

    They sum up to the total over all instances, with the least squared deviation of micro
    batches times pace. Looks around the share that would be exact without whole numbers, and
    farther until nothing better can lie outside.
    """
    if total < sum(counts) or total % math.gcd(*counts):
        return None
    even = total / sum(count / each for count, each in zip(counts, pace, strict=True))
    ideal = [even / each for each in pace]
    width = 1
    while True:
        near = [
            range(max(1, math.ceil(x - width)), min(total, math.floor(x + width)) + 1)
            for x in ideal
        ]
        best = min(
            ((deviation(shares, pace), shares) for shares in _sums(near, counts, total)),
            default=None,
        )
        # Two kinds differ by at most sqrt(2 x deviation), and so each from the even time.
        if best is not None and math.sqrt(2 * best[0]) <= width * min(pace):
            return best[1]
        if width > total:
            return None if best is None else best[1]
        width *= 2


def deviation(shares: Sequence[int], pace: Sequence[float]) -> float:
    """Sum of squared deviations of the kinds' times from their mean."""
    times = [share * each for share, each in zip(shares, pace, strict=True)]
    mean = sum(times) / len(times)
    return sum((time - mean) ** 2 for time in times)


def _sums(ranges: Sequence[range], counts: Sequence[int], total: int) -> Iterator[tuple[int, ...]]:
    (here, *ranges_left), (count, *counts_left) = ranges, counts
    if not ranges_left:
        if total % count == 0 and total // count in here:
            yield (total // count,)
        return
    for share in here:
        for more in _sums(ranges_left, counts_left, total - count * share):
            yield (share, *more)


# Conversion to and from the planner's interface ------------------------------------------


def inputs_from(case: Case, fleet: Fleet, *, micro_batch_size: int) -> OobleckInputs:
    """Oobleck's inputs for a fleet."""
    job, costs = case.job, case.costs
    size = 1 << (fleet.gpus_per_machine.bit_length() - 1)
    nodes = sum(gpus // size for _, gpus in fleet.machines)
    times = costs.times(fleet.gpu, tp=1, samples=micro_batch_size)
    sizes = FLOAT_BYTES[job.precision] * costs.parameters(1)
    recompute = equal_gpus.recompute_of(job)
    kept = costs.kept_bytes(tp=1, samples=micro_batch_size, recompute=recompute, gpu=fleet.gpu)
    bandwidth = equal_gpus.fleet_bytes_per_s(case, fleet)
    return OobleckInputs(
        forward=tuple(times.forward.tolist()),
        backward=tuple(times.backward.tolist()),
        within={
            gpus: tuple(
                case.network.all_reduce_within(fleet.place, gpus=gpus, total_bytes=float(one))
                for one in sizes
            )
            for gpus in (1 << k for k in range(size.bit_length()))
        },
        between=(
            0.0,
            *(2 * (n - 1) / n * float(sizes[0]) / bandwidth for n in range(1, nodes + 1)),
        ),
        memory_bytes=tuple((STATES_PER_PARAMETER * sizes + kept).tolist()),
        node_memory_bytes=size * case.facts.capacity_bytes(fleet.place),
        nodes=nodes,
        gpus_per_node=size,
        micro_batches=job.global_batch // micro_batch_size,
    )


def to_plan(
    own: OobleckPlan, job: Job, fleet: Fleet, *, micro_batch_size: int, degrees: Collection[int]
) -> Plan | str:
    """The plan, with TP of these degrees, or why it cannot be expressed."""
    recompute = equal_gpus.recompute_of(job)
    rows: list[list[ReplicatedStage]] = []
    weights: list[int] = []
    for one in own.mix:
        shapes = [
            ReplicatedStage((first, last + 1), gpus, 1, recompute)
            if gpus in degrees
            else ReplicatedStage((first, last + 1), 1, gpus, recompute)
            for first, last, gpus in one.template.stages
        ]
        rows += [shapes] * one.count
        weights += [one.micro_batches] * one.count
    size = math.lcm(micro_batch_size, *(shape.replicas for row in rows for shape in row))
    return equal_gpus.placed_plan(fleet, job, rows, size=size, weights=weights)


@dataclass(frozen=True, slots=True)
class OobleckPlanner:
    """Oobleck, run once per GPU kind."""

    name: str = "oobleck"

    def proposals(self, case: Case, mode: Mode) -> list[ProposedPlan]:
        """The plans of all kinds and micro batch sizes, best first; both modes are the same."""
        del mode
        found = []
        for fleet in equal_gpus.fleets_of(case):
            degrees = equal_gpus.tp_degrees(case, fleet.gpus_per_machine)
            for size in proposals.micro_batch_sizes(case.job):
                for own in search(inputs_from(case, fleet, micro_batch_size=size)):
                    plan = to_plan(own, case.job, fleet, micro_batch_size=size, degrees=degrees)
                    found.append((fleet.gpus, proposals.proposal(own.time, plan)))
        return proposals.ranked(found)
