"""Metis' inputs, and its estimates of a plan's time and of a stage's memory."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from planner.baselines.metis.balancer import binary_digits, share_samples

BYTES_PER_MS = 2.0**20
"""What a GB/s moves in a millisecond, as Metis converts it."""
MetisStrategy = tuple[int, int]
"""Data and tensor degree of a stage."""
MetisKey = tuple[str, int, int]
"""GPU kind, tensor degree and samples of a micro batch, by which profiles are looked up."""


@dataclass(frozen=True, slots=True)
class MetisNode:
    """A machine: its kind of GPU, how many, the speed of its links, the memory of each GPU."""

    kind: str
    gpus: int
    within_gb_per_s: float
    between_gb_per_s: float
    memory_mb: float


@dataclass(frozen=True, slots=True)
class MetisInputs:
    """Metis' inputs."""

    layer_ms: Mapping[MetisKey, tuple[float, ...]]
    """Forward and backward of each layer."""
    layer_mb: Mapping[MetisKey, tuple[float, ...]]
    sync_ms: Mapping[MetisKey, float]
    """What a whole micro batch takes beyond its layers."""
    optimizer_ms: float
    batch_ms: float
    """Making one micro batch."""
    parameter_bytes: tuple[float, ...]
    nodes: tuple[MetisNode, ...]
    batch: int
    sequence: int
    hidden: int
    vocabulary: int
    tp_max: int
    samples_max: int
    """Largest profiled micro batch."""
    variance: float = 0.5
    permuted_max: int = 4

    @property
    def layers(self) -> int:
        return len(self.parameter_bytes)


@dataclass(frozen=True, slots=True)
class MetisRepairs:
    """The defects of the public program that are mended."""

    stage_count: bool = True
    """If false, every order of kinds but the first begins with two groups costed as one stage."""
    bandwidth: bool = True
    """If false, links between machines are as fast as those within."""
    replica_ranks: bool = True
    """If false, gradients are summed among the wrong ranks, which are often in one machine."""
    memory: bool = True
    """If false, five times one replica must fit in the whole group, by the first kind's profile."""
    goes_on: bool = True
    """If false, a strategy that fits at once hides all that follow it."""
    whole_layers: bool = True
    """If false, partitions that lose a layer count."""
    zero_sync: bool = True
    """If false, a sync time of zero counts as missing, and the plan is dropped."""


FIXED = MetisRepairs()
PUBLISHED = MetisRepairs(False, False, False, False, False, False, False)


@dataclass(frozen=True, slots=True)
class MetisPlan:
    """Groups of consecutive ranks; the ranks run over the kinds in the order given."""

    kinds: tuple[str, ...]
    groups: tuple[int, ...]
    strategies: tuple[MetisStrategy, ...]
    batches: int
    cuts: tuple[int, ...]
    stages_costed: int
    """The number of groups, but for the plans of a mistaken stage count."""
    attempts: int = 1
    ms: float = field(default=0.0, compare=False)


class Ranks:
    """The GPUs in one order of kinds, cut into groups."""

    def __init__(self, inputs: MetisInputs, kinds: Sequence[str], groups: Sequence[int]) -> None:
        nodes = [node for kind in kinds for node in inputs.nodes if node.kind == kind]
        homes = [(index, node) for index, node in enumerate(nodes) for _ in range(node.gpus)]
        ends = list(accumulate(groups, initial=0))
        self.all_kinds = [node.kind for _, node in homes]
        self.groups = [homes[first:end] for first, end in pairwise(ends)]

    def kinds(self, stage: int) -> list[str]:
        return [node.kind for _, node in self.groups[stage]]


def gb_per_s(homes: Sequence[tuple[int, MetisNode]], repairs: MetisRepairs) -> float:
    """Bandwidth among ranks: within their one machine, else the slowest link between machines."""
    if repairs.bandwidth and len({index for index, _ in homes}) > 1:
        return min(node.between_gb_per_s for _, node in homes)
    return min(node.within_gb_per_s for _, node in homes)


# Cost ------------------------------------------------------------------------------------------


