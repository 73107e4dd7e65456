"""The gain per second and the cost of a move from the running plan to the next one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from planner.move_policy.decide_move import PossibleMove, Unit
from planner.problem.preference import PlanEstimate, objective_of, why_tied
from planner.replan.damage import RunningPlan
from planner.replan.move_cost import MoveCost
from planner.replan.nodes import PlannerNode, nodes_used
from planner.replan.replanner import Replan
from simulator.cluster.cluster import Cluster
from simulator.estimate.result import Estimate
from simulator.spec.job import Goal
from simulator.spec.plan import PlaceKey


def pool_name(node: PlannerNode) -> str:
    """The name of a node's pool in the history."""
    return f"{node.gpu}@{node.zone}" + (" spot" if node.spot else "")


def offer_of(
    running: RunningPlan,
    next_plan: Replan,
    nodes: Sequence[PlannerNode],
    *,
    goal: Goal,
    age_s: Mapping[str, float],
    loss_s: float = 0.0,
    full: frozenset[str] = frozenset(),
    seconds_left: float | None = None,
) -> PossibleMove:
    """Compare the running plan with the next one.

    ``age_s`` is how long each node has been up, ``loss_s`` the seconds that the loss of a node of
    the next plan would take, ``full`` the pools to which no node can be added.
    """
    plan, estimate, _, move = next_plan.found
    before, after = nodes_used(running.plan), nodes_used(plan)
    new = [node for node in nodes if node.id in after - before]
    ages = [age_s[node.id] for node in new]
    gain, cost, unit = _sums(running.estimate, estimate, move, goal)
    worth_per_s = estimate.throughput_samples_per_s
    if unit == "$":
        worth_per_s = (estimate.money.total_usd or 0.0) / estimate.iteration_s
    is_same = plan == running.plan
    # A move that only adds idle nodes is not taken back at the next prediction, so a tie suffices.
    tied = None if before < after else why_tied(running, PlanEstimate(plan, estimate), goal)
    return PossibleMove(
        gain_per_s=0.0 if is_same else gain,
        unit=unit,
        cost=0.0 if is_same else cost,
        downtime_s=move.seconds,
        newcomers=_by_pool(new),
        newcomer_age_s=sum(ages) / len(ages) if ages else math.inf,
        needed=next_plan.needed,
        seconds_left=seconds_left,
        before=_by_pool(node for node in nodes if node.id in before),
        after=_by_pool(node for node in nodes if node.id in after),
        full=full,
        loss_cost=loss_s * worth_per_s,
        tied=tied,
        with_idle=_describe_idle_plans(running, next_plan, goal),
    )


def _describe_idle_plans(running: RunningPlan, next_plan: Replan, goal: Goal) -> str | None:
    """How much worse the best plan with idle nodes is than the running one, if that is known."""
    other = next_plan.with_idle
    if other is None:
        return None
    now, then = objective_of(running, goal), objective_of(other, goal)
    if not 0 < now <= then < math.inf:
        return None
    better, worse = ("cheaper", "dearer") if goal == "cost" else ("faster", "slower")
    share = f"{then / now - 1:.1%}"
    how = f"no {better}" if share == "0.0%" else f"{share} {worse}"
    return f"the best one with idle nodes is {how}"


def full_pools(cluster: Cluster, nodes: Sequence[PlannerNode]) -> frozenset[str]:
    """Return the pools whose machines, of all types, are up, by the cluster file's count."""
    up: Counter[tuple[PlaceKey, bool]] = Counter()
    for node in nodes:
        up[node.key, node.spot] += node.gpus
    most: Counter[tuple[PlaceKey, bool]] = Counter()
    for pool in cluster.pools:
        most[pool.key, pool.spot] += pool.gpus + pool.obtainable_gpus
    is_full: dict[str, bool] = {}
    for (key, spot), gpus in most.items():
        name = pool_name(PlannerNode("", *key, 1, spot))
        is_full[name] = is_full.get(name, True) and 0 < gpus <= up[key, spot]
    return frozenset(name for name, all_up in is_full.items() if all_up)


def _by_pool(nodes: Iterable[PlannerNode]) -> dict[str, int]:
    return dict(sorted(Counter(map(pool_name, nodes)).items()))


def _sums(old: Estimate, new: Estimate, move: MoveCost, goal: Goal) -> tuple[float, float, Unit]:
    """Gain per second, cost of the move, and their unit."""
    if goal == "cost":
        old_usd, new_usd = old.money.total_usd, new.money.total_usd
        assert new_usd is not None, "a cost objective refuses unknown prices"
        assert move.rent_usd is not None, "a cost objective refuses unknown prices"
        if old_usd is None:
            # The old plan ran on lost nodes whose price is unknown.
            return 0.0, move.rent_usd + move.egress_usd, "$"
        cost = move.rent_usd + move.egress_usd + move.steps_lost * old_usd
        return (old_usd - new_usd) / new.iteration_s, cost, "$"
    pace = old.throughput_samples_per_s
    cost = pace * move.seconds
    usd = old.money.total_usd
    if usd:
        # Count egress as the samples that its dollars would have bought.
        cost += move.egress_usd / usd * old.samples_per_iteration
    return new.throughput_samples_per_s - pace, cost, "samples"
