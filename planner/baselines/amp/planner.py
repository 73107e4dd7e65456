"""AMP: every TP, data and pipeline degree and micro batch, by a formula of a pipeline's time.

GPU kinds are averaged: one row of layer times, weighted by the nodes of each kind, stands for
all, and each node has one bandwidth to others and one inside. So the planner takes the whole
cluster at once; groups are dealt to stages kind after kind, and a stage may mix kinds. It knows
no memory. Where the batch does not divide by the number of GPUs, nodes are left out from the
end until it does.

With one GPU kind layers are cut evenly, with several by a dynamic program. ``published`` keeps
its slip (a cut is compared with its cost and stored without), looks at the last pair of a ring
alone, takes links inside a node as infinitely fast, and counts a TP degree without times as NaN;
``fixed`` mends the first two, uses the measured links inside nodes and skips such degrees.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise
from typing import Literal

from planner.baselines.shared.equal_gpus import tp_degrees
from planner.baselines.shared.equal_nodes import (
    Degrees,
    EqualNodes,
    equal_nodes,
    even_plan,
    gpu_kinds,
    whole_degrees,
)
from planner.baselines.shared.machines import bytes_per_s_between, bytes_per_s_within
from planner.baselines.shared.proposals import proposal, ranked
from planner.compare.interface import Case, Mode, ProposedPlan
from simulator.models.layers import FLOAT_BYTES, divisors
from simulator.spec.plan import Plan

PartitionWay = Literal["equal", "program"]


@dataclass(frozen=True, slots=True)
class AmpInputs:
    """AMP's inputs; rows have one number per layer."""

    gpus_per_node: int
    between_floats_per_s: tuple[float, ...]
    """Each node's link to other nodes; of two nodes the slower link counts."""
    within_floats_per_s: tuple[float, ...]
    """Each node's own links."""
    global_batch: int
    layer_seconds: Mapping[int, Sequence[float]]
    """Forward and backward of one sample by TP degree; linear in the samples."""
    output_floats: Sequence[float]
    """Numbers that one sample has behind each layer."""
    parameters: Mapping[int, Sequence[float]]
    """Parameters of each layer on one rank, by TP degree."""
    partition: PartitionWay


@dataclass(frozen=True, slots=True)
class AmpPlan(Degrees):
    """AMP's own plan format."""

    cuts: tuple[int, ...] = ()


