"""Forecasts the active job's total cost and end, at its present speed."""

from __future__ import annotations

from collections.abc import Container
from typing import Literal

from agents.protocol.records import GenerationRecord
from sailord.core.model.phases import Held, Running, Waiting
from sailord.core.model.state import Active, State
from sailord.core.queries.job_cost import billed, priced

BUDGET: Literal["budget_at_risk"] = "budget_at_risk"
DEADLINE: Literal["deadline_at_risk"] = "deadline_at_risk"
MARGIN = 1.02
"""A forecast beyond a limit by up to 2 % (of the budget, or of the time left) is noise."""


def seconds_left(state: State) -> float | None:
    """Return the seconds until the active job is done, at the speed of its present generation.

    The speed is trusted once a generation has done ``steps_of_health`` steps; ``None``: not known.
    """
    active = state.active
    if active is None or active.generation is None:
        return None
    steps, step, step_s = state.job.steps, active.progress.step, active.progress.step_s
    has_speed = step - active.generation.restore.point.step >= state.options.steps_of_health
    if steps is None or step_s is None or not has_speed:
        return None
    return max(steps - step, 0) * step_s


def done_in(state: State) -> float | None:
    """Return the same; ``None`` also while it does not train, since that may take any time."""
    active = state.active
    is_resting = active is not None and isinstance(active.phase, Held | Waiting)
    return None if is_resting else seconds_left(state)


def usd_needed(state: State) -> float | None:
    """Return about what the active job will have cost at its end, at its last speed and price."""
    active, left_s = state.active, seconds_left(state)
    if active is None or active.generation is None or left_s is None:
        return None
    rate = active.generation.usd_per_hour
    bill = billed(state.job, priced(state, active.generation), state.now)
    return None if rate is None else bill.usd + rate * left_s / 3600


def ends_at(state: State) -> float | None:
    """Return when the active job is done; ``None``: not known, or its budget ends before."""
    left_s, usd, usd_max = done_in(state), usd_needed(state), state.job.bill.usd_max
    is_paid = usd is None or usd_max is None or usd <= usd_max
    return state.now + left_s if left_s is not None and is_paid else None


def at_risk(state: State, known: Container[str] = ()) -> dict[str, str]:
    """Return why the job's budget or its deadline is at risk, by the kind of event.

    One that is ``known`` from an earlier generation lasts until a speed shows that it is over: in a
    young generation, and while the job moves, the speed that is expected counts.
    """
    active = state.active
    if active is None or active.generation is None or isinstance(active.phase, Held | Waiting):
        return {}
    sure_s = seconds_left(state) if isinstance(active.phase, Running) else None
    found: dict[str, str] = {}
    for kind, told in ((BUDGET, _budget_at_risk), (DEADLINE, _deadline_at_risk)):
        left_s = _expected_s(state, active) if sure_s is None and kind in known else sure_s
        if left_s is not None and (text := told(state, active.generation, left_s)):
            found[kind] = text
    return found


def _expected_s(state: State, active: Active) -> float | None:
    """Return about the seconds until the job is done, before its generation shows its speed."""
    last, steps = active.generation, state.job.steps
    step_s = active.progress.step_s or (0.0 if last is None else last.step_s)
    return None if steps is None or not step_s else max(steps - active.progress.step, 0) * step_s


def _budget_at_risk(state: State, last: GenerationRecord, left_s: float) -> str:
    ran, job = priced(state, last), state.job
    bill = billed(job, ran, state.now)
    if bill.usd_max is None or last.usd_per_hour is None:
        return ""
    usd = bill.usd + last.usd_per_hour * left_s / 3600
    if usd <= bill.usd_max * MARGIN or state.active is None or job.steps is None:
        return ""
    if usd <= bill.usd:
        return ""  # All steps are done, and only their storing is awaited.
    step = state.active.progress.step
    paid = max(bill.usd_max - bill.usd, 0.0) / (usd - bill.usd)
    return (
        f"at its present speed it will cost ${usd:,.2f}, more than its budget of "
        f"${bill.usd_max:,.2f}, which ends at about step {step + int((job.steps - step) * paid):,} "
        f"of {job.steps:,}; raise it with `sailorctl budget {job.id} USD`"
    )


def _deadline_at_risk(state: State, _: GenerationRecord, left_s: float) -> str:
    deadline = state.job.deadline
    late_s = 0.0 if deadline is None else state.now + left_s - deadline
    if late_s <= left_s * (MARGIN - 1):
        return ""
    return f"at its present speed it will be done {late_s / 3600:,.1f} h after its deadline"
