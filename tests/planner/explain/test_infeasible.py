"""Why there is no plan, from the answers to easier questions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from planner.explain.infeasible import refusals
from planner.problem.objective import Limits
from simulator.spec.job import Job, Objective

PACE, NEXT_S = 5.004807362210215, 0.19980789021985088
"""The next float above ``1 / PACE``, whose product with ``PACE`` is rounded to 1."""


def refused(objective: Objective, fastest_s: float, **limits: Any) -> list[str]:
    """The problems if every easier question has a plan of ``fastest_s`` seconds."""
    money = SimpleNamespace(total_usd=0.0)
    estimate = SimpleNamespace(iteration_s=fastest_s, money=money)
    found = cast("Any", SimpleNamespace(estimate=estimate, plan=object()))
    job = cast("Job", SimpleNamespace(objective=objective))
    asked = refusals(job, (), Limits(objective, **limits), lambda *_, **__: found)
    return [str(problem) for problem in asked]


def test_a_pace_that_the_fastest_plan_just_keeps_is_not_in_the_way() -> None:
    assert 1 / PACE < NEXT_S
    assert NEXT_S * PACE == 1
    (said,) = refused(Objective(min_iterations_per_s=PACE), NEXT_S)
    assert "no plan that was judged keeps all limits together" in said


@pytest.mark.parametrize(
    ("objective", "limits", "said"),
    [
        (Objective(min_iterations_per_s=2.0), {}, "lower it by 50%"),
        (Objective(deadline="2030-01-01"), {"steps": 10, "seconds_left": 4.0}, "move it by 6 s"),
    ],
)
def test_the_limit_that_the_fastest_plan_breaks_is_named(
    objective: Objective, limits: dict[str, Any], said: str
) -> None:
    (found,) = refused(objective, 1.0, **limits)
    assert said in found
