"""A deadline or a budget that cannot be kept is told when the job is submitted."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from agents.protocol.records import Bill, JobId, JobRecord, Saving
from sailord.api.handlers.jobs import budget_warnings, deadline_warnings, limit_warnings

PLACE = Saving(uri="file:///checkpoints")
JOB = JobRecord(JobId("j"), "queued", submitted_at=0.0, steps=10, saving=PLACE, deadline=7200.0)


def test_warning_names_the_earliest_end_if_it_is_too_late() -> None:
    assert deadline_warnings(JOB, 7200.0) == ()
    (told,) = deadline_warnings(JOB, 14_400.0)
    assert told.startswith(
        "deadline: it cannot be met: by the best plan all steps left are done at"
    )
    assert "1970-01-01 04:00:00+00:00, 2.0 h later" in told


@pytest.mark.parametrize("seconds", [4e8, 1e13, float("inf")])
def test_warning_of_an_end_after_more_than_a_year_has_no_date(seconds: float) -> None:
    """The job is queued by then, so that the answer must be no error."""
    (told,) = deadline_warnings(JOB, seconds)
    assert "all steps left are done " in told
    assert told.endswith(" days later")


@pytest.mark.parametrize("why", ["no plan fits", "the planner found nothing within 8 s"])
def test_warning_says_why_the_duration_is_unknown(why: str) -> None:
    (told,) = deadline_warnings(JOB, why)
    assert why in told


def test_warning_for_a_job_without_checkpoints_says_that_it_may_begin_again() -> None:
    record = JobRecord(JobId("j"), "queued", steps=10, deadline=7200.0)
    (told,) = deadline_warnings(record, 10.0)
    assert "[checkpoint] uri" in told


def test_a_budget_that_does_not_pay_for_all_steps_is_warned_of() -> None:
    record = JobRecord(JobId("j"), "queued", steps=10, bill=Bill(usd_max=100.0))
    assert budget_warnings(record, 100.0) == ()
    (told,) = budget_warnings(record, 120.5)
    assert "$100.00 do not pay for all steps left: by the cheapest plan they cost $120.50" in told
    (told,) = budget_warnings(record, "no price")
    assert "not known: no price" in told


@pytest.mark.parametrize("begun", [0, 900])
def test_a_deadline_and_a_budget_are_for_the_steps_left(begun: int) -> None:
    asked = []

    async def ask_end(what: str, request: Any, *, timeout_s: float) -> float:
        del timeout_s
        asked.append((what, request.begun))
        return 1.0

    config = SimpleNamespace(
        cluster_file=None, profiles=None, measured_links=None,
        capacity=SimpleNamespace(usd_per_hour_max=None),
    )  # fmt: skip
    cluster = SimpleNamespace(planner=SimpleNamespace(ask_end=ask_end))
    api: Any = SimpleNamespace(config=config, capacity=None, cluster=cluster)
    record = JobRecord(JobId("j"), "queued", steps=1000, saving=PLACE, deadline=7200.0,
                       bill=Bill(usd_max=100.0), begun=begun)  # fmt: skip
    assert asyncio.run(limit_warnings(api, record, "spec")) == ()
    assert asked == [("shortest_s", begun), ("least_usd", begun)]
