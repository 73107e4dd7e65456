"""A search proves no bound, and finds no reason, that is not shown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planner import api
from planner.api import plan_job
from planner.move_policy.deadline_outlook import deadline_outlook
from planner.problem.question import Answer, Question
from planner.search.bound import EventBound
from sailord.cli.planning.compare import _enter
from sailord.cli.planning.plan import _Found, _with_outlook
from sailord.cli.planning.question import judge_of
from sailord.planning.capacity_search import choose_capacity
from sailord.planning.messages import CapacityRequest, FoundPlan, PoolSupply
from sailord.planning.plan_search import answer
from simulator.api import Measurements
from simulator.cluster.cluster_file import load_cluster
from simulator.inputs.job_file import load_job
from tests.control.cluster import JOB
from tests.planner.move_policy.test_deadline_outlook import question as late_question
from tests.sailord.planning.requests import NODES, QUESTION, node

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


@pytest.fixture(autouse=True)
def _no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_bound: EventBound) -> None:
        raise AssertionError

    monkeypatch.setattr(EventBound, "__post_init__", refuse)


@pytest.fixture
def question() -> Question:
    cluster = load_cluster(EXAMPLES / "three-zones.toml")
    pool = replace(cluster.pools[0], gpus=2)
    pools = pool, replace(pool, spot=not pool.spot)
    job = load_job(EXAMPLES / "small.toml")
    return Question(job, replace(cluster, pools=pools, quotas=()), Measurements(), budget=5)


def test_plans_for_live_nodes_need_no_bound() -> None:
    first = answer(QUESTION)
    assert isinstance(first, FoundPlan)
    more = (*NODES, node("more"))
    assert isinstance(answer(replace(QUESTION, nodes=more, running=first.plan)), FoundPlan)


def test_the_choice_of_capacity_needs_no_bound() -> None:
    pool = PoolSupply("us-central1-b", "A100-40x2", "A100-40", 2, True, 1, 1, 2.0)
    request = CapacityRequest(JOB, EXAMPLES / "three-zones.toml", None, (pool,), None, 60.0)
    assert choose_capacity(request).counts


def test_a_comparison_needs_no_bound(question: Question) -> None:
    assert _enter(question, "sailor", "fixed", judge_of(question)).plan is not None


def test_the_outlook_of_a_deadline_needs_no_bound(question: Question) -> None:
    found = plan_job(replace(question, is_bounded=False))
    assert found.estimate is not None
    asked = replace(question, job=replace(question.job, steps=10), seconds_left=1e6)
    outlook = deadline_outlook(asked, found.estimate, plan_job)
    assert outlook.mixture is not None


def test_no_reasons_are_searched_for_why_a_part_of_the_mixture_has_no_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On spot machines, on demand in time, and the fastest on demand, as none is in time."""
    asked = late_question(700.0)
    answer = plan_job(replace(asked, seconds_left=None))
    assert answer.plan is not None
    assert answer.estimate is not None
    searches, search = [], api._search

    def counted(question: Question, *rest: Any) -> Answer:
        searches.append(question)
        return search(question, *rest)

    monkeypatch.setattr("planner.api._search", counted)
    found = _with_outlook(_Found(answer.plan, answer.estimate, {}, ()), asked, None)
    assert not found.document["deadline"]["mixture"]["is_guaranteed"]
    assert [each.seconds_left for each in searches] == [None, 400.0, None]
