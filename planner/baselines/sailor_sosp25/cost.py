"""The cost model inside the SOSP'25 paper's planner: time, memory and money of joined stages.

It differs from the closed formula that judges its plans (``simulator.estimate.paper_formula``):
stages are joined from the last to the first, a boundary counts by its activations in both
directions, gradients are synchronised at the speed between GPUs of the slowest kind, and the
optimizer step counts for plans of a single stage only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from simulator.arrays import Floats
from simulator.estimate.paper_formula import all_reduce_s

MOST_TP_SHARING_LINKS = 4
RING_USD_PER_BYTE = 0.01 / 1e9
"""The one price of bytes between the zones of a region."""

End = tuple[int, int, int]
"""A replica's side of a link: zone, GPU kind, TP degree."""
EndRun = tuple[End, int]
"""Replicas side by side that are alike."""


@dataclass(frozen=True, slots=True)
class MeasuredGpu:
    """A measured GPU kind."""

    name: str
    usd_per_s: float
    capacity_bytes: float
    seconds: Mapping[tuple[int, int], Floats]
    """Forward and backward up to each layer, by TP degree and micro batch."""
    update_s: Mapping[tuple[int, int], float]

    def degrees(self) -> list[int]:
        return sorted({tp for tp, _ in self.seconds})


@dataclass(frozen=True, slots=True, eq=False)
class Sosp25Inputs:
    """The algorithm's inputs."""

    global_batch: int
    float_bytes: int
    kinds: tuple[MeasuredGpu, ...]
    """Kinds in the order of their names: the first is treated apart."""
    zones: tuple[tuple[str, str, tuple[int, ...]], ...]
    """(zone, its region, GPUs of each kind)."""
    parameters: Mapping[int, Floats]
    """Up to each layer, by TP degree."""
    kept: Mapping[int, Floats]
    """Activations of one sample up to each layer, in numbers, by TP degree."""
    outputs: Floats
    """Activations that each layer hands on, in numbers."""
    send_s: Callable[[End, End, float], float]
    """Seconds of a message; the fits may turn negative for small ones."""
    top_speed: Callable[[End, End], float]
    egress_usd_per_byte: Callable[[int, int], float]

    @property
    def layers(self) -> int:
        return len(self.outputs)

    def micro_batches(self) -> list[int]:
        return sorted({b for kind in self.kinds for _, b in kind.seconds})


@dataclass(frozen=True, slots=True)
class PipelineTail:
    """The last stages of a pipeline with all their replicas, joined."""

    seconds: float
    straggler_s: float
    first_s: float
    compute_s: float
    messages_s: float
    sync_s: float
    usd_per_s: float
    traffic_usd: float
    column: tuple[EndRun, ...]
    rest: PipelineTail | None = None

    @property
    def usd(self) -> float:
        return self.usd_per_s * self.seconds + self.traffic_usd

    def columns(self) -> Iterator[tuple[EndRun, ...]]:
        part: PipelineTail | None = self
        while part is not None:
            yield part.column
            part = part.rest


@dataclass(frozen=True, slots=True)
class Sosp25Region:
    """The region that a stage's replicas are assumed to be in."""

    zones: tuple[int, ...]
    home: int | None = None
    """A defect of the published program, kept where given: all kinds count as in the region's first
    zone, and the link within it is taken instead of the slowest one to any zone."""


def stage_part(
    inputs: Sosp25Inputs,
    b: int,
    cut: tuple[int, int],
    column: tuple[EndRun, ...],
    region: Sosp25Region,
) -> PipelineTail:
    """One stage, treated as a whole plan."""
    first, end = cut
    replicas = sum(count for _, count in column)
    compute = update = usd_per_s = 0.0
    for (_, kind, tp), count in column:
        one = inputs.kinds[kind]
        row = one.seconds.get((tp, b))
        if row is not None:
            compute = max(compute, float(row[end] - row[first]))
            update = max(update, (end - first) * one.update_s[tp, b])
        usd_per_s += count * tp * one.usd_per_s
    parameters = inputs.parameters[1]
    gradient_bytes = inputs.float_bytes * float(parameters[end] - parameters[first])
    sync = traffic = 0.0
    if replicas > 1:
        sync = _sync_s(inputs, column, region, gradient_bytes, replicas)
        if len(region.zones) > 1:
            each = 2 * (replicas - 1) / replicas * gradient_bytes
            traffic = len(region.zones) * each * RING_USD_PER_BYTE
    most = math.ceil(inputs.global_batch / (b * replicas))
    seconds = most * compute + sync + update
    return PipelineTail(seconds, compute, compute, compute, 0.0, sync, usd_per_s, traffic, column)


def _sync_s(
    inputs: Sosp25Inputs,
    column: tuple[EndRun, ...],
    region: Sosp25Region,
    size: float,
    replicas: int,
) -> float:
    """The gradient all-reduce over the links of the slowest kind, as their largest speeds rank."""
    ends = {(region.home if region.home is not None else end[0], *end[1:]): 0 for end, _ in column}
    tp = min(MOST_TP_SHARING_LINKS, *(tp for _, _, tp in ends))
    _, sender, receiver = min(
        (inputs.top_speed(end, (zone, *end[1:])), end, (zone, *end[1:]))
        for end in ends
        for zone in region.zones
    )
    if region.home is not None:
        receiver = sender
    sender, receiver = (*sender[:2], tp), (*receiver[:2], tp)
    return all_reduce_s(
        size, replicas, lambda each: inputs.send_s(sender, receiver, each) if each else 0.0
    )


def joined(
    inputs: Sosp25Inputs, b: int, boundary: int, stage: PipelineTail, rest: PipelineTail
) -> PipelineTail:
    """A stage joined to the part that follows it."""
    replicas = sum(count for _, count in stage.column)
    most = math.ceil(inputs.global_batch / (b * replicas))
    size = inputs.float_bytes * b * float(inputs.outputs[boundary - 1])
    message = usd = 0.0
    for (one, other), count in pairs(stage.column, rest.column).items():
        message = max(message, inputs.send_s(one, other, size))
        usd += 2 * count * most * size * inputs.egress_usd_per_byte(one[0], other[0])
    straggler = max(stage.straggler_s + message, rest.first_s + message, rest.straggler_s)
    messages = rest.messages_s + 2 * message
    compute = stage.compute_s + rest.compute_s
    sync = max(stage.sync_s, rest.sync_s)
    return PipelineTail(
        seconds=(most - 1) * straggler + messages + compute + sync,
        straggler_s=straggler,
        first_s=stage.compute_s + message,
        compute_s=compute,
        messages_s=messages,
        sync_s=sync,
        usd_per_s=stage.usd_per_s + rest.usd_per_s,
        traffic_usd=stage.traffic_usd + rest.traffic_usd + usd,
        column=stage.column,
        rest=rest,
    )


def pairs(column: tuple[EndRun, ...], after: tuple[EndRun, ...]) -> dict[tuple[End, End], int]:
    """Number of replicas by sender and receiver; the k-th replica sends to the k-th."""
    found: dict[tuple[End, End], int] = {}
    left, right = list(column), list(after)
    while left:
        (one, many), (other, more) = left[-1], right[-1]
        count = min(many, more)
        found[one, other] = found.get((one, other), 0) + count
        for side, end, have in ((left, one, many), (right, other, more)):
            side.pop()
            if have > count:
                side.append((end, have - count))
    return found
