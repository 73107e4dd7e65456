"""Fleets: the GPUs of one kind, for planners that support a single kind."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from planner.baselines.shared.machines import (
    bytes_per_s_within,
    machines_of,
    slowest_bytes_per_s,
)
from planner.compare.interface import Case
from simulator.inputs.plan_check import split_in_proportion, tp_problem
from simulator.models.layers import Recompute
from simulator.spec.job import Job
from simulator.spec.plan import Pipeline, Place, Plan, Stage

MB = 2.0**20
PROFILED_SAMPLES = (1, 2, 4, 8)
"""Micro batches for which profiles are made."""
FLEET_MESSAGE_BYTES = 64e6
"""The message size at which the single bandwidth of a fleet is measured."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """All machines that are up with one GPU kind, zone after zone."""

    gpu: str
    machines: tuple[tuple[Place, int], ...]
    """Place and number of GPUs of each machine."""

    @property
    def gpus(self) -> int:
        return sum(size for _, size in self.machines)

    @property
    def gpus_per_machine(self) -> int:
        """The most common machine size; the larger one among equals."""
        sizes = [size for _, size in self.machines]
        return max(sizes, key=lambda size: (sizes.count(size), size))

    @property
    def place(self) -> Place:
        return self.machines[0][0]

    def hand_out(self, tps: Sequence[int]) -> tuple[Place, ...] | None:
        """Give each TP group a machine; ``None`` if they do not all fit.

        Larger groups choose first, so that they leave no holes that only they could have filled.
        """
        free = [size for _, size in self.machines]
        fitting: dict[int, deque[int]] = {}
        given: dict[int, Place] = {}
        for index in sorted(range(len(tps)), key=lambda i: (-tps[i], i)):
            tp = tps[index]
            if tp not in fitting:
                fitting[tp] = deque(m for m, left in enumerate(free) if left >= tp)
            queue = fitting[tp]
            while queue and free[queue[0]] < tp:
                queue.popleft()
            if not queue:
                return None
            free[queue[0]] -= tp
            given[index] = self.machines[queue[0]][0]
        return tuple(given[index] for index in range(len(tps)))


def fleets_of(case: Case) -> tuple[Fleet, ...]:
    """One fleet per GPU kind, by name."""
    alike = groupby(machines_of(case.cluster), key=lambda machine: machine[0].gpu)
    return tuple(Fleet(gpu, tuple(machines)) for gpu, machines in alike)


def fleet_bytes_per_s(case: Case, fleet: Fleet) -> float:
    """Bandwidth between machines for planners that know a single one: the slowest pair's.

    In a fleet of one machine, the bandwidth within the machine.
    """
    if len(fleet.machines) == 1:
        size = fleet.machines[0][1]
        return bytes_per_s_within(case, fleet.place, gpus=size, message_bytes=FLEET_MESSAGE_BYTES)
    places = (place for place, _ in fleet.machines)
    return slowest_bytes_per_s(case, places, message_bytes=FLEET_MESSAGE_BYTES)


def tp_degrees(case: Case, gpus_per_machine: int) -> tuple[int, ...]:
    """Powers of two that divide the model, up to the limits of job and machine."""
    most = min(case.job.max_tp, gpus_per_machine)
    powers = (1 << k for k in range(most.bit_length()))
    return tuple(tp for tp in powers if tp <= most and tp_problem(tp, case.job) is None)


def recompute_of(job: Job) -> Recompute:
    """Recomputation for planners that do not choose it: only if the job demands it."""
    return "full" if job.recompute == "full" else "none"


@dataclass(frozen=True, slots=True)
class ReplicatedStage:
    """A stage without places: a number of replicas of a TP group on a range of layers."""

    layers: tuple[int, int]
    tp: int
    replicas: int
    recompute: Recompute = "none"


def hand_out_stages(
    fleet: Fleet, pipelines: Sequence[Sequence[ReplicatedStage]]
) -> list[list[Stage]] | None:
    """Give every replica of every stage a place, the replicas of a stage side by side."""
    depth = max(len(shapes) for shapes in pipelines)
    order = [(s, p) for s in range(depth) for p, row in enumerate(pipelines) if s < len(row)]
    tps = [pipelines[p][s].tp for s, p in order for _ in range(pipelines[p][s].replicas)]
    places = fleet.hand_out(tps)
    if places is None:
        return None
    stages: list[list[Stage]] = [[] for _ in pipelines]
    taken = 0
    for s, p in order:
        shape = pipelines[p][s]
        mine = places[taken : taken + shape.replicas]
        taken += shape.replicas
        split = (1,) * shape.replicas
        stages[p].append(Stage(shape.layers, shape.tp, mine, shape.recompute, split))
    return stages


def folded(shapes: Sequence[ReplicatedStage]) -> list[list[ReplicatedStage]]:
    """The stages of equal pipelines, as many as the greatest common divisor of the replica counts.

    Stages of 2, 2 and 4 replicas become two pipelines whose last stage is split in two.
    """
    pipelines = math.gcd(*(shape.replicas for shape in shapes))
    return [[replace(s, replicas=s.replicas // pipelines) for s in shapes]] * pipelines


def placed_plan(
    fleet: Fleet,
    job: Job,
    rows: Sequence[Sequence[ReplicatedStage]],
    *,
    size: int,
    weights: Sequence[int] = (),
) -> Plan | str:
    """The plan of these pipelines and this micro batch size, or why there is none.

    Pipelines with ``weights`` share the micro batches in proportion to them.
    """
    counts = even_counts(job, size=size, pipelines=len(rows))
    if isinstance(counts, str):
        return counts
    stages = hand_out_stages(fleet, rows)
    if stages is None:
        return "its TP groups do not fit into the machines"
    if weights:
        counts = split_in_proportion(sum(counts), list(weights))
    return Plan(size, tuple(map(Pipeline, counts, map(tuple, stages))))


def even_counts(job: Job, *, size: int, pipelines: int) -> list[int] | str:
    """Micro batches of each pipeline that sum to the global batch, or why there are none.

    They differ by one where the batch does not divide.
    """
    batch = job.global_batch
    if job.micro_batches is not None and size not in job.micro_batches:
        return f"micro batches of {size} are not among those that the job considers"
    if batch % size:
        return f"micro batches of {size} do not divide the global batch of {batch}"
    if batch // size < pipelines:
        return f"{batch // size} micro batches of {size} do not feed {pipelines} pipelines"
    return split_in_proportion(batch // size, [1] * pipelines)
