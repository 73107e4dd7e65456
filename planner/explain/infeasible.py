"""Why there is no plan: the limit that prevents one, by how much, and what would help."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from planner.problem.inventory import Lot, LotQuota
from planner.problem.objective import NO_MONEY_LIMITS, Breach, LimitedFigures, Limits
from planner.problem.question import Answer
from simulator.documents.problems import Problem
from simulator.estimate.memory import state_bytes_per_parameter
from simulator.estimate.result import Estimate
from simulator.hardware.runtime_constants import platform_of
from simulator.inputs.model_section import model_tp_problem
from simulator.spec.job import Job, Objective, RecomputePolicy
from simulator.spec.plan import Place

_NO_LIMITS = Objective()
_MORE_GPUS = (2, 4, 8, 16, 64)
FIT_BUDGET = 40
"""Plans judged to find out whether any plan fits, or costs less an hour."""
PERCENT_MAX = 10
"""Largest factor between a limit and what is needed that is told in percent."""
HALVINGS = 5
"""Most searches for the least price per hour."""
NEAR = 1.02
"""Factor within which the least price per hour is known well enough."""
_TOGETHER = "relax one of them, or raise --budget"


class SearchAgain(Protocol):
    """Search again with other limits, more GPUs, another recomputation policy or larger TP,
    without quotas, or with micro batches of any size.
    """

    def __call__(
        self,
        objective: Objective,
        times_gpus: int = 1,
        recompute: RecomputePolicy | None = None,
        *,
        max_tp: int | None = None,
        budget: int | None = None,
        keeps_quotas: bool = True,
        any_size: bool = False,
    ) -> Answer: ...


def refusals(
    job: Job,
    lots: Sequence[Lot],
    limits: Limits,
    ask: SearchAgain,
    capacity_bytes: Callable[[Place], float],
    grants: Sequence[LotQuota] = (),
) -> tuple[Problem, ...]:
    """The problems of a job that has no plan on these GPUs."""
    free = ask(_NO_LIMITS)
    if free.estimate is None:
        if grants and ask(_NO_LIMITS, keeps_quotas=False, budget=FIT_BUDGET).plan is not None:
            return tuple(map(_name_quota, grants))
        return (_explain_too_small(job, lots, ask, capacity_bytes),)
    found = _find_limits_in_the_way(job.objective, lots, limits, ask)
    if not found:
        # No limit can be kept together with the others, so compare each one alone.
        found = _find_limits_in_the_way(job.objective, lots, limits, ask, alone=True)
    return tuple(found) or (
        Problem("objective", "no plan that was judged keeps all limits together", _TOGETHER),
    )


def _name_quota(grant: LotQuota) -> Problem:
    what = f"leaves {grant.gpus_max} {grant.gpu} in {grant.where}, and no plan fits on that"
    return Problem("quota", what, "raise gpus_max, or give GPUs that it does not limit")


def _explain_too_small(
    job: Job, lots: Sequence[Lot], ask: SearchAgain, capacity_bytes: Callable[[Place], float]
) -> Problem:
    gpus = sum(lot.gpus for lot in lots)
    kinds = ", ".join(f"{lot.gpus} x {lot.gpu}@{lot.zone}" for lot in lots)
    cures = []
    split = "under any split"
    if job.micro_batches:
        fits = ask(_NO_LIMITS, any_size=True, budget=FIT_BUDGET).plan
        if fits is not None:
            split = f"in micro batches of {' or '.join(map(str, job.micro_batches))}"
            cures.append(f"add {fits.micro_batch_size} to training.micro_batches, which fits")
    if job.recompute == "none" and ask(_NO_LIMITS, 1, "auto", budget=FIT_BUDGET).plan:
        cures.append('set training.recompute = "auto", with which it fits')
    for times in _MORE_GPUS:
        more = ask(_NO_LIMITS, times, budget=FIT_BUDGET)
        if more.plan is not None:
            cures.append(f"it fits on {gpus * times} such GPUs")
            break
    if job.max_tp == 1:
        machine = max((lot.gpus_per_machine for lot in lots), default=1)
        degrees = range(1, machine + 1)
        tp = max(tp for tp in degrees if model_tp_problem(job.model, tp) is None)
        if tp > 1 and ask(_NO_LIMITS, max_tp=tp, budget=FIT_BUDGET).plan is not None:
            cures.append(f"set training.max_tp = {tp}, with which it fits")
    free = {lot.gpu: capacity_bytes(lot.place) - platform_of(lot.gpu).context_bytes for lot in lots}
    left = ", ".join(f"{max(size, 0) / 1e9:.3g} GB of each {gpu}" for gpu, size in free.items())
    states_gb = job.model.parameters * state_bytes_per_parameter(job) / 1e9
    return Problem(
        "cluster",
        f"{job.model.name} does not fit on the {gpus} GPUs ({kinds}) {split}:"
        f" weights, gradients and optimizer states alone take {states_gb:.3g} GB, and the runtime"
        f" leaves {left} for them and for activations",
        "; ".join(cures) or "use GPUs with more memory, or more of them",
    )


def _find_limits_in_the_way(
    objective: Objective,
    lots: Sequence[Lot],
    limits: Limits,
    ask: SearchAgain,
    *,
    alone: bool = False,
) -> list[Problem]:
    """Compare each limit with the best plan without it; with ``alone``, without any other limit."""
    found = []
    in_time = replace(objective, goal="cost", **NO_MONEY_LIMITS)
    quickest = replace(objective, goal="throughput", min_iterations_per_s=None, deadline=None)
    if alone:
        in_time, quickest = Objective(goal="cost"), _NO_LIMITS
    others = "there is" if alone else "that keeps the other limits"
    if any(getattr(objective, name) is not None for name in NO_MONEY_LIMITS):
        cheap = ask(in_time).estimate
        if cheap is not None:
            usd = cheap.money.total_usd or 0.0
            for name, needed, allowed in limits.money(cheap.iteration_s, usd):
                least, seconds, which = needed, cheap.iteration_s, "the cheapest plan"
                if name == "max_usd_per_hour" and needed > allowed:
                    floor = min((lot.price_usd_per_gpu_hour or 0.0 for lot in lots), default=0.0)
                    least, seconds = _find_least_per_hour(in_time, cheap, max(allowed, floor), ask)
                    which = "the cheapest plan per hour"
                if least > allowed:
                    what = (
                        f"is {allowed:g}, and {which} {others}"
                        f" needs {least:.4g} ({seconds:.3g} s an iteration)"
                    )
                    found.append(
                        Problem(f"objective.{name}", what, _describe_raise(allowed, least))
                    )
    if limits.seconds_max is not None:
        fast = ask(quickest).estimate
        if fast is not None:
            breach = next(limits.breaches(LimitedFigures(fast.iteration_s, None, 0.0)), None)
            if breach is not None:
                found.append(_explain_too_slow(breach, limits, fast.iteration_s, others))
    if objective.max_spot_share is not None:
        without = ask(replace(objective, max_spot_share=None)).estimate
        if without is not None:
            found.append(
                Problem(
                    "objective.max_spot_share",
                    f"is {objective.max_spot_share:g}, and no plan was found with less spot",
                    "raise it, or add on-demand GPUs",
                )
            )
    return found


def _find_least_per_hour(
    objective: Objective, known: Estimate, floor: float, ask: SearchAgain
) -> tuple[float, float]:
    """Dollars per hour and seconds of the cheapest plan per hour, between a floor and a known plan.

    Searched by halving the range, by ratio.
    """
    best = _usd_per_hour(known), known.iteration_s
    for _ in range(HALVINGS):
        if best[0] <= floor * NEAR or floor <= 0:
            break
        middle = math.sqrt(floor * best[0])
        found = ask(replace(objective, max_usd_per_hour=middle), budget=FIT_BUDGET).estimate
        if found is None:
            floor = middle
        else:
            best = _usd_per_hour(found), found.iteration_s
    return best


def _usd_per_hour(estimate: Estimate) -> float:
    return (estimate.money.total_usd or 0.0) / estimate.iteration_s * 3600


def _describe_raise(allowed: float, least: float) -> str:
    """By how much to raise a limit so that it is enough, or to which value if it is far off."""
    if least > PERCENT_MAX * allowed:
        step = 10.0 ** (math.floor(math.log10(least)) - 3)
        return f"raise it to {math.ceil(least / step - 1e-9) * step:.4g}"
    return f"raise it by {_round_percent_up(least / allowed - 1)}"


def _describe_lowering(allowed: float, most: float) -> str:
    """By how much to lower a limit, as in ``_describe_raise``."""
    if allowed > PERCENT_MAX * most:
        step = 10.0 ** (math.floor(math.log10(most)) - 3)
        return f"lower it to {math.floor(most / step + 1e-9) * step:.4g}"
    return f"lower it by {_round_percent_up(1 - most / allowed)}"


def _round_percent_up(share: float) -> str:
    """A share in per cent, rounded up so that it is enough."""
    return f"{math.ceil(100 * share - 1e-9)}%"


def _explain_too_slow(breach: Breach, limits: Limits, fastest_s: float, others: str) -> Problem:
    """Which time limit the fastest plan breaks, and by how much."""
    if breach.limit == "min_iterations_per_s":
        return Problem(
            "objective.min_iterations_per_s",
            f"wants iterations of {1 / breach.allowed:.4g} s, and the fastest plan {others} takes"
            f" {fastest_s:.4g} s ({breach.needed:.4g} iterations/s)",
            _describe_lowering(breach.allowed, breach.needed),
        )
    assert limits.steps is not None
    assert limits.seconds_left is not None
    total_s = fastest_s * limits.steps
    left = f"is {span(limits.seconds_left)} away" if limits.seconds_left > 0 else "has passed"
    return Problem(
        "objective.deadline",
        f"{left}, and {limits.steps} steps of the fastest plan {others} take {span(total_s)}"
        f" ({fastest_s:.4g} s each)",
        f"move it by {span(total_s - limits.seconds_left)}, or train for fewer steps",
    )


def span(seconds: float) -> str:
    """A duration in a readable unit, rounded up so that it is enough."""
    for unit, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * unit:
            return f"{math.ceil(seconds / unit * 10) / 10:g} {name}"
    return f"{math.ceil(seconds)} s"
