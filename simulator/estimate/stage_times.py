"""Seconds per micro batch of each device group and of its messages.

``PlanTimes`` has them as columns for all groups, ``PipelineTimes`` as objects per pipeline, for
timelines and ``schedule_replay``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from simulator.arrays import Floats
from simulator.estimate.device_groups import DeviceGroups, range_sums
from simulator.estimate.machine_layout import MachineLayout
from simulator.estimate.offload import with_copies
from simulator.estimate.schedule_replay import Edge, GroupTimes
from simulator.estimate.stage_messages import ChannelTimes, MessageTimes
from simulator.hardware.runtime_constants import platform_of
from simulator.layer_costs.layer_costs import LayerCosts


@dataclass(frozen=True, slots=True)
class PipelineTimes:
    """A pipeline as its schedule needs it: groups with their times, and channels between them."""

    micro_batches: int
    groups: tuple[tuple[int, int], ...]
    """Stage and index within the split of each group."""
    times: tuple[GroupTimes, ...]
    edges: tuple[Edge, ...]

    @property
    def is_chain(self) -> bool:
        return len(self.groups) == self.groups[-1][0] + 1


@dataclass(frozen=True, slots=True, eq=False)
class PlanTimes:
    """Seconds of every device group and hop of a plan, as columns."""

    layout: MachineLayout
    channels: ChannelTimes
    seconds: Floats
    """[group, field]: the six fields of ``GroupTimes`` after ``stage``."""
    weight: Floats
    """The part of each group's backward that comes later; zeros if the backward is not divided."""

    @property
    def compute(self) -> Floats:
        """Forward plus backward of one micro batch."""
        both: Floats = self.seconds[:, 0] + self.seconds[:, 1]
        return both

    @property
    def held_up(self) -> Floats:
        """Seconds per micro batch that messages block the device."""
        total: Floats = self.seconds[:, 2:].sum(axis=1)
        return total


def plan_times(layout: MachineLayout, costs: LayerCosts, messages: MessageTimes) -> PlanTimes:
    """Compute the seconds of every device group and hop of a plan."""
    groups, hops = layout.groups, layout.groups.hops
    sizes = np.array([costs.output_bytes(n) for n in range(costs.layer_count)])
    channels = messages.channels(layout, bytes_per_sample=sizes[groups.end[hops.source] - 1])
    gather_activation, gather_gradient, before_activation, before_gradient = np.zeros(
        (4, len(groups))
    )
    np.maximum.at(gather_activation, hops.target, channels.gather_activation_s)
    np.maximum.at(gather_gradient, hops.source, channels.gather_gradient_s)
    np.maximum.at(before_activation, hops.source, channels.before_activation_s)
    np.maximum.at(before_gradient, hops.target, channels.before_gradient_s)
    platforms = [platform_of(place.gpu) for place in groups.place_kinds]
    message_s = np.array([platform.message_s for platform in platforms])[groups.place_kind]
    load_s = np.array([platform.load_s for platform in platforms])[groups.place_kind]
    is_first, is_last = groups.stage == 0, groups.stage == groups.stage_count - 1
    forward, backward = _passes(groups, costs)
    divides = groups.plan.schedule == "zero-bubble"
    weight = np.zeros(len(groups))
    if divides:
        # Both are sums over the same layers, which may be rounded differently.
        weight = np.minimum(_weight_parts(groups, costs), backward)
    seconds = (
        forward + np.where(is_first, load_s, 0.0),
        backward,
        np.where(is_first, 0.0, message_s + gather_activation),
        np.where(is_last, 0.0, message_s + gather_gradient),
        np.where(is_last, 0.0, message_s + before_activation),
        np.where(is_first, 0.0, message_s + before_gradient),
    )
    return PlanTimes(layout, channels, np.stack(seconds, axis=1), weight)


def with_slow_nodes(work: PlanTimes, times_slower: Mapping[str, float]) -> PlanTimes:
    """Return the times with forward and backward multiplied on the given nodes."""
    groups = work.layout.groups
    times = np.array([times_slower.get(place.node or "", 1.0) for place in groups.places])
    seconds = work.seconds.copy()
    slower = times[groups.place]
    seconds[:, :2] *= slower[:, None]
    return replace(work, seconds=seconds, weight=work.weight * slower)


def _passes(groups: DeviceGroups, costs: LayerCosts) -> tuple[Floats, Floats]:
    """Return forward and backward seconds of one micro batch on every group."""
    forward, backward = np.empty(len(groups)), np.empty(len(groups))
    for number, (gpu, tp, samples) in enumerate(groups.timed):
        rows = np.flatnonzero(groups.timing == number)
        forward[rows], backward[rows] = costs.range_seconds(
            gpu,
            tp=tp,
            samples=samples,
            first=groups.first[rows],
            end=groups.end[rows],
            recompute=groups.recompute[rows],
        )
    return with_copies(groups, costs, forward, backward)


def _weight_parts(groups: DeviceGroups, costs: LayerCosts) -> Floats:
    """Return the seconds of the weights' gradients of one micro batch on every group."""
    found = np.empty(len(groups))
    for number, (gpu, tp, samples) in enumerate(groups.timed):
        rows = np.flatnonzero(groups.timing == number)
        weight = costs.weight_by_layer(gpu, tp=tp, samples=samples)
        found[rows] = range_sums(weight, groups.first[rows], groups.end[rows])
    return found


def pipeline_times(work: PlanTimes) -> list[PipelineTimes]:
    """Return the times of every pipeline; equal pipelines share one object."""
    groups, hops, channels = work.layout.groups, work.layout.groups.hops, work.channels
    found: list[PipelineTimes] = []
    equal = equal_pipelines(work)
    for p, (begin, end) in enumerate(groups.blocks):
        if equal[p] != p:
            found.append(found[equal[p]])
            continue
        low, high = np.searchsorted(hops.source, [begin, end])
        ids = [(stage, index) for _, stage, index in groups.ids[begin:end]]
        rows = np.column_stack([work.seconds[begin:end], work.weight[begin:end]]).tolist()
        edges = (
            hops.source[low:high] - begin,
            hops.target[low:high] - begin,
            channels.activation_s[low:high],
            channels.gradient_s[low:high],
        )
        found.append(
            PipelineTimes(
                groups.plan.pipelines[p].micro_batches,
                tuple(ids),
                tuple(GroupTimes(s, *row) for (s, _), row in zip(ids, rows, strict=True)),
                tuple(map(Edge, *(column.tolist() for column in edges))),
            )
        )
    return found


def equal_pipelines(work: PlanTimes) -> list[int]:
    """Return, per pipeline, the first pipeline with exactly the same times."""
    groups, hops, channels = work.layout.groups, work.layout.groups.hops, work.channels
    sizes = [pipeline.micro_batches for pipeline in groups.plan.pipelines]
    edges = np.stack([channels.activation_s, channels.gradient_s], axis=1)
    shape = np.stack([groups.stage, groups.index], axis=1)
    ends = np.searchsorted(hops.source, groups.bounds)
    seen: dict[tuple[int, bytes, bytes, bytes, bytes], int] = {}
    found = []
    for p, (begin, end) in enumerate(groups.blocks):
        key = (
            sizes[p],
            work.seconds[begin:end].tobytes(),
            work.weight[begin:end].tobytes(),
            edges[ends[p] : ends[p + 1]].tobytes(),
            b"" if groups.is_chain[p] else shape[begin:end].tobytes(),
        )
        found.append(seen.setdefault(key, p))
    return found
