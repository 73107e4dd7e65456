"""Fleets: the GPUs of one kind, for planners that support a single kind."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from planner.compare.interface import Case, Proposal
from simulator.inputs.plan_check import split_in_proportion, tp_problem
from simulator.inputs.plan_file import plan_text
from simulator.spec.job import Job
from simulator.spec.plan import Pipeline, Place, Plan, Recompute, Stage


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
    machines: dict[str, list[tuple[Place, int]]] = {}
    for pool in sorted(case.cluster.pools, key=lambda p: (p.gpu, p.zone, p.machine, p.spot)):
        whole, rest = divmod(pool.gpus, pool.gpus_per_machine)
        sizes = [pool.gpus_per_machine] * whole + [rest] * (rest > 0)
        machines.setdefault(pool.gpu, []).extend((pool.place, size) for size in sizes)
    return tuple(Fleet(gpu, tuple(found)) for gpu, found in sorted(machines.items()) if found)


def bytes_per_s_between(case: Case, fleet: Fleet, *, message_bytes: float = 64e6) -> float:
    """Bandwidth between machines for planners that know a single one: the slowest pair's.

    In a fleet of one machine, the bandwidth within the machine.
    """
    if len(fleet.machines) == 1:
        size = fleet.machines[0][1]
        seconds = case.network.within_node(fleet.place, gpus=size, bytes_each=message_bytes)
        return message_bytes / seconds if seconds else math.inf
    places = tuple(dict.fromkeys(place for place, _ in fleet.machines))
    return message_bytes / max(
        case.network.between_nodes(one, other, flows=1, bytes_each=message_bytes)
        for one in places
        for other in places
    )


def tp_degrees(case: Case, gpus_per_machine: int) -> tuple[int, ...]:
    """Powers of two that divide the model, up to the limits of job and machine."""
    most = min(case.job.max_tp, gpus_per_machine)
    powers = (1 << k for k in range(most.bit_length()))
    return tuple(tp for tp in powers if tp <= most and tp_problem(tp, case.job) is None)


def micro_batch_sizes(job: Job, usual: tuple[int, ...] = (1, 2, 4, 8)) -> tuple[int, ...]:
    """The sizes to try: those of the job, else the usual ones, that divide the global batch."""
    sizes = job.micro_batches if job.micro_batches is not None else usual
    return tuple(size for size in sorted(sizes) if job.global_batch % size == 0)


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
    """The stages of as many equal pipelines as divide all replica counts.

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


def proposal(seconds: float, plan: Plan | str) -> Proposal:
    """A proposal of a plan, or the reason why there is none."""
    return Proposal(seconds, None, plan) if isinstance(plan, str) else Proposal(seconds, plan)


def ranked(proposals: Iterable[tuple[int, Proposal]]) -> list[Proposal]:
    """Proposals best first; ties go to fewer GPUs, then by the plan's text.

    Each comes with its number of GPUs, which also counts where there is no plan.
    """

    def score(found: tuple[int, Proposal]) -> tuple[float, int]:
        return found[1].seconds, found[0]

    def written(found: tuple[int, Proposal]) -> str:
        plan = found[1].plan
        return found[1].why_not if plan is None else plan_text(plan)

    best: list[Proposal] = []
    for _, equals in groupby(sorted(proposals, key=score), key=score):
        alike = list(equals)
        if len(alike) > 1:  # Large plans are long to write, and ties are few.
            alike.sort(key=written)
        best.extend(found for _, found in alike)
    return best
