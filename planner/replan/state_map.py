"""Which node and device holds which training state, and what a stage needs.

A TP group stays within one machine and its ranks together hold all of their layers, so between
machines the unit of state is the whole layer. Within a machine, atoms (equal slices of a layer)
tell which device already has what it needs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from planner.replan.nodes import PlannerNode
from simulator.arrays import Bools, Floats
from simulator.layer_costs.layer_costs import LayerCosts
from simulator.spec.job import OPTIMIZER_MOMENTS
from simulator.spec.plan import Place, Plan, Stage

STATE_BYTES = 4
"""Master weights and each optimizer moment are fp32; 16-bit weights are derived from them."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainingState:
    """Bytes of a job's training state by unit: each layer, then the tensor shared by head and
    embedding.
    """

    bytes_by_unit: Floats
    max_tp: int

    @property
    def layer_count(self) -> int:
        """Number of layers."""
        return len(self.bytes_by_unit) - 1

    def needs(self, *layers: tuple[int, int]) -> Bools:
        """The units that stages with these layers need."""
        found = np.zeros(len(self.bytes_by_unit), dtype=np.bool_)
        for first, end in layers:
            found[first:end] = True
            # The shared tensor is one unit, needed by both of its layers.
            found[-1] |= first == 0 or end == self.layer_count
        return found

    def atoms(self, plans: Iterable[Plan | None]) -> int:
        """Number of slices per layer such that every TP degree takes whole slices."""
        degrees = {
            stage.tp
            for plan in plans
            if plan is not None
            for pipeline in plan.pipelines
            for stage in pipeline.stages
        }
        return math.lcm(self.max_tp, *degrees)


def state_of(costs: LayerCosts) -> TrainingState:
    """The state of a job: one copy of master weights and moments."""
    each = STATE_BYTES * (1 + OPTIMIZER_MOMENTS[costs.job.optimizer])
    layers = each * costs.parameters(1)
    shared = each * costs.tied_parameters(1)
    layers[[0, -1]] -= shared
    return TrainingState(np.append(layers, shared), costs.job.max_tp)


def held_by_node(
    running: Plan | None, nodes: Collection[PlannerNode], state: TrainingState
) -> dict[str, Bools]:
    """The units that each live node holds under the running plan."""
    held = {node.id: np.zeros(len(state.bytes_by_unit), dtype=np.bool_) for node in nodes}
    if running is None:
        return held
    rows: dict[tuple[int, int], Bools] = {}
    for stage, place in placed_stages(running):
        if place.node in held:
            needed = rows.get(stage.layers)
            if needed is None:
                needed = rows[stage.layers] = state.needs(stage.layers)
            held[place.node] |= needed
    return held


def placed_stages(plan: Plan) -> Iterable[tuple[Stage, Place]]:
    """Each stage with its place, in the order of the plan."""
    return ((stage, stage.place) for pipeline in plan.pipelines for stage in pipeline.stages)


def placed_groups(plan: Plan) -> Iterable[tuple[tuple[Stage, ...], Place]]:
    """The stages of each device group, one or several chunks, with their place."""
    return (
        (stages, stages[0].place) for pipeline in plan.pipelines for stages in plan.chunks(pipeline)
    )


Layers = tuple[tuple[int, int], ...]
"""The layers of a device group, as (first, end): of its stage, or of each of its chunks."""
LayerSpan = tuple[Layers, tuple[int, int]]
"""What one device holds: its group's layers, and of each the atoms (first, end)."""


def layers_of(stages: Iterable[Stage]) -> Layers:
    """The layers of a device group with these stages."""
    return tuple([stage.layers for stage in stages])


def spans_by_device(plan: Plan, atoms: int) -> dict[tuple[str, int], LayerSpan]:
    """What each device of a placed plan holds."""
    found = {}
    for stages, place in placed_groups(plan):
        assert place.node is not None
        share, layers = atoms // stages[0].tp, layers_of(stages)
        for rank, device in enumerate(place.devices):
            found[place.node, device] = (layers, (rank * share, (rank + 1) * share))
    return found


def overlap(one: LayerSpan | None, other: LayerSpan, layer_bytes: Floats, atoms: int) -> float:
    """Bytes that both spans hold; ``layer_bytes`` are summed up to each layer."""
    if one is None:
        return 0.0
    (layers, (low, high)), (layers_, (low_, high_)) = one, other
    shared = max(0, min(high, high_) - max(low, low_))
    if not shared:
        return 0.0
    found = 0.0
    for first, end in layers:
        for first_, end_ in layers_:
            start, stop = max(first, first_), min(end, end_)
            if start < stop:
                found += float(layer_bytes[stop] - layer_bytes[start]) * shared / atoms
    return found


def devices_left(
    nodes: Iterable[PlannerNode], taken: Mapping[str, set[int]]
) -> dict[str, list[int]]:
    """The free devices of each node."""
    return {
        node.id: [d for d in range(node.gpus) if d not in taken.get(node.id, ())] for node in nodes
    }
