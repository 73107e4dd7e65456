"""What a deadline will cost before the job begins: by its plan, and on spot with a safety net."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from planner.move_policy.deadline import PRIOR_SHARE, SPOT_SLOWDOWN_MAX, steps_on_spot
from planner.problem.question import Answer, Question
from simulator.cluster.cluster import Pool
from simulator.estimate.result import Estimate
from simulator.spec.job import Goal
from simulator.traces.trace import Trace

CHANGE_S = 300.0
"""Assumed time to rent on-demand machines and restart on them."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """Spot machines while there are any, on-demand machines for the remaining steps."""

    spot_share: float
    """Share of the spot machines that are up on average: as in a trace, or assumed."""
    expected_usd: float
    most_usd: float
    """Dollars if spot machines never come."""
    is_guaranteed: bool
    """Whether on-demand machines finish in time if the job first moves to them (``CHANGE_S``)."""


@dataclass(frozen=True, slots=True)
class DeadlineOutlook:
    """Whether a plan meets the deadline, and what that costs."""

    seconds_left: float
    run_s: float
    """Seconds of all steps on the plan, without any loss."""
    usd: float | None
    mixture: Mixture | None
    """``None``: the cluster has spot or on-demand machines only, one of the two has no plan or no
    price, or spot machines are slower than ``SPOT_SLOWDOWN_MAX``."""

    @property
    def slack_s(self) -> float:
        """Time to spare; negative if the deadline is missed."""
        return self.seconds_left - self.run_s

    def to_json(self) -> dict[str, Any]:
        """The form that ``sailorctl plan --json`` prints."""
        return {**asdict(self), "slack_s": self.slack_s, "is_met": self.slack_s >= 0}


def deadline_outlook(
    question: Question,
    estimate: Estimate,
    search: Callable[[Question], Answer],
    trace: Trace | None = None,
) -> DeadlineOutlook:
    """Predict whether a plan, and a mixture of contracts, meets the deadline, and at what cost.

    The mixture uses two plans: on spot machines the best for the job's goal, on demand the best of
    those in time, or the fastest if none is. Spot machines are up as in the trace, by default half
    of the time. ``search`` need not say why there is no plan.
    """
    steps, left = question.job.steps, question.seconds_left
    assert steps is not None
    assert left is not None
    usd = estimate.money.total_usd
    spot = _find_plan_of_contract(question, search, spot=True)
    on_demand = None
    if left > CHANGE_S:
        on_demand = _find_plan_of_contract(
            question, search, spot=False, seconds_left=left - CHANGE_S
        )
    if on_demand is None:
        on_demand = _find_plan_of_contract(question, search, spot=False, goal="throughput")
    mixture = None
    if spot is not None and on_demand is not None:
        share = PRIOR_SHARE if trace is None else spot_availability(trace, question.cluster.pools)
        mixture = _mixture(steps, left, spot, on_demand, share)
    return DeadlineOutlook(
        left, steps * estimate.iteration_s, None if usd is None else steps * usd, mixture
    )


def _find_plan_of_contract(
    question: Question,
    search: Callable[[Question], Answer],
    *,
    spot: bool,
    seconds_left: float | None = None,
    goal: Goal | None = None,
) -> Estimate | None:
    """The best plan on the machines of one contract; ``None``: there are none, or no plan."""
    cluster = question.cluster
    pools = tuple(pool for pool in cluster.pools if pool.spot == spot and pool.gpus)
    if not pools:
        return None
    objective = question.job.objective
    objective = replace(objective, deadline=None, goal=goal or objective.goal)
    job = replace(question.job, objective=objective)
    asked = replace(
        question,
        job=job,
        cluster=replace(cluster, pools=pools),
        seconds_left=seconds_left,
        proves=False,
        is_bounded=False,
        is_stoppable=False,
        told=None,
    )
    return search(asked).estimate


def spot_availability(trace: Trace, pools: Sequence[Pool]) -> float:
    """The share of the spot GPUs of a cluster that are up in a trace, on average."""
    spot = [number for number, pool in enumerate(pools) if pool.spot]
    most = sum(pools[number].gpus for number in spot)
    up = sum(
        interval.seconds * sum(interval.gpus[number] for number in spot)
        for interval in trace.intervals
    )
    return min(1.0, up / trace.end_s / most) if most else 0.0


def _mixture(
    steps: int, left_s: float, spot: Estimate, on_demand: Estimate, share: float
) -> Mixture | None:
    spot_usd, on_demand_usd = spot.money.total_usd, on_demand.money.total_usd
    if spot_usd is None or on_demand_usd is None:
        return None
    if spot.iteration_s > SPOT_SLOWDOWN_MAX * on_demand.iteration_s:
        return None
    spare_s = left_s - CHANGE_S - steps * on_demand.iteration_s
    by_spot = 0.0
    if spare_s >= 0:
        by_spot = steps_on_spot(
            steps, left_s - CHANGE_S, share, spot.iteration_s, on_demand.iteration_s
        )
    return Mixture(
        share,
        by_spot * spot_usd + (steps - by_spot) * on_demand_usd,
        steps * on_demand_usd,
        spare_s >= 0,
    )
