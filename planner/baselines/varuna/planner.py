"""Varuna: for each depth that divides the cut points, the largest micro batch, timed by simulation.

There is no tensor parallelism. Replicas are as many as the GPUs allow and the rest stays idle;
a pipeline's stages stand on consecutive GPUs. Memory assumes recomputation (one micro batch's
activations, without the stored inputs); time is that of Varuna's own schedule where the job
allows recomputation, else that of 1F1B, as in the published comparison. The planner knows one
GPU kind, so it runs once per kind, and the lists are merged. Taking the largest micro batch that
fits can be slower than a smaller one; that is the method.

``published`` keeps two defects of its simulator: stages with fewer micro batches than stages
behind them never run backward, and a plan in which two gradients wait at once deadlocks and is
dropped. ``fixed`` mends both. (The published comparison passed wrong arguments besides; nothing
of that is kept.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner.baselines.shared.equal_nodes import (
    Degrees,
    EqualNodes,
    equal_nodes,
    even_plan,
    gpu_kinds,
)
from planner.baselines.shared.machines import bytes_per_s_within, slowest_bytes_per_s
from planner.baselines.shared.proposals import micro_batch_sizes, proposal, ranked
from planner.baselines.varuna.pipeline import VarunaTimes, simulate_us
from planner.compare.interface import Case, Mode, ProposedPlan
from simulator.estimate.memory import state_bytes_per_parameter
from simulator.models.layers import Recompute, divisors
from simulator.spec.plan import Plan

VarunaRow = Sequence[float]


@dataclass(frozen=True, slots=True)
class VarunaInputs:
    """Varuna's inputs; rows have one number per layer (a cut point follows each)."""

    gpus: int
    gpus_per_node: int
    global_batch: int
    memory_bytes: float
    between_bytes_per_s: float
    within_bytes_per_s: float
    forward_us: Mapping[int, VarunaRow]
    """Forward of each layer, by micro batch; the sizes to try are its keys."""
    backward_us: Mapping[int, VarunaRow]
    held_bytes: Mapping[int, VarunaRow]
    """Parameters with all their state, and the activations of one micro batch."""
    output_bytes: Mapping[int, VarunaRow]
    gradient_bytes: VarunaRow
    recomputes: bool = False

    @property
    def layer_count(self) -> int:
        return len(self.gradient_bytes)


# -- the search -----------------------------------------------------------------------------------


def stage_bytes_max(inputs: VarunaInputs, pp: int, micro_batch_size: int) -> float:
    """Memory of the fullest stage: all but the last output is freed and recomputed."""
    held, output = inputs.held_bytes[micro_batch_size], inputs.output_bytes[micro_batch_size]
    each = inputs.layer_count // pp
    return max(
        sum(held[first : first + each])
        - sum(output[first : first + each])
        + output[first + each - 1]
        for first in range(0, inputs.layer_count, each)
    )


