"""Which machine each device group stands on, and how many flows share its way out.

A plan that names no nodes is laid out as Megatron lays out its ranks: in each pool all replicas
of the first stage side by side, then those of the second, machine after machine. Pipelines are
taken in an order of their own contents, so that it never matters how a plan lists them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from simulator.plan import Pipeline, Place, Plan

GroupId = tuple[int, int, int]
"""(pipeline, stage, index within the stage's split)."""
Node = tuple[str, str, str, str | int]
"""(zone, machine type, GPU kind, name or number)."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the device groups of a plan stand."""

    node_of: Mapping[GroupId, Node]

    def same_node(self, one: GroupId, other: GroupId) -> bool:
        return self.node_of[one] == self.node_of[other]


def lay_out(plan: Plan, gpus_per_machine: Callable[[Place], int]) -> Layout:
    """Give each device group a machine: the one that the plan names, else the next free one."""
    node_of: dict[GroupId, Node] = {}
    queues: dict[tuple[str, str, str], list[tuple[tuple[object, ...], GroupId, int]]]
    queues = defaultdict(list)
    rank = _canonical_ranks(plan)
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(plan.owning_stages(pipeline)):
            for i, place in enumerate(stage.places):
                group = (p, s, i)
                pool = (place.zone, place.machine, place.gpu)
                if place.node is not None:
                    node_of[group] = (*pool, place.node)
                else:
                    # Larger groups first, so that the rest of a machine still fits smaller ones.
                    queues[pool].append(((s, -stage.tp, rank[p], i), group, stage.tp))
    for pool, queue in queues.items():
        size = gpus_per_machine(Place(pool[2], pool[1], pool[0]))
        number, free = -1, 0
        for _, group, tp in sorted(queue):
            if tp > free:
                number, free = number + 1, size
            free -= tp
            node_of[group] = (*pool, number)
    for p, pipeline in enumerate(plan.pipelines):
        owners = plan.group_count(pipeline)
        for s in range(owners, len(pipeline.stages)):
            node_of[p, s, 0] = node_of[p, s % owners, 0]
    return Layout(node_of)


def _canonical_ranks(plan: Plan) -> list[int]:
    """Equal pipelines share a rank; the others are ordered by what they contain."""
    keys = [pipeline_key(pipeline) for pipeline in plan.pipelines]
    order = {key: index for index, key in enumerate(sorted(set(keys)))}
    return [order[key] for key in keys]


def pipeline_key(pipeline: Pipeline) -> tuple[object, ...]:
    """All that tells pipelines apart, in a form that sorts."""
    return (
        pipeline.micro_batches,
        *(
            (s.layers, s.tp, s.recompute, s.split, tuple(_place_key(place) for place in s.places))
            for s in pipeline.stages
        ),
    )


def _place_key(place: Place) -> tuple[object, ...]:
    return (place.zone, place.machine, place.gpu, place.node or "", place.devices)
