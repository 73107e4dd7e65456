"""The Megatron rule of thumb: the least model parallelism that fits, data parallelism for the rest.

It neither searches nor estimates time (``seconds`` is NaN): TP grows within a node before the
pipeline grows, and the first shape that fits is its only plan. It does not tell GPU kinds apart.

``published`` checks memory by hand, as the guidance does: 16 bytes per parameter plus activations,
on the GPU with the least memory. ``fixed`` uses the common memory model, which knows each GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from planner.baselines.shared.equal_gpus import recompute_of, tp_degrees
from planner.baselines.shared.equal_nodes import (
    Degrees,
    EqualNodes,
    equal_nodes,
    even_plan,
    fits,
    gpu_kinds,
)
from planner.baselines.shared.proposals import micro_batch_sizes, proposal
from planner.compare.interface import Case, Mode, ProposedPlan
from simulator.models.layers import divisors
from simulator.spec.plan import Plan, equal_cuts

STATE_BYTES_PER_PARAMETER = 16
"""fp32: weight, gradient and two moments; mixed precision: 2 + 2 + 12."""


@dataclass(frozen=True, slots=True)
class MegatronInputs:
    """The rule's inputs; rows have one number per layer."""

    gpus: int
    gpus_per_node: int
    memory_bytes: float
    """Memory of the smallest GPU."""
    global_batch: int
    micro_batches: tuple[int, ...]
    parameters: Mapping[int, Sequence[float]]
    """Parameters per GPU, by TP degree; the degrees to try are its keys."""
    kept_bytes: Mapping[tuple[int, int], Sequence[float]]
    """Activations per GPU of one micro batch, by (TP degree, micro batch)."""

    @property
    def layer_count(self) -> int:
        return len(next(iter(self.parameters.values())))


def stage_bytes_max(inputs: MegatronInputs, shape: Degrees) -> float:
    """Memory of the fullest stage by the hand formula."""
    parameters = inputs.parameters[shape.tp]
    kept = inputs.kept_bytes[shape.tp, shape.micro_batch_size]
    micro_batches = inputs.global_batch // (shape.dp * shape.micro_batch_size)
    return max(
        STATE_BYTES_PER_PARAMETER * sum(parameters[first:end])
        + sum(kept[first:end]) * min(shape.pp - stage, micro_batches)
        for stage, (first, end) in enumerate(pairwise(equal_cuts(inputs.layer_count, shape.pp)))
    )


def search(inputs: MegatronInputs, shape_fits: Callable[[Degrees], bool]) -> Degrees | None:
    """The first shape that fits, with its largest micro batch; ``None`` if none fits."""
    degrees = [tp for tp in sorted(inputs.parameters) if inputs.gpus_per_node % tp == 0]
    if not degrees or inputs.gpus == 0:
        return None
    deeper = [
        (degrees[-1], pp)
        for pp in divisors(inputs.gpus // degrees[-1])
        if 1 < pp <= inputs.layer_count
    ]
    for tp, pp in [*((tp, 1) for tp in degrees), *deeper]:
        dp = inputs.gpus // (tp * pp)
        for size in sorted(inputs.micro_batches, reverse=True):
            if inputs.global_batch % (dp * size) == 0:
                shape = Degrees(tp, dp, pp, size)
                if shape_fits(shape):
                    return shape
    return None


# -- the case -------------------------------------------------------------------------------------


def inputs_from(case: Case, nodes: EqualNodes) -> MegatronInputs:
    """The rule's numbers for these nodes of a case."""
    costs, sizes = case.costs, micro_batch_sizes(case.job)
    degrees = tp_degrees(case, nodes.gpus_per_node)
    recompute = recompute_of(case.job)
    return MegatronInputs(
        gpus=nodes.gpus,
        gpus_per_node=nodes.gpus_per_node,
        memory_bytes=min((case.facts.capacity_bytes(place) for place in nodes.places), default=0.0),
        global_batch=case.job.global_batch,
        micro_batches=sizes,
        parameters={tp: costs.parameters(tp).tolist() for tp in degrees},
        kept_bytes={
            (tp, size): costs.kept_bytes(tp=tp, samples=size, recompute=recompute).tolist()
            for tp in degrees
            for size in sizes
        },
    )


def to_plan(shape: Degrees, case: Case, nodes: EqualNodes) -> Plan | str:
    """The shape as a plan."""
    cuts = equal_cuts(case.costs.layer_count, shape.pp)
    return even_plan(shape, nodes.groups(shape.tp), cuts, case.job)


def shape_for(case: Case, nodes: EqualNodes, mode: Mode) -> Degrees | None:
    """The rule's shape for these nodes."""
    inputs = inputs_from(case, nodes)
    if mode == "published":
        return search(inputs, lambda shape: stage_bytes_max(inputs, shape) <= inputs.memory_bytes)
    return search(inputs, lambda shape: fits(case, to_plan(shape, case, nodes)))


class MegatronPlanner:
    """One plan, on all GPUs that are up."""

    name = "megatron"

    def proposals(self, case: Case, mode: Mode) -> Sequence[ProposedPlan]:
        """The rule's plan, or nothing if none fits."""
        nodes = equal_nodes(case.cluster, gpu_kinds(case.cluster))
        shape = shape_for(case, nodes, mode)
        return () if shape is None else (proposal(math.nan, to_plan(shape, case, nodes)),)
