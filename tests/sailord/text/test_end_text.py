"""When a job ends: at its last step, or when its budget is spent."""

from __future__ import annotations

from sailord.text.end_text import end_text, eta_s, paid_s, usd_to_come
from sailord.text.units import timestamp

SPENT = {"usd": 5.0, "usd_per_hour": 12.0, "usd_max": None}
JOB = {"id": "tale", "steps": 200, "step": 50, "measured": {"iteration_s": 2.0}, "spent": SPENT}
"""It needs 300 s, and $1."""


def with_budget(usd: float):
    return JOB | {"spent": SPENT | {"usd_max": usd}}


def test_eta_and_cost_to_come_need_a_speed_a_last_step_and_a_price():
    assert (eta_s(JOB), usd_to_come(JOB)) == (300.0, 1.0)
    assert eta_s(JOB | {"step": 210}) == 0.0
    assert eta_s(JOB | {"steps": None}) is None
    assert eta_s(JOB | {"measured": {"iteration_s": None}}) is None
    assert usd_to_come(JOB | {"steps": None}) is None
    assert usd_to_come(JOB | {"spent": SPENT | {"usd_per_hour": None}}) is None


def test_a_budget_that_ends_before_the_last_step_is_told_first():
    text = end_text(with_budget(5.11), 1000.0)
    assert text.startswith(
        f"its budget ends in 33.0 s, {timestamp(1033.0)}, at about step 66 of 200; "
        "raise it with sailorctl budget tale USD"
    )
    assert text.endswith(f" (without it: done in 5 min, {timestamp(1300.0)}, $1.00 more)")


def test_a_budget_that_outlasts_the_job_is_not_told():
    assert paid_s(with_budget(6.0)) is None
    assert end_text(with_budget(6.0), 1000.0) == end_text(JOB, 1000.0)


def test_a_spent_budget_pays_for_no_time():
    assert paid_s(with_budget(4.0)) == 0.0


def test_without_a_speed_or_an_end_the_budget_still_has_one():
    no_speed = with_budget(5.11) | {"measured": {"iteration_s": None}}
    assert end_text(no_speed, 1000.0) == f"its budget pays for 33.0 s, {timestamp(1033.0)}"
    endless = end_text(with_budget(5.11) | {"steps": None}, 1000.0)
    assert endless.endswith(f"cancelled or its budget is spent, {timestamp(1033.0)}")
    assert end_text(with_budget(5.11) | {"spent": SPENT | {"usd_per_hour": 0.0}}, 1000.0)
