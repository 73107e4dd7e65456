"""What losses of spot nodes cost a plan in expectation, where they are in every pipeline.

With a pipeline of on-demand nodes the state survives every loss of spot nodes. Without one, a loss
may take nodes of all pipelines at once, and the job goes on from its last checkpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from planner.move_policy.decide_move import span
from planner.move_policy.move_gain import pool_name
from planner.move_policy.node_lifetimes import LifetimeHistory
from planner.replan.next_move import seconds_to
from planner.replan.nodes import PlannerNode
from planner.replan.replan_tables import ReplanTables
from simulator.cluster.cluster import Cluster
from simulator.estimate.result import Estimate
from simulator.spec.plan import Plan
from simulator.traces.trace import Trace


@dataclass(frozen=True, slots=True)
class SpotLosses:
    """Losses of a plan with spot nodes in every pipeline."""

    losses_per_s: float
    """Losses per second that take nodes of the plan."""
    all_lost_per_s: float
    """Losses per second that take nodes of every pipeline at once."""
    down_s: float
    """Downtime of a loss that leaves a pipeline whole."""
    restore_s: float
    """Downtime of a loss that leaves none: the state comes from a checkpoint."""
    samples_per_s: float
    """Throughput while nothing is lost."""

    @property
    def share_lost(self) -> float:
        """Share of the throughput that downtime takes; steps that are repeated are not counted."""
        some = max(0.0, self.losses_per_s - self.all_lost_per_s)
        return min(1.0, some * self.down_s + self.all_lost_per_s * self.restore_s)

    @property
    def expected_samples_per_s(self) -> float:
        """Throughput with losses, as long as other nodes replace the lost ones."""
        return self.samples_per_s * (1 - self.share_lost)

    @property
    def sentence(self) -> str:
        """The warning."""
        said = "spot nodes are in every pipeline"
        if self.losses_per_s <= 0:
            return f"{said}; no loss is expected"
        said += f": a loss every {span(1 / self.losses_per_s)} takes {self.down_s:.2g} s"
        if self.all_lost_per_s > 0:
            said += (
                f"; one every {span(1 / self.all_lost_per_s)} hits all pipelines at once and"
                f" takes {self.restore_s:.2g} s if no other node keeps a copy of the state: the job"
                " then goes on from its last checkpoint"
            )
        return (
            f"{said}; expected {self.expected_samples_per_s:.4g} of {self.samples_per_s:.4g}"
            f" samples/s ({-self.share_lost:+.1%}), without steps that are repeated"
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {
            "share_lost": self.share_lost,
            "expected_samples_per_s": self.expected_samples_per_s,
        }


def has_spot_in_every_pipeline(plan: Plan, nodes: Sequence[PlannerNode]) -> bool:
    """Whether no pipeline of a placed plan survives the loss of all spot nodes."""
    return all(_spot_nodes(plan, nodes))


def spot_losses(
    plan: Plan,
    estimate: Estimate,
    nodes: Sequence[PlannerNode],
    history: LifetimeHistory,
    *,
    now_s: float,
    down_s: float,
    restore_s: float,
) -> SpotLosses | None:
    """The expected losses of a placed plan; ``None`` if a pipeline has no spot nodes."""
    of_pipelines = _spot_nodes(plan, nodes)
    if not all(of_pipelines):
        return None
    used = Counter(map(pool_name, frozenset().union(*of_pipelines)))
    all_lost = 0.0
    for pool in used:
        record = history.record(pool, now_s)
        chance = 1.0
        # Pipelines on the same nodes are lost together, others apart.
        for some in set(of_pipelines):
            here = sum(pool_name(node) == pool for node in some)
            chance *= 1 - (1 - record.loss_share) ** here
        all_lost += record.losses_per_s * chance
    return SpotLosses(
        history.hits_per_s(used, now_s),
        all_lost,
        down_s,
        restore_s,
        estimate.throughput_samples_per_s,
    )


def expected_losses(
    tables: ReplanTables,
    plan: Plan,
    estimate: Estimate,
    nodes: Sequence[PlannerNode],
    history: LifetimeHistory,
    *,
    now_s: float,
) -> SpotLosses | None:
    """``spot_losses`` with predicted downtimes."""
    if not has_spot_in_every_pipeline(plan, nodes):
        return None

    def down_s(running: Plan | None) -> float:
        return seconds_to(tables, plan, estimate, nodes, running=running, is_planned=False)

    return spot_losses(
        plan, estimate, nodes, history, now_s=now_s, down_s=down_s(plan), restore_s=down_s(None)
    )


def _spot_nodes(plan: Plan, nodes: Sequence[PlannerNode]) -> list[frozenset[PlannerNode]]:
    """The spot nodes of each pipeline."""
    spot = {node.id: node for node in nodes if node.spot}
    return [
        frozenset(
            spot[place.node]
            for stage in pipeline.stages
            for place in stage.places
            if place.node in spot
        )
        for pipeline in plan.pipelines
    ]


def history_of(trace: Trace, cluster: Cluster) -> tuple[LifetimeHistory, float]:
    """The losses of a trace, as if observed, and the time of its end."""
    history, before = LifetimeHistory(), Counter[str]()
    for interval in trace.intervals:
        up: Counter[str] = Counter()
        for pool, gpus in zip(cluster.pools, interval.gpus, strict=True):
            node = PlannerNode("", *pool.key, pool.gpus_per_machine, pool.spot)
            up[pool_name(node)] += -(-gpus // pool.gpus_per_machine)
        lost = {name: count - up[name] for name, count in before.items() if count > up[name]}
        history = history.seen(interval.start_s, up=up, lost=lost)
        before = up
    return history, trace.end_s
