"""What follows a plan whose ranks share tokens shares them, too."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import pytest

from planner.replan.nodes import nodes_of, nodes_used
from planner.replan.replan_search import ReplanSearch
from planner.replan.replanner import Replanner
from simulator.api import Measurements
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


@pytest.mark.parametrize("tokens", [4096, 4098])
def test_a_lost_node_is_replaced_and_ranks_share_tokens_where_degrees_divide_them(tokens) -> None:
    """TP 4 does not divide 4,098 tokens: a plan with it would be refused."""
    job = replace(LARGE, sequence=tokens)
    replanner, nodes = Replanner(job, cluster(24), Measurements()), nodes_of(cluster(24))
    placed = replanner.place(PLAN, nodes)
    assert placed is not None
    running = replanner.prepare(placed, nodes)
    gone = min(nodes_used(placed))
    live = tuple(one for one in nodes if one.id != gone)
    found = replanner.replan(running, live)
    check(found, replanner, live)
    assert found.plan is not None
    degrees = {stage.tp for each in found.plan.pipelines for stage in each.stages}
    assert found.plan.sequence_parallel is all(tokens % tp == 0 for tp in degrees)
    wide = replace(PLAN, pipelines=(Pipeline(64, (Stage((0, 42), 4, (HERE.place,)),)),))
    search = ReplanSearch(replanner, running, live, 1)
    assert search._sharing(wide).sequence_parallel is (tokens % 4 == 0)
