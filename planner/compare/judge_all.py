"""Runs planners on one question: each one's first plan that fits, judged by one simulator.

A planner's own estimate ranks its plans and is never reported as a result. Its list is walked from
the best on. Plans that cannot be expressed, that the job or cluster does not allow, that exceed
memory, or that break a limit of the job are counted and passed over.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from planner.compare.interface import Case, Mode, Planner, ProposedPlan
from planner.problem.inventory import gpus_by_lot, lots_of, missing_price, spot_share
from planner.problem.objective import LimitedFigures, Limits
from planner.problem.question import Question, plan_document
from simulator.api import Estimator, network_of
from simulator.cluster.place_facts import PlaceFacts
from simulator.documents.problems import InputError
from simulator.estimate.memory import MemoryModel
from simulator.estimate.result import Estimate
from simulator.inputs.plan_check import check_plan
from simulator.inputs.plan_file import complete_plan
from simulator.layer_costs.layer_costs import LayerCosts
from simulator.spec.plan import Plan

JUDGED_MAX = 200
"""Plans of one planner that are judged before giving up on its limits."""
_TOO_LARGE = "none of its plans fits the devices' memory"
LACKS = ("inexpressible", "not_allowed", "out_of_memory", "not_judged", "beyond_limits")
"""Rejection reasons, most informative last: not expressible in the plan format, not allowed by job
or cluster, out of memory, not supported by the estimator, beyond a limit of the job."""


@dataclass(frozen=True, slots=True)
class JudgedPlanner:
    """The result of one planner."""

    planner: str
    plan: Plan | None
    estimate: Estimate | None
    own_seconds: float | None = None
    """The planner's own estimate of the plan, if it has one."""
    passed_over: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(LACKS, 0))
    """Number of plans before the answer, by rejection reason."""
    why_not: str = ""
    """Why there is no plan: the reason of a plan that came closest."""
    given_gpus: int = 0
    """GPUs of the cluster that it was given."""

    @property
    def own_error(self) -> float | None:
        """Relative error of the planner's own estimate."""
        if self.estimate is None or self.own_seconds is None:
            return None
        return self.own_seconds / self.estimate.iteration_s - 1

    def to_json(self, *, seconds: float, goal: str) -> dict[str, Any]:
        """The form that ``sailorctl plan --json`` prints; these planners have no bound."""
        assert self.plan is not None
        assert self.estimate is not None
        looked_at = sum(self.passed_over.values()) + 1
        unknown = dict.fromkeys(("lower_bound_s", "lower_bound", "gap", "space"))
        search = {"seconds": seconds, "evaluations": looked_at, **unknown, "goal": goal}
        return plan_document(self.plan, self.estimate) | {
            "planner": self.planner,
            "search": search,
            "batch_exact": True,
            "best_by_estimate": None,
            "passed_over": dict(self.passed_over),
            "own_iteration_s": self.own_seconds,
            "own_error": self.own_error,
            "explain": [],
            "idle": [],
            "one_more": [],
            "rejected": [],
        }


def case_of(question: Question) -> Case:
    """The question in the form that baselines take."""
    job, cluster, measured = question.job, question.cluster, question.measurements
    network = network_of(cluster, measured.network)
    profile = measured.profile_of(job, catalogue=cluster.catalogue)
    costs = LayerCosts(job, profile=profile, catalogue=cluster.catalogue, network=network)
    return Case(job, cluster, costs, network, PlaceFacts(cluster, measured.network))


def judge_entry(
    planner: Planner, case: Case, mode: Mode, judge: Estimator, seconds_left: float | None = None
) -> JudgedPlanner:
    """Run one planner and judge its first plan that can run."""
    limits = Limits(case.job.objective, case.job.steps, seconds_left)
    gpus = sum(pool.gpus for pool in case.cluster.pools)
    unpriced = missing_price(lots_of(case.cluster, case.facts))
    if unpriced is not None and limits.needs_prices:
        raise InputError(unpriced)
    passed = dict.fromkeys(LACKS, 0)
    reasons = {}
    for proposal in _rank(planner.proposals(case, mode), case):
        found = _judge(proposal, case, judge, limits)
        if isinstance(found[0], Plan):
            plan, estimate = found
            own = proposal.seconds if math.isfinite(proposal.seconds) else None
            return JudgedPlanner(planner.name, plan, estimate, own, passed, given_gpus=gpus)
        lacks, reasons[lacks] = found
        passed[lacks] += 1
        if passed["beyond_limits"] + passed["not_judged"] >= JUDGED_MAX:
            break
    why_not = next((reasons[k] for k in reversed(LACKS) if k in reasons), "it proposed no plan")
    return JudgedPlanner(planner.name, None, None, None, passed, why_not, gpus)


def _judge(
    proposal: ProposedPlan, case: Case, judge: Estimator, limits: Limits
) -> tuple[Plan, Estimate] | tuple[str, str]:
    """The plan with its estimate, or the rejection reason and its text."""
    if proposal.plan is None:
        return "inexpressible", proposal.why_not
    plan = complete_plan(proposal.plan, case.cluster)
    faults = check_plan(plan, case.job, case.cluster)
    if faults:
        return "not_allowed", str(faults[0])
    devices = MemoryModel(plan, case.costs, case.facts.capacity_bytes).pipelines()
    if not all(device.fits for row in devices for device in row):
        return "out_of_memory", _TOO_LARGE
    try:
        estimate = judge.estimate(plan)
    except InputError as error:
        return "not_judged", str(error.problems[0])
    if not estimate.fits:
        return "out_of_memory", _TOO_LARGE
    broken = _name_breach(plan, estimate, case, limits)
    return ("beyond_limits", broken) if broken else (plan, estimate)


def _rank(proposals: Sequence[ProposedPlan], case: Case) -> Sequence[ProposedPlan]:
    """Rank by dollars if cost is the goal: the planner's own, or those of its own time."""
    if case.job.objective.goal != "cost":
        return proposals

    def usd(proposal: ProposedPlan) -> float:
        if proposal.usd is not None:
            return proposal.usd
        if proposal.plan is None or not math.isfinite(proposal.seconds):
            return math.inf
        return proposal.seconds * _usd_per_s(complete_plan(proposal.plan, case.cluster), case)

    return sorted(proposals, key=usd)


def _usd_per_s(plan: Plan, case: Case) -> float:
    total = 0.0
    for pipeline in plan.pipelines:
        for stage in plan.owning_stages(pipeline):
            for place in stage.places:
                total += stage.tp * (case.facts.price_usd_per_gpu_hour(place) or 0.0) / 3600
    return total


def _name_breach(plan: Plan, estimate: Estimate, case: Case, limits: Limits) -> str:
    """The first limit of the job that the plan breaks, if any."""
    lots = lots_of(case.cluster, case.facts)
    share = spot_share(gpus_by_lot(plan, lots), lots)
    figures = LimitedFigures(estimate.iteration_s, estimate.money.total_usd, share)
    breach = next(limits.breaches(figures), None)
    if breach is None:
        return ""
    return f"its best plans break {breach.limit} ({breach.allowed:g}; {breach.needed:.4g})"
