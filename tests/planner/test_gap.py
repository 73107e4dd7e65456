"""Searching until a gap is reached, and stopping at any time."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planner import event_planner
from planner.api import plan_job
from planner.cost_frontier import frontier
from planner.problem.question import Question
from planner.search.bound import EventBound
from planner.search.local_search import EventSearch
from planner.search.simpler import Variants
from planner.what_if import explained
from simulator.api import Measurements
from simulator.cluster.cluster import Cluster
from simulator.cluster.cluster_file import load_cluster
from simulator.inputs.job_file import load_job
from simulator.spec.job import Objective

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
def test_a_gap_out_of_reach_is_searched_for_and_noted(
    question: Question, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_planner, "default_budget", lambda _: 40)
    monkeypatch.setattr(event_planner, "GAP_WORK_MAX", 4e7)
    question = replace(question, budget=None)
    plain, hard = plan_job(question), plan_job(replace(question, gap=1e-6))
    assert hard.evaluations >= plain.evaluations + 10 * 40
    assert hard.objective is not None
    assert plain.objective is not None
    assert hard.objective <= plain.objective
    assert hard.lower_bound >= plain.lower_bound * (1 - 1e-9)
    assert hard.note.startswith("a gap of 1e-06 was not reached: the bound")


def test_progress_tells_plans_judged_and_the_work_of_the_bound(question: Question) -> None:
    lines: list[str] = []
    answer = plan_job(replace(question, budget=10, told=lines.append))
    assert answer.estimate is not None
    assert lines[0] == "1 of about 10 plans judged"
    known = f", best plan {answer.estimate.iteration_s:.4g} s"
    assert lines[-1].startswith("bound: ")
    assert lines[-1].endswith(known)


def interrupt(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, *, at: int = 1) -> None:
    """Press Ctrl-C at the beginning of a function's call number ``at``."""
    whole, calls = getattr(owner, name), itertools.count(1)

    def interrupted(*given: Any, **named: Any) -> Any:
        if next(calls) == at:
            raise KeyboardInterrupt
        return whole(*given, **named)

    monkeypatch.setattr(owner, name, interrupted)


@pytest.mark.slow
def test_an_interrupted_search_answers_with_its_best_plan(
    question: Question, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = plan_job(question)
    interrupt(monkeypatch, EventSearch, "judge_plan", at=11)
    answer = plan_job(replace(question, is_stoppable=True))
    assert answer.evaluations == 10
    assert answer.note == "stopped before its end"
    assert answer.objective is not None
    assert whole.objective is not None
    assert 0 < answer.lower_bound <= whole.objective <= answer.objective
    assert answer.rejected


MOMENTS: list[tuple[Any, str, int, dict[str, Any]]] = [
    (EventBound, "__post_init__", 1, {}),
    (EventBound, "_quickest_s", 2, {}),
    (EventBound, "_seen", 5, {}),
    (event_planner, "_formula_plans", 2, {"gap": 1e-6}),
    (EventSearch, "__post_init__", 2, {"gap": 1e-6}),
    (EventBound, "__post_init__", 2, {"gap": 1e-6}),
    (Variants, "mixes", 1, {"prefer": "simple"}),
    (event_planner, "simpler_or_cheaper", 1, {"prefer": "simple"}),
    (event_planner, "explain_event", 1, {}),
]
"""Functions, the call that is interrupted, and what the question asks for."""


@pytest.mark.slow
@pytest.mark.parametrize(("owner", "name", "at", "asked"), MOMENTS)
def test_the_best_plan_survives_an_interruption_at_any_moment(
    question: Question, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, at: int, asked: Any
) -> None:
    question = replace(question, budget=10)
    whole = plan_job(question)
    interrupt(monkeypatch, owner, name, at=at)
    answer = plan_job(replace(question, is_stoppable=True, **asked))
    assert answer.note == "stopped before its end"
    assert answer.objective is not None
    assert whole.objective is not None
    assert answer.objective <= whole.objective
    assert 0 < answer.lower_bound <= answer.objective * (1 + 1e-9)


@pytest.mark.slow
def test_a_plan_that_only_a_relaxed_search_found_survives_an_interruption(
    question: Question, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, calls = EventSearch.run, itertools.count(1)

    def run(self: EventSearch) -> object:
        """Find nothing within the limits, then something without them, and then be interrupted."""
        call = next(calls)
        if call == 3:
            raise KeyboardInterrupt
        return whole(self) if call == 2 else None

    monkeypatch.setattr(EventSearch, "run", run)
    usd = 1.0
    job = replace(question.job, objective=Objective(max_usd_per_iteration=usd))
    answer = plan_job(replace(question, job=job, budget=5, is_stoppable=True))
    assert answer.note == "stopped before its end"
    assert answer.estimate is not None
    assert answer.estimate.money.total_usd is not None
    assert answer.estimate.money.total_usd <= usd
    assert 0 < answer.lower_bound <= answer.estimate.iteration_s


@pytest.mark.parametrize("moment", [(EventSearch, "judge_plan"), (EventBound, "_seen")])
def test_interruption_is_raised_where_the_note_is_not_shown(
    question: Question, monkeypatch: pytest.MonkeyPatch, moment: tuple[Any, str]
) -> None:
    interrupt(monkeypatch, *moment, at=3)
    with pytest.raises(KeyboardInterrupt):
        plan_job(question)


def test_an_interrupted_frontier_ends(question: Question, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt(monkeypatch, EventSearch, "judge_plan", at=3)
    with pytest.raises(KeyboardInterrupt):
        frontier(replace(question, budget=5))


def test_interrupted_reasons_of_a_plan_end(
    question: Question, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = replace(question, budget=5, is_stoppable=True)
    answer = plan_job(asked)
    interrupt(monkeypatch, EventSearch, "judge_plan", at=3)
    with pytest.raises(KeyboardInterrupt):
        explained(asked, answer)
