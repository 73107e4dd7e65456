"""What is measured next: everything once, few nodes of each site in turn, within the budget."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from sailord.network.core.choose import PastMeasurements, choose, open_questions
from sailord.network.core.model import GENTLE_BYTES, CurveToMeasure, Failure, NetworkPolicy
from tests.sailord.network.core.clusters import measured, nodes_of, site

NOW = 1e6
ALWAYS = NetworkPolicy(seconds_per_hour=3600.0)
A, B = site("a"), site("b")


def test_each_two_sites_are_measured_each_way_and_both_ways():
    found = open_questions(nodes_of({"a": 2, "b": 1}), PastMeasurements(), ALWAYS, NOW)
    assert set(found) == {
        CurveToMeasure(A, A),
        CurveToMeasure(A, A, both_ways=True),
        CurveToMeasure(A, B),
        CurveToMeasure(B, A),
        CurveToMeasure(A, B, both_ways=True),
    }
    assert open_questions(nodes_of({"a": 1}), PastMeasurements(), ALWAYS, NOW) == []


def test_flows_double_up_to_the_gpus_of_the_smaller_node():
    nodes = [*nodes_of({"a": 1}, gpus=16), *nodes_of({"b": 1}, gpus=4)]
    flows = {q.flows for q in open_questions(nodes, PastMeasurements(), ALWAYS, NOW)}
    assert flows == {1, 2, 4}


def test_link_faster_than_tcp_is_not_measured():
    known = PastMeasurements(too_fast=frozenset({(A, A)}))
    found = open_questions(nodes_of({"a": 2, "b": 1}), known, ALWAYS, NOW)
    assert {(q.sender, q.receiver) for q in found} == {(A, B), (B, A)}


def test_nodes_take_turns():
    nodes, known = nodes_of({"a": 6}), PastMeasurements()
    used = Counter[str]()
    for number in range(3):
        pick = choose(nodes, known, ALWAYS, NOW + number)
        assert pick is not None
        used.update((pick.sender, pick.receiver))
        found = measured(pick.sender, pick.receiver, at=NOW + number, question=pick.question)
        known = PastMeasurements((*known.good, found))
    assert set(used.values()) == {1}


def test_question_is_open_until_enough_pairs_answered_and_again_when_they_are_old():
    nodes = nodes_of({"a": 2, "b": 2})
    found = [measured(*pair, at=NOW) for pair in (("a1", "b1"), ("a1", "b1"), ("a2", "b1"))]
    assert CurveToMeasure(A, B) in open_questions(nodes, PastMeasurements(found), ALWAYS, NOW)
    found.append(measured("a2", "b2", at=NOW))
    assert CurveToMeasure(A, B) not in open_questions(nodes, PastMeasurements(found), ALWAYS, NOW)
    later = NOW + ALWAYS.fresh_hours * 3600.0 + 1
    assert CurveToMeasure(A, B) in open_questions(nodes, PastMeasurements(found), ALWAYS, later)


def test_ordered_round_wants_one_new_answer_each():
    nodes = nodes_of({"a": 1, "b": 1})
    found = [measured("a1", "b1", at=NOW - 1), measured("b1", "a1", at=NOW + 1)]
    assert set(open_questions(nodes, PastMeasurements(found), ALWAYS, NOW + 2, since=NOW)) == {
        CurveToMeasure(A, B), CurveToMeasure(A, B, both_ways=True)
    }  # fmt: skip


def test_ordered_round_gives_up_on_answers_that_are_not_believed():
    nodes = nodes_of({"a": 1, "b": 1})
    flagged = [measured("a1", "b1", at=NOW + n) for n in range(3)]
    found = open_questions(nodes, PastMeasurements(flagged=flagged), ALWAYS, NOW + 5, since=NOW)
    assert CurveToMeasure(A, B) not in found


@pytest.mark.parametrize(
    "policy",
    [
        NetworkPolicy(seconds_per_hour=0.0),
        replace(ALWAYS, seconds_per_hour=10.0),
        replace(ALWAYS, mbytes_per_hour=600.0),
    ],
    ids=["never", "seconds are spent", "bytes are spent"],
)
def test_schedule_keeps_to_its_budget(policy):
    spent = [replace(measured("a1", "b1", at=NOW - 60), took_s=5.0, bytes_moved=300_000_000)]
    nodes = nodes_of({"a": 1, "b": 1})
    assert choose(nodes, PastMeasurements(spent), policy, NOW) is None
    assert choose(nodes, PastMeasurements(spent), policy, NOW, since=NOW) is not None, (
        "it was ordered"
    )
    if policy.seconds_per_hour:
        assert choose(nodes, PastMeasurements(spent), policy, NOW + 3600.0) is not None


def test_nodes_that_train_are_measured_last_and_gently():
    nodes = nodes_of({"a": 2, "b": 1})
    nodes[0] = replace(nodes[0], is_training=True)
    within = [
        replace(measured("a1", "a2"), at=NOW, question=q)
        for q in (CurveToMeasure(A, A), CurveToMeasure(A, A, both_ways=True))
    ]
    pick = choose(nodes, PastMeasurements(within), ALWAYS, NOW, since=NOW)
    assert pick is not None
    assert {pick.sender, pick.receiver} == {"a2", "b1"}
    assert max(pick.sizes_bytes) > GENTLE_BYTES
    nodes[1] = replace(nodes[1], is_training=True)
    gentle = choose(nodes, PastMeasurements(), ALWAYS, NOW)
    assert gentle is not None
    assert max(gentle.sizes_bytes) == GENTLE_BYTES
    assert gentle.look_s > pick.look_s


def test_failed_pair_waits_longer_each_time_and_others_go_first():
    nodes, question = nodes_of({"a": 1, "b": 1}), CurveToMeasure(A, B)
    both_ways = replace(question, both_ways=True)
    older = replace(measured("a1", "b1", at=NOW - 99), question=both_ways)
    only = PastMeasurements([measured("b1", "a1", at=NOW), older])
    waits = []
    for count in (1, 2, 3, 20):
        failures = [Failure(NOW, "a1", "b1", question, "lost", is_busy=False)] * count
        known = replace(only, failures=failures)
        waits.append(
            next(s for s in range(0, 700, 5) if choose(nodes, known, ALWAYS, NOW + s, since=NOW))
        )
    assert waits == [10, 20, 40, 600]


def test_liars_are_not_asked():
    nodes = nodes_of({"a": 1, "b": 2})
    pick = choose(nodes, PastMeasurements(liars=frozenset({"b1"})), ALWAYS, NOW)
    assert pick is not None
    assert "b1" not in (pick.sender, pick.receiver)
