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
    """Return that any further node would break the job's limit per hour, if that is so."""
    most, costs = replanner.job.objective.max_usd_per_hour, found.proposal.usd_per_hour
    idle = [node for node in nodes if node.id not in found.proposal.members]
    if most is None or costs is None or not idle:
        return ()
    facts = PlaceFacts(cluster_with(replanner.cluster, nodes), replanner.measurements.network)
    prices = [(node.gpus, facts.price_usd_per_gpu_hour(Place(*node.key))) for node in idle]
    least = min((gpus * usd for gpus, usd in prices if usd is not None), default=0.0)
    if costs + least <= most:
        return ()
    which = f"idle: {len(idle)} node{'s' * (len(idle) > 1)}"
    return (
        f"{which}; with the cheapest of them (${least:,.2f} an hour) the plan (${costs:,.2f}) "
        f"would break max_usd_per_hour = {most:g}",
    )
