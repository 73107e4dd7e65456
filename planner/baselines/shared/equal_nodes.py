"""A cluster as equal nodes, and plans of equal degrees, as most published planners assume.

Only machines that are up count.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from planner.baselines.shared.equal_gpus import even_counts, recompute_of, tp_degrees
from planner.baselines.shared.machines import machines_of
from planner.compare.interface import Case
from simulator.cluster.cluster import Cluster
from simulator.estimate.memory import MemoryModel
from simulator.models.layers import Recompute
from simulator.spec.job import Job
from simulator.spec.plan import Pipeline, Place, Plan, Stage


@dataclass(frozen=True, slots=True)
class EqualNodes:
    """Machines cut into nodes of one size, ordered by GPU kind, zone and machine type."""

    gpus_per_node: int
    places: tuple[Place, ...]
    """One per node."""

    @property
    def gpus(self) -> int:
        return self.gpus_per_node * len(self.places)

    def groups(self, tp: int) -> tuple[Place, ...]:
        """The place of each run of ``tp`` consecutive ranks."""
        assert self.gpus_per_node % tp == 0, (self.gpus_per_node, tp)
        return tuple(place for place in self.places for _ in range(self.gpus_per_node // tp))


@dataclass(frozen=True, slots=True)
class Degrees:
    """The degrees of a plan whose pipelines are equal."""

    tp: int
    dp: int
    pp: int
    micro_batch_size: int

    @property
    def gpus(self) -> int:
        return self.tp * self.dp * self.pp


def gpu_kinds(cluster: Cluster) -> tuple[str, ...]:
    """The GPU kinds that are up, by name."""
    return tuple(sorted({pool.gpu for pool in cluster.pools if pool.gpus > 0}))


def equal_nodes(cluster: Cluster, kinds: Iterable[str]) -> EqualNodes:
    """Cut the machines of these kinds into nodes of the size that leaves the fewest GPUs out.

    A machine of twice the size is two nodes; one that is too small is left out.
    """
    wanted = frozenset(kinds)
    pools = [pool for pool in cluster.pools if pool.gpu in wanted and pool.gpus > 0]
    machines = [machine for machine in machines_of(cluster) if machine[0].gpu in wanted]
    sizes = sorted({min(pool.gpus, pool.gpus_per_machine) for pool in pools}, reverse=True)
    if not sizes:
        return EqualNodes(1, ())
    size = max(sizes, key=lambda size: sum(gpus - gpus % size for _, gpus in machines))
    return EqualNodes(size, tuple(place for place, gpus in machines for _ in range(gpus // size)))


def whole_degrees(case: Case, nodes: EqualNodes) -> list[int]:
    """The TP degrees that divide a node."""
    size = nodes.gpus_per_node
    return [tp for tp in tp_degrees(case, size) if size % tp == 0]


def even_plan(
    shape: Degrees,
    groups: Sequence[Place],
    cuts: Sequence[int],
    job: Job,
    recompute: Recompute | None = None,
) -> Plan | str:
    """``dp`` pipelines with the same boundaries and one TP degree, or why there is no such plan.

    Replica ``r`` of stage ``s`` takes group ``s * dp + r``: ranks run over the tensor axis first,
    then over the replicas, then over the stages. Recomputation is the job's unless given.
    """
    counts = even_counts(job, size=shape.micro_batch_size, pipelines=shape.dp)
    if isinstance(counts, str):
        return counts
    ranges = list(pairwise(cuts))
    if any(first >= end for first, end in ranges):
        return "a stage has no layers"
    assert len(groups) >= shape.dp * len(ranges), "a plan takes GPUs that are not there"
    chosen = recompute or recompute_of(job)
    columns = [
        [Stage(layers, shape.tp, (place,), chosen) for place in groups[s * shape.dp :][: shape.dp]]
        for s, layers in enumerate(ranges)
    ]
    return Plan(shape.micro_batch_size, tuple(map(Pipeline, counts, zip(*columns, strict=True))))


def fits(case: Case, plan: Plan | str) -> bool:
    """Whether there is a plan whose devices all fit the common memory model."""
    if isinstance(plan, str):
        return False
    memory = MemoryModel(plan, case.costs, case.facts.capacity_bytes)
    return all(device.fits for pipeline in memory.pipelines() for device in pipeline)
