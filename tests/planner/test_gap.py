"""Searching until a gap is reached, and stopping at any time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from planner.api import plan_job
from planner.problem.question import Question
from planner.search.bound import EventBound
from planner.search.local_search import EventSearch
from simulator.api import Measurements
from simulator.cluster.cluster import Cluster
from simulator.cluster.cluster_file import load_cluster
from simulator.inputs.job_file import load_job

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def question() -> Question:
    cluster = load_cluster(EXAMPLES / "three-zones.toml")
    one_zone = Cluster(cluster.pools[1:2], cluster.catalogue, cluster.zone_regions)
    return Question(load_job(EXAMPLES / "opt-350m.toml"), one_zone, Measurements(), budget=30)


@pytest.mark.slow
def test_a_search_ends_as_soon_as_the_gap_is_reached(question: Question) -> None:
    plain, easy = plan_job(question), plan_job(replace(question, gap=0.5))
    assert plain.gap is not None
    assert easy.gap is not None
    assert plain.gap <= easy.gap <= 0.5
    assert (easy.evaluations, easy.note) == (plain.evaluations, "")


@pytest.mark.slow
def test_a_gap_out_of_reach_is_searched_for_and_said_to_be(question: Question) -> None:
    plain, hard = plan_job(question), plan_job(replace(question, gap=1e-6))
    assert hard.evaluations > 2 * plain.evaluations
    assert hard.objective is not None
    assert plain.objective is not None
    assert hard.objective <= plain.objective
    assert hard.lower_bound >= plain.lower_bound * (1 - 1e-9)
    assert hard.note.startswith("a gap of 1e-06 was not reached: the bound")


@pytest.mark.slow
def test_an_interrupted_search_answers_with_its_best_plan(
    question: Question, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = plan_job(question)
    judge = EventSearch.judge_plan

    def interrupted(self: EventSearch, *given: object) -> object:
        if self.evaluations == 10:
            raise KeyboardInterrupt
        return judge(self, *given)  # type: ignore[arg-type]  # passed on as they came

    monkeypatch.setattr(EventSearch, "judge_plan", interrupted)
    answer = plan_job(question)
    assert answer.evaluations == 10
    assert answer.note == "stopped before its end"
    assert answer.objective is not None
    assert whole.objective is not None
    assert 0 < answer.lower_bound <= whole.objective <= answer.objective


@pytest.mark.slow
def test_an_interrupted_bound_holds(question: Question, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = plan_job(question)
    seen = EventBound._seen
    calls = 0

    def interrupted(self: EventBound, *given: object, **named: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise KeyboardInterrupt
        return seen(self, *given, **named)  # type: ignore[arg-type]  # passed on as they came

    monkeypatch.setattr(EventBound, "_seen", interrupted)
    answer = plan_job(question)
    assert (answer.objective, answer.note) == (whole.objective, "stopped before its end")
    assert 0 < answer.lower_bound <= whole.lower_bound