def replica_shares(
    inputs: MetisInputs, kinds: Sequence[str], strategy: MetisStrategy, samples: int
) -> list[tuple[str, int]]:
    """The kind of each replica's first device, and its samples by that device's speed."""
    d, t = strategy
    firsts = [kinds[len(kinds) // d * replica] for replica in range(d)]
    speeds = [1 / sum(inputs.layer_ms[kind, t, 1]) for kind in firsts]
    return list(zip(firsts, share_samples(samples, speeds), strict=True))


def group_ms(
    inputs: MetisInputs,
    kinds: Sequence[str],
    strategy: MetisStrategy,
    *,
    batches: int,
    layers: tuple[int, int],
) -> float:
    """One micro batch through some layers; a share costs as much as its powers of two."""
    d, t = strategy
    if len(set(kinds)) == 1:
        row = inputs.layer_ms[kinds[0], t, inputs.batch // d // batches]
        return sum(row[slice(*layers)])
    return max(
        sum(sum(inputs.layer_ms[kind, t, part][slice(*layers)]) for part in binary_digits(share))
        for kind, share in replica_shares(inputs, kinds, strategy, inputs.batch // batches)
    )


def plan_ms(inputs: MetisInputs, plan: MetisPlan, *, repairs: MetisRepairs = FIXED) -> float | None:
    """Iteration time; ``None`` if the profile lacks an entry."""
    with contextlib.suppress(KeyError):
        return _plan_ms(inputs, plan, Ranks(inputs, plan.kinds, plan.groups), repairs)
    return None


def _plan_ms(inputs: MetisInputs, plan: MetisPlan, ranks: Ranks, repairs: MetisRepairs) -> float:
    times, updates, syncs, cuts = [], [], [], []
    for stage in range(plan.stages_costed):
        d, t = strategy = plan.strategies[stage]
        first, end = layers = plan.cuts[stage], plan.cuts[stage + 1]
        kinds, homes = ranks.kinds(stage), ranks.groups[stage]
        times.append(group_ms(inputs, kinds, strategy, batches=plan.batches, layers=layers))
        updates.append(inputs.optimizer_ms / t * (end - first) / inputs.layers)
        apart, count = (t, t) if repairs.replica_ranks else (d, d)
        slowest = min(gb_per_s(homes[rank::apart], repairs) for rank in range(count))
        weights = sum(inputs.parameter_bytes[first:end])
        syncs.append(2 * (d - 1) / (d * slowest * BYTES_PER_MS) * weights / t)
        if stage + 1 < plan.stages_costed:
            width = inputs.vocabulary / t if end == inputs.layers - 1 else inputs.hidden
            elements = inputs.batch // d // plan.batches * inputs.sequence * width
            link = gb_per_s(homes + ranks.groups[stage + 1], repairs)
            cuts.append(elements / (link * BYTES_PER_MS))
    d, t = plan.strategies[plan.stages_costed - 1]
    kind = ranks.kinds(plan.stages_costed - 1)[0]
    sync = inputs.sync_ms[kind, t, inputs.batch // d // plan.batches]
    if sync == 0 and not repairs.zero_sync:
        raise KeyError(kind, t)
    return (
        (plan.batches - 1) * max(times)
        + sum(times)
        + sync * plan.batches
        + max(updates)
        + max(syncs)
        + sum(cuts)
        + inputs.batch_ms * plan.batches
    )


# Memory ----------------------------------------------------------------------------------------


def stage_mb(
    inputs: MetisInputs,
    ranks: Ranks,
    stage: int,
    strategy: MetisStrategy,
    batches: int,
    layers: tuple[int, int],
    *,
    repairs: MetisRepairs,
) -> tuple[float, float]:
    """Memory available and needed: of the tightest GPU, or as published of all together."""
    d, t = strategy
    kinds = ranks.kinds(stage)
    mixed = len(set(kinds)) > 1
    samples = inputs.batch // batches
    if repairs.memory:
        shares = replica_shares(inputs, kinds, strategy, samples)
        if not mixed:
            shares = [(kinds[0], samples // d)]
        memory = {node.kind: node.memory_mb for _, node in ranks.groups[stage]}
        needs = [
            (memory[kind], 0.001 + _held_mb(inputs, (kind, t, share), layers))
            for kind, share in shares
        ]
        return min(needs, key=lambda need: (need[0] / need[1], need))
    first = ranks.all_kinds[0]
    parts = [samples // d]
    if mixed:
        every = replica_shares(inputs, ranks.all_kinds, strategy, samples)
        parts = [part for _, share in every for part in binary_digits(share)]
    held = sum(sum(inputs.layer_mb[first, t, part][slice(*layers)]) for part in parts)
    return sum(node.memory_mb for _, node in ranks.groups[stage]), 0.001 + 5 * held


def _held_mb(inputs: MetisInputs, key: MetisKey, layers: tuple[int, int]) -> float:
    """Memory of a GPU, by the next larger profiled micro batch, or twice the next smaller one."""
    kind, t, share = key
    larger = 1 << max(share - 1, 0).bit_length()
    if larger <= inputs.samples_max:
        return sum(inputs.layer_mb[kind, t, larger][slice(*layers)])
    return 2 * sum(inputs.layer_mb[kind, t, larger // 2][slice(*layers)])
