"""Estimates and plans of random cases equal those on record; rewrite them with SAILOR_RETELL=1.

The record was made before the files moved into wings, so that no refactoring changes a number
unseen. A change that is meant to alter them rewrites the record, and its author reads the diff.
"""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from planner.api import plan_job
from planner.problem.question import Question
from simulator.estimate.result import Estimate
from simulator.inputs.plan_file import plan_to_json
from tests.planner.small_cases import random_case
from tests.simulator.worlds import world_and_plan

HERE = Path(__file__).parent
ESTIMATES = 240
PLANS = 60
GOALS = ("throughput", "cost")


def figures(estimate: Estimate) -> list[float | None]:
    """Seconds, dollars, and the bytes of the fullest device."""
    bytes_most = max(device.total for pipeline in estimate.memory for device in pipeline)
    return [estimate.iteration_s, estimate.money.total_usd, bytes_most]


def estimated(number: int) -> dict[str, Any]:
    _, world, plan = world_and_plan(f"recorded {number}")
    return {"event": figures(world.estimator.estimate(plan))}


def planned(number: int) -> dict[str, Any]:
    name = ("event", "paper")[number % 2]
    goal = GOALS[number // 2 % 2]
    case = random_case(random.Random(f"recorded {number}"), goal=goal)
    answer = plan_job(Question(case.job, case.cluster, case.measurements, name))
    found: dict[str, Any] = {"estimator": name, "judged": answer.evaluations}
    if answer.plan is not None and answer.estimate is not None:
        found |= {"plan": plan_to_json(answer.plan), "figures": figures(answer.estimate)}
        if case.paper(answer.plan) is not None:
            found["paper"] = figures(case.paper(answer.plan))  # type: ignore[arg-type]  # just asked
    return found


RECORDS: dict[str, tuple[Callable[[int], dict[str, Any]], int]] = {
    "estimates": (estimated, ESTIMATES),
    "plans": (planned, PLANS),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RECORDS)
def test_random_cases_give_the_recorded_answers(name: str) -> None:
    answer, count = RECORDS[name]
    found = [answer(number) for number in range(count)]
    file = HERE / f"{name}.json"
    if os.environ.get("SAILOR_RETELL"):
        lines = ",\n".join(json.dumps(each) for each in found)
        file.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    recorded = json.loads(file.read_text(encoding="utf-8"))
    assert len(recorded) == count
    wrong = [n for n in range(count) if list(differences(found[n], recorded[n]))]
    assert not wrong, (wrong, found[wrong[0]], recorded[wrong[0]])


def differences(found: Any, recorded: Any) -> Iterator[tuple[Any, Any]]:
    """Where two JSON values differ, by more than the last digits of a number."""
    match found, recorded:
        case dict(), dict() if found.keys() == recorded.keys():
            for key in found:
                yield from differences(found[key], recorded[key])
        case list() | tuple(), list() if len(found) == len(recorded):
            for one, other in zip(found, recorded, strict=True):
                yield from differences(one, other)
        case float() | int(), float() | int() if math.isclose(found, recorded, rel_tol=1e-11):
            pass
        case _ if found != recorded:
            yield found, recorded


def test_a_difference_is_seen() -> None:
    assert not list(differences({"a": [1.0, None]}, {"a": [1.0 + 1e-13, None]}))
    assert list(differences({"a": [1.0, None]}, {"a": [1.0 + 1e-9, None]}))
    assert list(differences({"a": [1.0]}, {"a": [1.0, 2.0]}))
    assert list(differences({"tp": 1}, {"tp": 2}))
