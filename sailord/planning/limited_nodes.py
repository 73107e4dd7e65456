"""Says that a job's limit in dollars keeps idle nodes out of its plan."""

from __future__ import annotations

from collections.abc import Sequence

from planner.replan.nodes import PlannerNode, cluster_with
from planner.replan.replanner import Replanner
from sailord.planning.messages import FoundPlan
from simulator.cluster.place_facts import PlaceFacts
from simulator.spec.plan import Place


def why_limited(
    replanner: Replanner, nodes: Sequence[PlannerNode], found: FoundPlan
) -> tuple[str, ...]:
    """Return that any further GPU would break the job's limit per hour, if that is so."""
    most, costs = replanner.job.objective.max_usd_per_hour, found.proposal.usd_per_hour
    idle = [node for node in nodes if node.id not in found.proposal.members]
    if most is None or costs is None or not idle:
        return ()
    facts = PlaceFacts(cluster_with(replanner.cluster, nodes), replanner.measurements.network)
    prices = [facts.price_usd_per_gpu_hour(Place(*node.key)) for node in idle]
    least = min((usd for usd in prices if usd is not None), default=0.0)
    if costs + least <= most:
        return ()
    which = f"idle: {len(idle)} node{'s' * (len(idle) > 1)}"
    return (
        f"{which}; the plan costs ${costs:,.2f} an hour, and one more GPU there (${least:,.2f} or "
        f"more) would break max_usd_per_hour = {most:g}",
    )
