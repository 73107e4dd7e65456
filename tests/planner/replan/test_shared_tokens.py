"""Replans of a plan whose ranks share tokens share them, too."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import pytest

from planner.replan.damage import RunningPlan
from planner.replan.nodes import PlannerNode, nodes_of, nodes_used
from planner.replan.replanner import Replanner
from simulator.api import Measurements
from simulator.spec.job import Job
from simulator.spec.plan import Pipeline, Plan, Stage
from tests.planner.replan.test_replanner import check
from tests.planner.search.test_shared_tokens import LARGE, cluster

HERE = cluster(24).pools[0]
SIZES = (6, 5, 5, 5, 5, 5, 5, 6)
PLAN = Plan(
    1,
    (
        Pipeline(
            64,
            tuple(Stage(span, 2, (HERE.place,)) for span in pairwise(accumulate(SIZES, initial=0))),
        ),
    ),
    sequence_parallel=True,
)


def running_on(job: Job) -> tuple[Replanner, RunningPlan, tuple[PlannerNode, ...]]:
    """The job on two of three nodes."""
    replanner, nodes = Replanner(job, cluster(24), Measurements()), nodes_of(cluster(24))
    placed = replanner.place(PLAN, nodes)
    assert placed is not None
    return replanner, replanner.prepare(placed, nodes), nodes


@pytest.mark.parametrize("tokens", [4096, 4098])
def test_a_lost_node_is_replaced_and_ranks_share_tokens_as_before(tokens) -> None:
    """TP 4 does not divide 4,098 tokens: a plan with it would be refused."""
    replanner, running, nodes = running_on(replace(LARGE, sequence=tokens))
    live = tuple(one for one in nodes if one.id != min(nodes_used(running.plan)))
    found = replanner.replan(running, live)
    check(found, replanner, live)
    assert found.plan is not None
    assert found.plan.sequence_parallel
    degrees = replanner.templates_of(running.plan).degrees
    assert degrees == ((1, 2, 4, 8) if tokens == 4096 else (1, 2))


def test_new_pipelines_may_fit_only_because_their_ranks_share_tokens() -> None:
    """Long samples need more GPUs where every rank of a stage holds all of their tokens."""
    tables = Replanner(replace(LARGE, sequence=16384), cluster(24), Measurements())
    fewest = [
        min(
            sum(stage.tp for stage in template.stages)
            for template in tables.templates_of(plan).templates((0,), 1, 64)
        )
        for plan in (PLAN, replace(PLAN, sequence_parallel=False))
    ]
    assert fewest[0] < fewest[1]
