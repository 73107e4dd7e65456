"""Whole rounds on simulated clusters: with noise, lying agents, lost links, thousands of nodes."""

from __future__ import annotations

import pytest

from sailord.network.core.choose import open_questions
from sailord.network.core.curve_fit import fit_curves
from sailord.network.core.model import CurveToMeasure
from tests.sailord.network.core.clusters import SimulatedCluster, nodes_of, site, times_as_long

NEAR, FAR = (1e-3, 1e9), (5e-2, 2e7)
LINKS = {
    (x, y): (1e-4, 1.5e9) if x == y else FAR if "c" in (x, y) else NEAR
    for x in "abc"
    for y in "abc"
}
TRUE = {ends: pytest.approx(rate, rel=0.15) for ends, (_, rate) in LINKS.items()}


def rates(cluster: SimulatedCluster) -> dict[tuple[str, str], float]:
    return {
        (c.question.sender.zone[-1], c.question.receiver.zone[-1]): c.bytes_per_s
        for c in fit_curves(cluster.verdict.good)
        if c.question.flows == 1 and not c.question.both_ways
    }


@pytest.mark.parametrize("seed", range(5))
def test_honest_nodes_are_all_believed(seed):
    cluster = SimulatedCluster(nodes_of({"a": 4, "b": 3, "c": 3}), LINKS, seed=seed)
    done = cluster.run(1000)
    assert done == 15 * 3, "each of 15 questions between three pairs of nodes"
    assert cluster.verdict.flagged == ()
    assert rates(cluster) == {
        ends: pytest.approx(rate, rel=0.15) for ends, (_, rate) in LINKS.items()
    }


@pytest.mark.parametrize("factor", [1e-6, 1e-2, 1e3], ids=["far too fast", "too fast", "too slow"])
@pytest.mark.parametrize("seed", range(3))
def test_lying_agent_changes_nothing(factor, seed):
    liars = {"a1": times_as_long(factor)}
    cluster = SimulatedCluster(nodes_of({"a": 4, "b": 3, "c": 3}), LINKS, seed=seed, liars=liars)
    cluster.run(100)
    assert {f.measurement.sender for f in cluster.verdict.flagged} == {"a1"}
    assert rates(cluster) == {
        ends: pytest.approx(rate, rel=0.15) for ends, (_, rate) in LINKS.items()
    }
    assert cluster.picks[-1].sender != "a1"


@pytest.mark.slow
def test_lost_link_is_retried_with_backoff_and_measured_once_it_is_back():
    cluster = SimulatedCluster(
        nodes_of({"a": 2, "b": 2, "c": 1}), LINKS, down={("a", "c"), ("c", "a")}
    )
    for _ in range(200):
        if not cluster.run(1):
            cluster.now += 10.0
    tries = [pick for pick in cluster.picks if {pick.sender[0], pick.receiver[0]} == {"a", "c"}]
    assert 10 < len(tries) < 80
    assert set(rates(cluster)) == LINKS.keys() - {("a", "c"), ("c", "a"), ("c", "c")}
    cluster.down.clear()
    for _ in range(200):
        if not cluster.run(1):
            cluster.now += 10.0
    assert set(rates(cluster)) == LINKS.keys() - {("c", "c")}


def test_two_thousand_nodes_need_no_more_measurements_than_ten():
    cluster = SimulatedCluster(nodes_of({"a": 900, "b": 800, "c": 300}), LINKS)
    assert cluster.run(1000) == 45
    assert open_questions(cluster.nodes, cluster.known, cluster.policy, cluster.now) == []
    asked = [node for pick in cluster.picks for node in (pick.sender, pick.receiver)]
    assert len(set(asked)) == len(asked), "no node is asked twice while others rest"
    assert CurveToMeasure(site("c"), site("a")) in {pick.question for pick in cluster.picks}


def test_ordered_round_ends():
    liars = {"b1": times_as_long(1e-9)}
    cluster = SimulatedCluster(nodes_of({"a": 2, "b": 1}), LINKS, liars=liars)
    since = cluster.now
    cluster.run(500, since=since)
    left = open_questions(cluster.nodes, cluster.known, cluster.policy, cluster.now, since=since)
    assert left == []
    assert cluster.verdict.liars == {"b1"}
    assert len(cluster.picks) < 30
