"""When a job ends, and what it costs until then: at its last step, or when its budget is spent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sailord.text.units import YEAR_S, dollars, duration, timestamp


def eta_s(job: Mapping[str, Any]) -> float | None:
    """Return the seconds until the job's last step at its present speed; ``None``: unknown."""
    step_s = job["measured"]["iteration_s"]
    if job["steps"] is None or not step_s:
        return None
    return float(max(job["steps"] - job["step"], 0) * step_s)


def usd_to_come(job: Mapping[str, Any]) -> float | None:
    """Return what the job costs until its last step, at its present speed and price."""
    left_s, rate = eta_s(job), job["spent"]["usd_per_hour"]
    return None if left_s is None or rate is None else float(rate * left_s / 3600)


def paid_s(job: Mapping[str, Any]) -> float | None:
    """Return for how long the job's budget pays, at its present price.

    ``None``: it has no budget, costs nothing now, or will be done before.
    """
    most, rate = job["spent"]["usd_max"], job["spent"]["usd_per_hour"]
    if most is None or not rate:
        return None
    seconds, left_s = max(most - job["spent"]["usd"], 0.0) * 3600 / rate, eta_s(job)
    return None if left_s is not None and left_s <= seconds else float(seconds)


def end_text(job: Mapping[str, Any], at: float) -> str:
    """Return when the job is done, or its budget ends before; empty: unknown."""
    left_s, usd, budget_s = eta_s(job), usd_to_come(job), paid_s(job)
    spent = "" if budget_s is None else _at(at, budget_s)
    if job["steps"] is None:
        budget = " or its budget is spent" * (job["spent"]["usd_max"] is not None)
        return f"none: it trains until it is cancelled{budget}{spent}"
    if job.get("phase", {}).get("name") == "waiting":
        return "not known while it waits"
    if left_s is None:
        return f"its budget pays for {duration(budget_s)}{spent}" if budget_s is not None else ""
    cost = "" if usd is None else f", {dollars(usd)} more"
    done = f"done in {duration(left_s)}{_at(at, left_s)}{cost}"
    if budget_s is None:
        return done
    step = job["step"] + int(budget_s / job["measured"]["iteration_s"])
    return (
        f"its budget ends in {duration(budget_s)}{spent}, at about step {step} of {job['steps']}; "
        f"raise it with sailorctl budget {job['id']} USD (without it: {done})"
    )


def _at(now: float, seconds: float) -> str:
    return f", {timestamp(now + seconds)}" if seconds < YEAR_S else ""
