"""A plan can be repeated without the planner."""

from __future__ import annotations

import json

from agents.protocol.records import GenerationRecord, JobId, Point, Restore
from sailord.planning.messages import FoundPlan, repeat_plan
from sailord.planning.plan_search import answer
from tests.sailord.planning.requests import QUESTION


def test_repeated_plan_needs_no_planner_and_has_a_predicted_cost():
    first = answer(QUESTION)
    assert isinstance(first, FoundPlan)
    members, point = first.proposal.members, Restore(Point(7, 1), "memory")
    record = GenerationRecord(
        *(JobId("j"), 1, "open", first.proposal.plan, members, point, 1, "a test"),
        usd_per_hour=3.0,
        predicted_s=9.0,
    )
    again = repeat_plan(record, first.plan, json.loads(first.about_bytes))
    assert again is not None
    assert (again.proposal.plan, again.proposal.members) == (first.proposal.plan, members)
    assert again.proposal.iteration_s == first.proposal.iteration_s
    assert again.proposal.plain_s == 9.0, "what running steps correct may have changed"
    assert again.proposal.usd_per_hour == 3.0
    assert again.proposal.next_move_s == first.proposal.next_move_s
    move = again.about["move"]
    assert again.proposal.move_s > sum(move["phases"].values()) - move["trained_s"] > 0
    assert move["phases"]["rebuild_s"] == 0.0
    assert repeat_plan(record, first.plan, {"estimate": {}}) is None
    before = {**first.about, "again": {"seconds": 3.0}}
    old = repeat_plan(record, first.plan, before)
    assert old is not None
    assert old.proposal.next_move_s is None, "an older version did not predict it"
