"""The memory of machines that a plan needs for snapshots, and whether its fullest node has it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from planner.replan.nodes import PlannerNode
from sailord.text.units import memory
from simulator.cluster.cluster import Cluster
from simulator.spec.job import Job
from simulator.spec.plan import Plan
from worker.checkpoint.capacity_check import host_memory


@dataclass(frozen=True, slots=True)
class HostMemory:
    """What the node needs that has the least memory left."""

    node: str
    machine: str
    needed: int
    """Bytes: the files that exist at once, those of a reconfiguration and replicas included."""
    available: int | None
    """The machine's whole memory; ``None``: unknown."""

    @classmethod
    def of(
        cls, job: Job, placed: Plan, nodes: Iterable[PlannerNode], cluster: Cluster
    ) -> HostMemory:
        """Return it for a plan that names its nodes."""
        needs = host_memory(job, placed, {node.id: node.zone for node in nodes})
        machines = cluster.catalogue.machines
        found = [
            cls(
                node.id,
                node.machine,
                needs[node.id].during_change,
                machines[node.machine].host_memory_bytes if node.machine in machines else None,
            )
            for node in nodes
            if node.id in needs
        ]
        return max(found, key=lambda each: (each.needed / (each.available or 1e15), each.needed))

    @property
    def lines(self) -> tuple[str, ...]:
        """Return it as text."""
        of = "" if self.available is None else f" of {memory(self.available)}"
        line = f"snapshots   {memory(self.needed)}{of} of memory on {self.node}"
        if self.available is None or self.needed < self.available:
            return (line,)
        why = f"{self.machine} has too little memory for its snapshots: the job will not start"
        return (line, f"warning     {why}")

    def to_json(self) -> dict[str, Any]:
        """Return it as a part of the plan's document."""
        return {
            "node": self.node,
            "needed_bytes": self.needed,
            "machine_bytes": self.available,
        }