def pipeline_of(inputs: VarunaInputs, depth: Degrees) -> VarunaTimes:
    """The simulator's inputs for a plan; messages and synchronisation in whole microseconds."""
    size, each = depth.micro_batch_size, inputs.layer_count // depth.pp
    firsts = range(0, inputs.layer_count, each)
    # The layer after the first cut, which the public search uses in place of the one before it.
    message_bytes = inputs.output_bytes[size][each] if depth.pp > 1 else 0.0
    gradient_bytes = max(sum(inputs.gradient_bytes[first : first + each]) for first in firsts)
    ring_bytes = 2 * (depth.dp - 1) / depth.dp * gradient_bytes
    return VarunaTimes(
        tuple(sum(inputs.forward_us[size][first : first + each]) for first in firsts),
        tuple(sum(inputs.backward_us[size][first : first + each]) for first in firsts),
        micro_batches=math.ceil(inputs.global_batch // depth.dp / size),
        send_us=int(message_bytes / inputs.within_bytes_per_s * 1e6),
        long_send_us=int(message_bytes / inputs.between_bytes_per_s * 1e6),
        gpus_per_node=inputs.gpus_per_node,
        all_reduce_us=int(ring_bytes / inputs.between_bytes_per_s * 1e6),
        recomputes=inputs.recomputes,
    )


def depths(inputs: VarunaInputs) -> list[Degrees]:
    """One plan per depth, with the largest micro batch that fits; none for a depth if none fits."""
    found = []
    for pp in divisors(inputs.layer_count):
        dp = inputs.gpus // pp
        sizes = sorted(inputs.forward_us, reverse=True)
        fitting = (b for b in sizes if stage_bytes_max(inputs, pp, b) <= inputs.memory_bytes)
        size = next(fitting, None)
        if 1 <= dp <= inputs.global_batch and size is not None:
            found.append(Degrees(1, dp, pp, size))
    return found


def search(inputs: VarunaInputs, mode: Mode = "fixed") -> list[tuple[float, Degrees]]:
    """All plans with their microseconds, best first, without deadlocked ones."""
    timed = [(simulate_us(pipeline_of(inputs, depth), mode), depth) for depth in depths(inputs)]
    kept = [(us, depth) for us, depth in timed if us is not None]
    return sorted(kept, key=lambda pair: (pair[0], pair[1].gpus, pair[1].pp))


# -- the case -------------------------------------------------------------------------------------


def inputs_from(case: Case, nodes: EqualNodes) -> VarunaInputs:
    """Varuna's inputs for nodes of one GPU kind."""
    costs, place = case.costs, nodes.places[0]
    state = state_bytes_per_parameter(case.job) * costs.parameters(1)
    forward, backward, held, output = {}, {}, {}, {}
    for size in micro_batch_sizes(case.job):
        times = costs.times(place.gpu, tp=1, samples=size)
        forward[size] = (1e6 * times.forward).tolist()
        backward[size] = (1e6 * times.backward).tolist()
        kept = costs.kept_bytes(tp=1, samples=size, recompute="none", gpu=place.gpu)
        held[size] = (state + kept).tolist()
        output[size] = [size * costs.output_bytes(layer) for layer in range(costs.layer_count)]
    return VarunaInputs(
        gpus=nodes.gpus,
        gpus_per_node=nodes.gpus_per_node,
        global_batch=case.job.global_batch,
        memory_bytes=case.facts.capacity_bytes(place),
        between_bytes_per_s=slowest_bytes_per_s(case, nodes.places),
        within_bytes_per_s=bytes_per_s_within(case, place),
        forward_us=forward,
        backward_us=backward,
        held_bytes=held,
        output_bytes=output,
        gradient_bytes=(4 * costs.parameters(1)).tolist(),
        recomputes=_recompute(case) == "full",
    )


def _recompute(case: Case) -> Recompute:
    """Varuna recomputes wherever the job allows it."""
    return "none" if case.job.recompute == "none" else "full"


def to_plan(depth: Degrees, case: Case, nodes: EqualNodes) -> Plan | str:
    """The depth as a plan."""
    each = case.costs.layer_count // depth.pp
    # Ranks run over the stages first: a pipeline's stages are adjacent.
    ranks = nodes.groups(1)[: depth.gpus]
    groups = [place for stage in range(depth.pp) for place in ranks[stage :: depth.pp]]
    cuts = range(0, case.costs.layer_count + 1, each)
    return even_plan(depth, groups, cuts, case.job, _recompute(case))


class VarunaPlanner:
    """One plan per depth and GPU kind, by Varuna's simulation."""

    name = "varuna"

    def proposals(self, case: Case, mode: Mode) -> Sequence[ProposedPlan]:
        """The plans of all kinds together, best first."""
        found: list[tuple[int, ProposedPlan]] = []
        for kind in gpu_kinds(case.cluster):
            nodes = equal_nodes(case.cluster, [kind])
            found += [
                (depth.gpus, proposal(us / 1e6, to_plan(depth, case, nodes)))
                for us, depth in search(inputs_from(case, nodes), mode)
            ]
        return ranked(found)
