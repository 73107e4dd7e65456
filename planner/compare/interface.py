"""The interface of a planner: a case in, proposals out, best first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from simulator.cluster.cluster import Cluster
from simulator.cluster.place_facts import PlaceFacts
from simulator.layer_costs.layer_costs import LayerCosts
from simulator.network.network import Network
from simulator.spec.job import Job
from simulator.spec.plan import Plan

Mode = Literal["fixed", "published"]
"""``published`` keeps the known defects of a public program; ``fixed`` mends them."""


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A job, a cluster, and tables of layer and transfer times."""

    job: Job
    cluster: Cluster
    costs: LayerCosts
    network: Network
    facts: PlaceFacts


@dataclass(frozen=True, slots=True)
class ProposedPlan:
    """A plan as its planner sees it."""

    seconds: float
    """The planner's own estimate of an iteration; used for ranking, never reported as a result."""
    plan: Plan | None
    """``None`` where the common plan format cannot express it; see ``why_not``."""
    why_not: str = ""
    usd: float | None = None
    """The planner's own estimate of an iteration's cost, if it has one."""


class Planner(Protocol):
    """A planner; the same case gives the same proposals on every machine."""

    @property
    def name(self) -> str: ...

    def proposals(self, case: Case, mode: Mode) -> Sequence[ProposedPlan]:
        """The plans it finds, best first by its own estimate."""
        ...
