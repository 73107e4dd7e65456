"""The outlook of a deadline: what on demand alone can do in time, and what spot would save."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.api import plan_job
from planner.move_policy.deadline_outlook import CHANGE_S, Mixture, deadline_outlook
from planner.problem.question import Answer, Question
from simulator.api import Measurements
from simulator.cluster.cluster import Cluster, Pool
from simulator.estimate.result import Estimate
from simulator.hardware.catalogue import load_catalogue
from simulator.models.presets import preset
from simulator.spec.job import Job, Objective

STEPS = 1000


def question(seconds_left: float | None) -> Question:
    """A job with the goal cost, for which one A100 takes over 2000 s, and two about half of it."""
    pools = tuple(
        Pool("us-central1-a", "A100-40", "a2-highgpu-2g", 2, 2, 0, spot, price)
        for spot, price in ((False, 3.67), (True, 1.1))
    )
    job = Job("due", preset("opt-350m"), 64, 2048, steps=STEPS, objective=Objective("cost"))
    return Question(
        job,
        Cluster(pools, load_catalogue()),
        Measurements(),
        budget=20,
        seconds_left=seconds_left,
        proves=False,
        is_bounded=False,
    )


def told(seconds_left: float) -> tuple[Mixture, list[Estimate]]:
    """The mixture, and the plans that were found for it: on spot, then on demand."""
    asked = question(seconds_left)
    found: list[Estimate] = []

    def search(question: Question) -> Answer:
        answer = plan_job(question)
        if answer.estimate is not None:
            found.append(answer.estimate)
        return answer

    some = plan_job(replace(asked, seconds_left=None)).estimate
    assert some is not None
    mix = deadline_outlook(asked, some, search).mixture
    assert mix is not None
    return mix, found


def test_on_demand_alone_takes_a_dearer_plan_that_is_in_time() -> None:
    mix, (spot, on_demand) = told(1520)
    assert mix.is_guaranteed
    assert STEPS * on_demand.iteration_s + CHANGE_S <= 1520 < STEPS * spot.iteration_s
    assert on_demand.money.total_usd is not None
    assert spot.money.total_usd is not None
    assert mix.most_usd == pytest.approx(STEPS * on_demand.money.total_usd)
    # Spot takes twice as long, for which there is hardly any time.
    saved_usd = on_demand.money.total_usd - spot.money.total_usd
    by_spot = (mix.most_usd - mix.expected_usd) / saved_usd
    assert by_spot > 0
    trains_s = by_spot * spot.iteration_s + (STEPS - by_spot) * on_demand.iteration_s
    assert trains_s + CHANGE_S <= 1520 + 1e-6


def test_without_a_plan_in_time_all_steps_are_priced_on_the_fastest_plan() -> None:
    """The safety net would take that plan at once."""
    mix, (spot, fastest) = told(700)
    assert not mix.is_guaranteed
    assert fastest.iteration_s < 0.6 * spot.iteration_s
    assert fastest.money.total_usd is not None
    assert mix.expected_usd == mix.most_usd == pytest.approx(STEPS * fastest.money.total_usd)


def test_no_plan_is_searched_for_if_the_change_takes_all_the_time() -> None:
    """Only searches without a limit of time are made."""
    asked, times = question(CHANGE_S), []
    some = plan_job(replace(asked, seconds_left=None))
    assert some.estimate is not None

    def search(question: Question) -> Answer:
        times.append(question.seconds_left)
        return some

    deadline_outlook(asked, some.estimate, search)
    assert times == [None, None]