def candidates(inputs: AmpInputs, mode: Mode = "fixed") -> list[AmpPlan]:
    """All degrees in AMP's order: by micro batch, then as enumerated."""
    size, nodes = inputs.gpus_per_node, len(inputs.between_floats_per_s)
    while nodes and inputs.global_batch % (size * nodes):
        nodes -= 1  # Kept: AMP plans for fewer nodes rather than for an uneven batch.
    layers = len(inputs.output_floats)
    by_micro_batch: dict[int, list[AmpPlan]] = {}
    for tp in divisors(size) if nodes else ():
        if mode == "fixed" and tp not in inputs.layer_seconds:
            continue
        for dp in divisors(size * nodes // tp):
            for samples in divisors(inputs.global_batch // dp):
                pp = size * nodes // (tp * dp)
                found = by_micro_batch.setdefault(samples, [])
                if pp <= layers:
                    found.append(AmpPlan(tp, dp, pp, samples))
    return [degrees for found in by_micro_batch.values() for degrees in found]


def seconds_of(inputs: AmpInputs, plan: AmpPlan, mode: Mode = "fixed") -> float:
    """Iteration time: fill, slowest stage per micro batch, sends and gradients."""
    row = inputs.layer_seconds.get(plan.tp)
    if row is None:
        assert mode == "published", "fixed mode tries no degree without times"
        return math.nan  # Kept: 0 profiled seconds over 0 profiles.
    layers = [plan.micro_batch_size * seconds for seconds in row]
    stages = [sum(layers[first:end]) for first, end in pairwise(plan.cuts)]
    micro_batches = inputs.global_batch // (plan.dp * plan.micro_batch_size)
    cuts = [
        _cut_seconds(inputs, plan, layer=cut - 1, stage=stage)
        for stage, cut in enumerate(plan.cuts[1:-1])
    ]
    pipeline = (micro_batches - 1) * max(stages) + sum(layers) + sum(cuts)
    return pipeline + _gradient_seconds(inputs, plan, mode)


def _cut_seconds(inputs: AmpInputs, plan: AmpPlan, *, layer: int, stage: int) -> float:
    """From a stage to the next: the slowest of the tensor links, mean over the replicas."""
    floats = plan.micro_batch_size * inputs.output_floats[layer]
    replicas = [
        max(
            floats / _floats_per_s(inputs, one, one + plan.tp * plan.dp)
            for tensor in range(plan.tp)
            for one in [_rank(plan, stage, replica, tensor)]
        )
        for replica in range(plan.dp)
    ]
    return sum(replicas) / plan.dp


def _gradient_seconds(inputs: AmpInputs, plan: AmpPlan, mode: Mode) -> float:
    """The slowest ring all-reduce over stages and tensor positions."""
    slowest = 0.0
    for stage, (first, end) in enumerate(pairwise(plan.cuts)):
        floats = sum(inputs.parameters[plan.tp][first:end])
        for tensor in range(plan.tp):
            ring = [_rank(plan, stage, replica, tensor) for replica in range(plan.dp)]
            links = [
                _floats_per_s(inputs, one, other)
                for one, other in zip(ring, ring[1:] + ring[:1], strict=True)
            ]
            # Kept in published mode: each link of the ring overwrites the one before.
            speed = links[-1] if mode == "published" else min(links)
            slowest = max(slowest, 2 * (plan.dp - 1) / (plan.dp * speed) * floats)
    return slowest


def _rank(plan: AmpPlan, stage: int, replica: int, tensor: int) -> int:
    return (stage * plan.dp + replica) * plan.tp + tensor


def _floats_per_s(inputs: AmpInputs, one: int, other: int) -> float:
    here, there = one // inputs.gpus_per_node, other // inputs.gpus_per_node
    if here == there:
        return inputs.within_floats_per_s[here]
    return min(inputs.between_floats_per_s[here], inputs.between_floats_per_s[there])


# -- where the layers are cut ---------------------------------------------------------------------


def cut_layers(inputs: AmpInputs, degrees: AmpPlan, mode: Mode) -> tuple[int, ...]:
    """Layer boundaries for these degrees, by the rule named in the inputs."""
    count, stages = len(inputs.output_floats), degrees.pp
    row = inputs.layer_seconds.get(degrees.tp)
    if inputs.partition == "equal" or row is None:
        return (*range(0, stages * (count // stages), count // stages), count)
    micro_batches = inputs.global_batch // (degrees.dp * degrees.micro_batch_size)
    if micro_batches == 1:
        each, rest = divmod(count, stages)
        return tuple(stage * each + min(stage, rest) for stage in range(stages + 1))
    _, lengths = partition(
        [degrees.micro_batch_size * seconds for seconds in row],
        cache(lambda layer, stage: _cut_seconds(inputs, degrees, layer=layer, stage=stage)),
        stages=stages,
        micro_batches=micro_batches,
        mode=mode,
    )
    return (0, *accumulate(lengths))


def partition(
    layer_seconds: Sequence[float],
    cut_seconds: Callable[[int, int], float],
    *,
    stages: int,
    micro_batches: int,
    mode: Mode,
) -> tuple[float, tuple[int, ...]]:
    """The dynamic program: its own value, and the layers of each stage.

    ``cut_seconds(i, j)`` is for a cut behind layer i and stage j. The later stages' maximum is
    part of the state, so that only what exceeds it is paid again for each micro batch.
    """
    behind = [0.0, *accumulate(layer_seconds)]

    @cache
    def best(last: int, stage: int, most: float) -> tuple[float, tuple[int, ...]]:
        """Layers up to ``last`` on stages up to ``stage``; no later stage takes over ``most``."""

        def extra(first: int) -> tuple[float, float]:
            # Rounded to a picosecond: equal ranges must meet in one state.
            seconds = round(behind[last + 1] - behind[first], 12)
            return max(seconds, most), (micro_batches - 1) * max(0.0, seconds - most)

        if stage == 0:
            return extra(0)[1], (last + 1,)
        found: tuple[float, tuple[int, ...]] = (math.inf, ())
        for cut in range(stage - 1, last):
            most_now, more = extra(cut + 1)
            value, lengths = best(cut, stage - 1, most_now)
            with_cut = value + more + cut_seconds(cut, stage - 1)
            if with_cut < found[0]:
                # Kept in published mode: what is stored forgets the cut.
                kept = value + more if mode == "published" else with_cut
                found = kept, (*lengths, last - cut)
        return found

    value, lengths = best(len(layer_seconds) - 1, stages - 1, 0.0)
    return value + sum(layer_seconds), lengths


def search(inputs: AmpInputs, mode: Mode = "fixed") -> list[tuple[float, AmpPlan]]:
    """All candidates with their boundaries and times, best first; ties keep their order."""
    plans = [
        replace(degrees, cuts=cut_layers(inputs, degrees, mode))
        for degrees in candidates(inputs, mode)
    ]
    found = [(seconds_of(inputs, plan, mode), plan) for plan in plans]
    return sorted(found, key=lambda pair: (math.isnan(pair[0]), pair[0]))


# -- the case -------------------------------------------------------------------------------------


def inputs_from(case: Case, nodes: EqualNodes, mode: Mode) -> AmpInputs:
    """AMP's inputs for these nodes."""
    width = FLOAT_BYTES[case.job.precision]
    degrees = whole_degrees(case, nodes)
    places = tuple(dict.fromkeys(nodes.places))
    between = {
        one: min(bytes_per_s_between(case, one, other) for other in places) for one in places
    }
    seconds: dict[int, list[float]] = {}
    for tp in degrees:
        rows = {}
        for gpu in dict.fromkeys(place.gpu for place in places):
            times = case.costs.times(gpu, tp=tp, samples=1)
            rows[gpu] = (times.forward + times.backward).tolist()
        everyone = [rows[place.gpu] for place in nodes.places]
        seconds[tp] = [sum(layer) / len(everyone) for layer in zip(*everyone, strict=True)]
    return AmpInputs(
        gpus_per_node=nodes.gpus_per_node,
        between_floats_per_s=tuple(between[place] / width for place in nodes.places),
        within_floats_per_s=tuple(
            math.inf if mode == "published" else bytes_per_s_within(case, place) / width
            for place in nodes.places
        ),
        global_batch=case.job.global_batch,
        layer_seconds=seconds,
        output_floats=[case.costs.output_bytes(i) / width for i in range(case.costs.layer_count)],
        parameters={tp: case.costs.parameters(tp).tolist() for tp in degrees},
        partition="equal" if len(gpu_kinds(case.cluster)) == 1 else "program",
    )


def to_plan(plan: AmpPlan, case: Case, nodes: EqualNodes) -> Plan | str:
    """The degrees as a plan."""
    if plan.tp not in tp_degrees(case, nodes.gpus_per_node):
        return f"TP {plan.tp} does not suit the job"
    return even_plan(plan, nodes.groups(plan.tp), plan.cuts, case.job)


class AmpPlanner:
    """All degrees on the whole cluster, by AMP's formula."""

    name = "amp"

    def proposals(self, case: Case, mode: Mode) -> Sequence[ProposedPlan]:
        """Degrees without measured times have no estimate and come last."""
        nodes = equal_nodes(case.cluster, gpu_kinds(case.cluster))
        if not nodes.places:
            return ()
        return ranked(
            (plan.gpus, proposal(math.inf if math.isnan(s) else s, to_plan(plan, case, nodes)))
            for s, plan in search(inputs_from(case, nodes, mode), mode)
        )
