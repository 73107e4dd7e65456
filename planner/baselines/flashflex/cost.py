"""FlashFlex's inputs, and its estimates of a plan's time and of a stage's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

GB = 2.0**30


@dataclass(frozen=True, slots=True)
class PlacedGpu:
    """One GPU: its machine, its speed, its memory, and its links to others in the machine."""

    machine: int
    flops: float
    memory_gb: float
    within_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class FlashFlexInputs:
    """FlashFlex's inputs."""

    devices: tuple[PlacedGpu, ...]
    between_bytes_per_s: float
    layers: int
    """Blocks only: embedding and head are not counted."""
    hidden: int
    sequence: int
    vocabulary: int
    value_bytes: int
    batch: int
    micro_batch: int = 1
    tp_degrees: tuple[int, ...] = (1, 2, 4, 8)

    def bytes_per_s(self, one: int, other: int) -> float:
        here, there = self.devices[one], self.devices[other]
        return (
            here.within_bytes_per_s if here.machine == there.machine else self.between_bytes_per_s
        )


@dataclass(frozen=True, slots=True)
class FlashFlexPipeline:
    """Stages of device numbers, with the blocks of each."""

    stages: tuple[tuple[int, ...], ...]
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FlashFlexPlan:
    """Pipelines, and their iteration time by FlashFlex's own formula."""

    seconds: float
    pipelines: tuple[FlashFlexPipeline, ...]


# Time ------------------------------------------------------------------------------------------


def stage_seconds(inputs: FlashFlexInputs, group: Sequence[int], layers: int) -> float:
    """Work of the blocks at the speed of the first device, and their TP all-reduces."""
    h, s, n = inputs.hidden, inputs.sequence, len(group)
    shape = 1 + s / (6 * h) + inputs.vocabulary / (16 * inputs.layers * h)
    work = 72 * inputs.micro_batch * s * h**2 * shape / (inputs.devices[group[0]].flops * n)
    return layers * (work + 8 * _slowest_sum(inputs, group, _message(inputs) / n))


def _message(inputs: FlashFlexInputs) -> float:
    return inputs.micro_batch * inputs.sequence * inputs.hidden * inputs.value_bytes


def _slowest_sum(inputs: FlashFlexInputs, group: Sequence[int], bytes_each: float) -> float:
    """Seconds for the worst connected member to send ``bytes_each`` to each of the others."""
    return max(
        sum(bytes_each / inputs.bytes_per_s(one, other) for other in group if other != one)
        for one in group
    )


def hop_seconds(inputs: FlashFlexInputs, before: Sequence[int], after: Sequence[int]) -> float:
    """Send a micro batch over the best link to the next stage and on to all of it, and back."""
    size = _message(inputs)
    return 2 * min(
        size / inputs.bytes_per_s(one, other)
        + sum(
            size / (len(after) * inputs.bytes_per_s(other, rest)) for rest in after if rest != other
        )
        for one in before
        for other in after
    )


def pipeline_seconds(
    inputs: FlashFlexInputs, pipeline: FlashFlexPipeline, micro_batches: int
) -> float:
    """The columns of a GPipe diagram, each as long as its longest active stage and hop."""
    times = [
        stage_seconds(inputs, group, layers)
        for group, layers in zip(pipeline.stages, pipeline.layers, strict=True)
    ]
    for stage, (before, after) in enumerate(pairwise(pipeline.stages)):
        times[stage] += hop_seconds(inputs, before, after)
    return sum(
        max(times[max(column - micro_batches, 0) : column])
        for column in range(1, micro_batches + len(times))
    )


def sync_seconds(inputs: FlashFlexInputs, pipelines: Sequence[FlashFlexPipeline]) -> float:
    """Summing the gradients of each block among the pipelines, block after block."""
    if len(pipelines) < 2:
        return 0.0
    holders = [
        [group for group, layers in zip(p.stages, p.layers, strict=True) for _ in range(layers)]
        for p in pipelines
    ]
    known: dict[tuple[tuple[int, ...], ...], float] = {}
    total = 0.0
    for groups in zip(*holders, strict=True):
        if groups not in known:
            most, least = max(map(len, groups)), min(map(len, groups))
            size = 12 * inputs.hidden**2 * inputs.value_bytes / (least * len(groups))
            # Quirk, kept: only as many rings count as the largest degree is times the smallest.
            rings = [[group[k % len(group)] for group in groups] for k in range(most // least)]
            known[groups] = sum(2 * _slowest_sum(inputs, ring, size) for ring in rings)
        total += known[groups]
    return total


def plan_seconds(inputs: FlashFlexInputs, pipelines: Sequence[FlashFlexPipeline]) -> float:
    """An iteration: the slowest pipeline, then the gradients."""
    micro_batches = -(-inputs.batch // (inputs.micro_batch * len(pipelines)))
    slowest = max(pipeline_seconds(inputs, p, micro_batches) for p in pipelines)
    return slowest + sync_seconds(inputs, pipelines)


# Memory ----------------------------------------------------------------------------------------


def stage_gb(
    inputs: FlashFlexInputs, layers: int, tp: int, *, first: bool, last: bool
) -> tuple[float, float]:
    """Memory of each device of a stage: parameters with states, a micro batch's activations."""
    h, e, sample = inputs.hidden, inputs.value_bytes, inputs.micro_batch * inputs.sequence
    values = 12 * h**2 * layers / tp
    if last:
        values += h + inputs.vocabulary * h
    if first:
        values += h * (inputs.vocabulary + inputs.sequence)
    return 4 * e * values / GB, e * (layers * sample * h / tp + 2 * sample * h) / GB


def fits(inputs: FlashFlexInputs, pipeline: FlashFlexPipeline) -> bool:
    """Whether every stage has the memory that it needs, by its devices' mean."""
    ends = len(pipeline.stages) - 1
    for index, (group, layers) in enumerate(zip(pipeline.stages, pipeline.layers, strict=True)):
        needs = stage_gb(inputs, layers, len(group), first=index == 0, last=index == ends)
        if sum(needs) > memory_gb(inputs, group) / len(group):
            return False
    return True


def memory_gb(inputs: FlashFlexInputs, group: Sequence[int]) -> float:
    """Total memory of a group's GPUs."""
    return sum(inputs.devices[device].memory_gb for device in group)
