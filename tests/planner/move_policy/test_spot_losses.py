"""What losses of spot nodes cost a plan that has them in every pipeline."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.move_policy.node_lifetimes import LifetimeHistory
from planner.move_policy.spot_losses import SpotLosses, history_of, spot_losses
from planner.replan.nodes import PlannerNode
from simulator.cluster.cluster import Cluster, Pool
from simulator.estimate.result import Estimate, Money
from simulator.hardware.catalogue import load_catalogue
from simulator.spec.plan import Pipeline, Plan, Stage
from simulator.spec.provenance import MEASURED
from simulator.traces.trace import trace_of

ESTIMATE = Estimate("event", 2.0, 8, (), Money(None, 0.0), (), "", MEASURED)
HOUR = 3600.0


def node(name: str, *, spot: bool = True, zone: str = "a") -> PlannerNode:
    return PlannerNode(name, "T4", "T4x4", zone, 4, spot)


def plan_on(*pipelines: tuple[PlannerNode, ...]) -> Plan:
    return Plan(
        1,
        tuple(
            Pipeline(
                4,
                tuple(
                    Stage((s, s + 1), 1, (replace(n.place, node=n.id),)) for s, n in enumerate(some)
                ),
            )
            for some in pipelines
        ),
    )


def losses(
    *pipelines: tuple[PlannerNode, ...], history: LifetimeHistory | None = None
) -> SpotLosses | None:
    nodes = sorted({n for some in pipelines for n in some})
    return spot_losses(
        plan_on(*pipelines), ESTIMATE, nodes, history or LifetimeHistory(), now_s=0.0, down_s=10.0,
        restore_s=100.0,
    )  # fmt: skip


def test_a_pipeline_on_demand_keeps_the_state() -> None:
    assert losses((node("1"),), (node("2", spot=False),)) is None
    assert losses((node("1", spot=False),)) is None


def test_unobserved_pools_lose_half_of_their_nodes_once_an_hour() -> None:
    found = losses((node("1"),), (node("2"),))
    assert found is not None
    # Each of two pipelines with one node is hit by half of the losses.
    assert found.all_lost_per_s == pytest.approx(0.25 / HOUR)
    assert found.losses_per_s == pytest.approx(1 / HOUR)
    assert found.share_lost == pytest.approx((0.75 * 10 + 0.25 * 100) / HOUR)
    assert found.expected_samples_per_s == pytest.approx(4.0 * (1 - found.share_lost))
    assert "expected 3.964 of 4 samples/s (-0.9%)" in found.sentence


def test_longer_pipelines_are_hit_together_more_often() -> None:
    found = losses((node("1"), node("2")), (node("3"), node("4")))
    assert found is not None
    assert found.all_lost_per_s == pytest.approx(0.75**2 / HOUR)


def test_pipelines_on_the_same_nodes_are_lost_together() -> None:
    found = losses((node("1"),), (node("1"),))
    assert found is not None
    assert found.all_lost_per_s == pytest.approx(0.5 / HOUR)


def test_no_loss_of_one_pool_hits_pipelines_in_another() -> None:
    found = losses((node("1"),), (node("2", zone="b"),))
    assert found is not None
    assert found.all_lost_per_s == 0.0
    assert found.losses_per_s == pytest.approx(2 / HOUR)
    assert "all pipelines at once" not in found.sentence


def test_losses_of_a_trace_are_counted_as_if_observed() -> None:
    pool = Pool("a", "T4", "T4x4", 4, 16, spot=True)
    points = ((600.0 * n, (16 if n % 2 == 0 else 4,)) for n in range(12))
    history, end_s = history_of(
        trace_of("", iter(points), 7200.0), Cluster((pool,), load_catalogue())
    )
    assert end_s == 7200.0
    record = history.record("T4@a spot", end_s)
    assert 2 / HOUR < record.losses_per_s < 4 / HOUR
    # Three of four nodes each time, with a prior of half of them.
    assert 0.7 < record.loss_share < 0.75
