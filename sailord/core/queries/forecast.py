"""Forecasts the active job's total cost and end, at its present speed."""

from __future__ import annotations

from typing import Literal

from sailord.core.model.phases import Held, Running, Waiting
from sailord.core.model.state import State
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


def at_risk(state: State) -> dict[str, str]:
    """Return why the job's budget or its deadline is at risk, by the kind of event."""
    active, left_s = state.active, seconds_left(state)
    if active is None or left_s is None or not isinstance(active.phase, Running):
        return {}
    assert active.generation is not None, "it has a speed"
    job = state.job
    found: dict[str, str] = {}
    ran = priced(state, active.generation)
    bill, usd = billed(job, ran, state.now), usd_needed(state)
    if bill.usd_max is not None and usd is not None and usd > bill.usd_max * MARGIN:
        found[BUDGET] = (
            f"at its present speed it will cost ${usd:,.2f}, more than its budget of "
            f"${bill.usd_max:,.2f}; raise it with `sailorctl budget {job.id} USD`"
        )
    if job.deadline is not None:
        late_s = state.now + left_s - job.deadline
        if late_s > left_s * (MARGIN - 1):
            found[DEADLINE] = (
                f"at its present speed it will be done {late_s / 3600:,.1f} h after its deadline"
            )
    return found
