"""FlashFlex (HexiScale): unequal pipelines on mixed GPUs, found by cutting a graph of links.

GPUs are cut into pipelines so that slow links stay inside them, each pipeline into groups so that
fast links stay inside these, and each machine's share of a group into TP groups; layers follow
memory (Yan, Jiang, Tao, et al., 2024). Its inputs are FLOPS, memory and link speeds instead of
measured layers, all GPU kinds at once, and one micro batch size.

``published`` draws the numbers of groups at random; ``fixed`` tries all that could be drawn. Both
keep these quirks: layers follow memory and not speed, embedding and head take no time, unequal
pipelines get equal work, and only some gradient rings of a layer count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, permutations

import numpy as np

from planner.baselines.flashflex.cost import (
    GB,
    FlashFlexInputs,
    FlashFlexPipeline,
    FlashFlexPlan,
    PlacedGpu,
    fits,
    pipeline_seconds,
    plan_seconds,
)
from planner.baselines.flashflex.groups import MENU, split_layers, tp_groups
from planner.baselines.shared import equal_gpus, proposals
from planner.baselines.shared.equal_gpus import Fleet
from planner.baselines.shared.graph_partition import graph_parts
from planner.baselines.shared.machines import bytes_per_s_within, slowest_bytes_per_s
from planner.compare.interface import Case, Mode, ProposedPlan
from planner.problem.seeded_random import SeededRandom
from simulator.arrays import Floats
from simulator.layer_costs.roofline import peak_flops
from simulator.models.layers import FLOAT_BYTES
from simulator.spec.job import Job
from simulator.spec.plan import Pipeline, Place, Plan, Stage

GROUPS = (1, 2, 3)
"""Numbers of groups of a pipeline; ``published`` takes one and maybe two more, by 1 in 5 each."""


# Search ----------------------------------------------------------------------------------------


def search(
    inputs: FlashFlexInputs,
    pipeline_counts: Sequence[int],
    *,
    mode: Mode = "fixed",
    draws: int = 1,
    seed: int = 0,
) -> list[FlashFlexPlan]:
    """The plans that fit, fastest first; only ``published`` uses ``draws`` and ``seed``."""
    dice = SeededRandom(seed)
    found: set[tuple[FlashFlexPipeline, ...]] = set()
    for count in pipeline_counts:
        choices = [(groups,) * count for groups in GROUPS]
        if mode == "published":
            choices = [
                tuple(1 + sum(dice.below(5) == 0 for _ in range(2)) for _ in range(count))
                for _ in range(draws)
            ]
        plans = _plans(inputs, pipeline_parts(inputs, count, mode=mode), choices, mode)
        if not plans and mode == "fixed":
            # A pipeline of many slow GPUs may have more stages than blocks.
            plans = _plans(inputs, pipeline_parts(inputs, count, even=True), choices, mode)
        found |= plans
    priced = [FlashFlexPlan(plan_seconds(inputs, plan), plan) for plan in found]
    return sorted(priced, key=lambda plan: (plan.seconds, len(plan.pipelines), repr(plan)))


def _plans(
    inputs: FlashFlexInputs,
    parts: Sequence[Sequence[int]],
    choices: Sequence[Sequence[int]],
    mode: Mode,
) -> set[tuple[FlashFlexPipeline, ...]]:
    """The plans with these GPUs per pipeline and this many groups each, where they fit."""
    found = set()
    for choice in choices:
        pipelines = (
            lay_out(inputs, part, groups=min(groups, len(part)), count=len(parts), mode=mode)
            for part, groups in zip(parts, choice, strict=True)
        )
        fitting = tuple(one for one in pipelines if one is not None and fits(inputs, one))
        if len(fitting) == len(parts):
            found.add(fitting)
    return found


def pipeline_parts(
    inputs: FlashFlexInputs, count: int, *, mode: Mode = "fixed", even: bool = False
) -> list[list[int]]:
    """GPUs of each pipeline; slow links inside pipelines, fast ones between them for gradients.

    The parts have about equal speed in total, or equally many GPUs if ``even``.
    """
    edges = 1e10 / _bandwidths(inputs)
    if mode == "published":
        edges = np.rint(edges)  # The defect: all links above 20 GB/s are alike, free to cut.
    np.fill_diagonal(edges, 0.0)
    weights = [1.0 if even else device.flops for device in inputs.devices]
    return graph_parts(weights, edges, count)


def _bandwidths(inputs: FlashFlexInputs) -> Floats:
    machines = np.array([device.machine for device in inputs.devices])
    within = np.array([device.within_bytes_per_s for device in inputs.devices])
    same = machines[:, None] == machines[None, :]
    return np.where(same, within[:, None], inputs.between_bytes_per_s)


def lay_out(
    inputs: FlashFlexInputs, part: Sequence[int], *, groups: int, count: int, mode: Mode
) -> FlashFlexPipeline | None:
    """Groups, their order, TP groups and layers of one pipeline; ``None`` if impossible."""
    bandwidths = _bandwidths(inputs)[np.ix_(part, part)]
    np.fill_diagonal(bandwidths, 0.0)
    cut = graph_parts([inputs.devices[device].flops for device in part], bandwidths, groups)
    between = [[float(bandwidths[np.ix_(a, b)].sum()) for b in cut] for a in cut]
    micro_batches = -(-inputs.batch // (inputs.micro_batch * count))
    members = [[part[i] for i in group] for group in cut]
    stages = [tp_groups(inputs, group, micro_batches, mode=mode) for group in members]
    if mode == "fixed" and sum(map(len, stages)) > inputs.layers:
        # Prefer wide TP groups to stages without layers.
        stages = [tp_groups(inputs, group, 1, mode=mode, widest=True) for group in members]
    if not all(stages):
        return None
    found = []
    for order in stage_orders(between, mode=mode):
        path = tuple(group for index in order for group in stages[index])
        layers = split_layers(inputs, path, mode=mode)
        if layers is None:
            return None
        found.append(FlashFlexPipeline(path, layers))
    return min(found, key=lambda pipeline: pipeline_seconds(inputs, pipeline, micro_batches))


def stage_orders(between: Sequence[Sequence[float]], *, mode: Mode) -> list[tuple[int, ...]]:
    """The orders of groups whose neighbours have the fastest links; several if they tie."""
    orders = list(permutations(range(len(between))))
    width = {o: sum(between[one][other] for one, other in pairwise(o)) for o in orders}
    if mode == "published":
        # The defects: the last path from a group is kept rather than the fastest, and among these
        # the one with the slowest links is taken.
        kept = [max(o for o in orders if o[0] == start) for start in range(len(between))]
        return [min(kept, key=lambda order: width[order])]
    fastest = max(width.values())
    return [order for order in orders if width[order] == fastest]


# Conversion to and from the planner's interface ------------------------------------------


def inputs_from(case: Case, kinds: Sequence[Fleet]) -> FlashFlexInputs:
    """FlashFlex's inputs for all machines; the slowest link between any two counts for all."""
    job = case.job
    devices = []
    for machine, (place, size) in enumerate(m for fleet in kinds for m in fleet.machines):
        device = PlacedGpu(
            machine,
            peak_flops(case.cluster.catalogue.gpu(place.gpu), job.precision),
            case.facts.capacity_bytes(place) / GB,
            bytes_per_s_within(case, place),
        )
        devices += [device] * size
    return FlashFlexInputs(
        devices=tuple(devices),
        between_bytes_per_s=slowest_bytes_per_s(case, machine_places(kinds)),
        layers=case.costs.layer_count - 2,
        hidden=job.model.hidden,
        sequence=job.sequence,
        vocabulary=job.model.vocab,
        value_bytes=FLOAT_BYTES[job.precision],
        batch=job.global_batch,
        micro_batch=min(proposals.micro_batch_sizes(job), default=1),
        tp_degrees=equal_gpus.tp_degrees(case, max(MENU)),
    )


