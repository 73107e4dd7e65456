"""A Whale-style split: a Megatron-style plan whose layers and batch are balanced by GPU speed.

There is no search and no estimate of time (``seconds`` is NaN). The shape (TP degree, stages,
replicas, micro batch) is that of the Megatron rule on the whole cluster. Groups are ordered by
memory, the largest first, since early stages keep more activations. Each stage gets layers in
proportion to the speed of its groups, and each replica micro batches in proportion to its own
speed; what does not fit into a replica's memory moves to those with room. The planner tells
GPU kinds apart; both modes are the same but for the memory model that picks the shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise

from planner.baselines.megatron.planner import shape_for
from planner.baselines.shared.equal_gpus import recompute_of
from planner.baselines.shared.equal_nodes import Degrees, equal_nodes, gpu_kinds
from planner.baselines.shared.proposals import proposal
from planner.compare.interface import Case, Mode, ProposedPlan
from simulator.estimate.memory import MemoryModel
from simulator.inputs.plan_check import rounded_shares
from simulator.spec.plan import Pipeline, Place, Plan, Stage


@dataclass(frozen=True, slots=True)
class WhaleInputs:
    """What is balanced, and over which groups."""

    micro_batches: int
    """Units of batch to share out."""
    layer_costs: tuple[float, ...]
    speeds: tuple[tuple[float, ...], ...]
    """Speed of each TP group, by stage and replica."""


@dataclass(frozen=True, slots=True)
class Split:
    """The planner's own plan format: layer boundaries, and the share of each replica."""

    cuts: tuple[int, ...]
    shares: tuple[int, ...]
    """Micro batches per replica; a replica without any stays idle."""


def split_batch(
    batch: int, weights: Sequence[float], rooms: Sequence[int] | None = None
) -> tuple[int, ...] | None:
    """Share out a batch in proportion to the weights; ``None`` where it does not fit.

    Rounding is by the largest remainder, ties to the lower index. What exceeds a room is shared
    out again, by the same rule, among those that have room left.
    """
    rooms = [batch] * len(weights) if rooms is None else rooms
    if sum(rooms) < batch:
        return None
    shares = [0] * len(weights)
    # Exact, so that equal remainders are equal on every machine.
    exact, left = [Fraction(weight) for weight in weights], batch
    while left:
        takers = [i for i, room in enumerate(rooms) if shares[i] < room]
        for i, part in zip(takers, rounded_shares(left, [exact[i] for i in takers]), strict=True):
            shares[i] = min(shares[i] + part, rooms[i])
        left = batch - sum(shares)
    return tuple(shares)


def split_layers(layer_costs: Sequence[float], weights: Sequence[float]) -> tuple[int, ...]:
    """Cut at the boundaries nearest to the cumulative shares, the lower one on ties.

    Every stage keeps at least one layer.
    """
    layers, stages = len(layer_costs), len(weights)
    assert stages <= layers, (stages, layers)
    behind = [0.0, *accumulate(layer_costs)]
    total, cuts = sum(weights), [0]
    for k, weight in enumerate(accumulate(weights[:-1]), start=1):
        target = behind[-1] * weight / total
        allowed = range(cuts[-1] + 1, layers - (stages - k) + 1)
        cuts.append(min(allowed, key=lambda cut: (abs(behind[cut] - target), cut)))
    return (*cuts, layers)


def balance(
    inputs: WhaleInputs, rooms: Callable[[tuple[int, ...]], Sequence[int]] | None = None
) -> Split | None:
    """Cut the layers, then share out the batch; ``rooms`` holds what each replica can take."""
    cuts = split_layers(inputs.layer_costs, [sum(stage) for stage in inputs.speeds])
    loads = [sum(inputs.layer_costs[first:end]) for first, end in pairwise(cuts)]
    # A pipeline is as fast as its slowest stage.
    rates = [
        min(speed / load for speed, load in zip(replica, loads, strict=True))
        for replica in zip(*inputs.speeds, strict=True)
    ]
    shares = split_batch(inputs.micro_batches, rates, rooms(cuts) if rooms else None)
    return None if shares is None else Split(cuts, shares)


# -- the case -------------------------------------------------------------------------------------


def groups_of(case: Case, shape: Degrees) -> tuple[tuple[Place, ...], ...]:
    """The places of each stage's groups, those with the most memory in the first stage."""
    nodes = equal_nodes(case.cluster, gpu_kinds(case.cluster))
    groups = sorted(nodes.groups(shape.tp), key=case.facts.capacity_bytes, reverse=True)
    return tuple(tuple(groups[s * shape.dp : (s + 1) * shape.dp]) for s in range(shape.pp))


def inputs_from(case: Case, shape: Degrees) -> WhaleInputs:
    """Speeds are those of the whole model; layers are weighed on the slowest kind."""
    groups = groups_of(case, shape)
    rows = {}
    for gpu in sorted({place.gpu for stage in groups for place in stage}):
        times = case.costs.times(gpu, tp=shape.tp, samples=shape.micro_batch_size)
        rows[gpu] = (times.forward + times.backward).tolist()
    slowest = max(rows, key=lambda gpu: sum(rows[gpu]))
    return WhaleInputs(
        micro_batches=case.job.global_batch // shape.micro_batch_size,
        layer_costs=tuple(rows[slowest]),
        speeds=tuple(tuple(1 / sum(rows[place.gpu]) for place in stage) for stage in groups),
    )


def rooms_of(case: Case, shape: Degrees, cuts: tuple[int, ...]) -> list[int]:
    """How many micro batches fit into each replica.

    At most one per stage is in flight, so a replica that holds that many takes any number.
    """
    total = case.job.global_batch // shape.micro_batch_size
    rooms = [0] * shape.dp
    for count in range(1, min(shape.pp, total) + 1):
        plan = to_plan(Split(cuts, (count,) * shape.dp), case, shape)
        memory = MemoryModel(plan, case.costs, case.facts.capacity_bytes)
        for replica, devices in enumerate(memory.pipelines()):
            if rooms[replica] == count - 1 and all(device.fits for device in devices):
                rooms[replica] = count
    return [total if room == min(shape.pp, total) else room for room in rooms]


def to_plan(split: Split, case: Case, shape: Degrees) -> Plan:
    """The split as a plan; every pipeline has its own number of micro batches."""
    columns = [
        [Stage(layers, shape.tp, (place,), recompute_of(case.job)) for place in places]
        for layers, places in zip(pairwise(split.cuts), groups_of(case, shape), strict=True)
    ]
    pipelines = map(Pipeline, split.shares, zip(*columns, strict=True))
    used = tuple(pipeline for pipeline in pipelines if pipeline.micro_batches > 0)
    return Plan(shape.micro_batch_size, used)


class WhalePlanner:
    """One plan, on all GPUs that are up."""

    name = "whale"

    def proposals(self, case: Case, mode: Mode) -> Sequence[ProposedPlan]:
        """The balanced plan, or nothing if none fits."""
        shape = shape_for(case, equal_nodes(case.cluster, gpu_kinds(case.cluster)), mode)
        if shape is None:
            return ()
        split = balance(inputs_from(case, shape), lambda cuts: rooms_of(case, shape, cuts))
        if split is None:
            return (proposal(math.nan, "the batch does not fit once layers go by speed"),)
        return (proposal(math.nan, to_plan(split, case, shape)),)