def machine_places(kinds: Sequence[Fleet]) -> list[Place]:
    """The place of each machine, by its number."""
    return [place for fleet in kinds for place, _ in fleet.machines]


def to_plan(
    own: FlashFlexPlan, inputs: FlashFlexInputs, job: Job, machines: Sequence[Place]
) -> Plan | str:
    """The plan, or why it cannot be expressed; embedding and head join the ends."""
    pipelines = len(own.pipelines)
    counts = equal_gpus.even_counts(job, size=inputs.micro_batch, pipelines=pipelines)
    if isinstance(counts, str):
        return counts
    recompute = equal_gpus.recompute_of(job)
    rows = []
    for pipeline in own.pipelines:
        if 0 in pipeline.layers:
            return f"stage {pipeline.layers.index(0)} of a pipeline has no blocks"
        cuts = [0, *(end + 1 for end in accumulate(pipeline.layers))]
        cuts[-1] += 1
        places = ((machines[inputs.devices[group[0]].machine],) for group in pipeline.stages)
        stages = zip(pairwise(cuts), map(len, pipeline.stages), places, strict=True)
        rows.append(tuple(Stage(*stage, recompute) for stage in stages))
    return Plan(inputs.micro_batch, tuple(map(Pipeline, counts, rows)))


@dataclass(frozen=True, slots=True)
class FlashFlexPlanner:
    """FlashFlex on all GPU kinds of a cluster at once."""

    counts_max: int = 16
    """Numbers of pipelines tried, spread evenly over what is allowed, in place of a time limit."""
    draws: int = 1
    seed: int = 0
    name: str = "flashflex"

    def proposals(self, case: Case, mode: Mode) -> list[ProposedPlan]:
        """The plans for all numbers of pipelines, best first by FlashFlex's estimate."""
        kinds = equal_gpus.fleets_of(case)
        if not kinds or case.costs.layer_count < 3:
            return []  # No GPU, or no block between the embedding and the head.
        inputs, machines = inputs_from(case, kinds), machine_places(kinds)
        counts = self._counts(len(inputs.devices), case.job.global_batch // inputs.micro_batch)
        return proposals.ranked(
            (
                len(inputs.devices),
                proposals.proposal(own.seconds, to_plan(own, inputs, case.job, machines)),
            )
            for own in search(inputs, counts, mode=mode, draws=self.draws, seed=self.seed)
        )

    def _counts(self, gpus: int, micro_batches: int) -> list[int]:
        """From one pipeline to one per five GPUs; two where there are few GPUs."""
        most = min(max(gpus // 5, 2), gpus, micro_batches)
        tried = min(self.counts_max, most)
        return sorted({round(1 + (most - 1) * k / max(tried - 1, 1)) for k in range(tried)})
