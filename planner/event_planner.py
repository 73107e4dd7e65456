"""Plans under the event estimator: collect starting plans, run the search, bound the result."""

from __future__ import annotations

from planner.baselines.megatron.planner import MegatronPlanner
from planner.baselines.varuna.planner import VarunaPlanner
from planner.baselines.whale.planner import WhalePlanner
from planner.compare.interface import Case
from planner.explain.reasons import explain_event
from planner.formula_planner import formula_search
from planner.pipelines.pipeline_mix import PipelineMix, mix_of_shape
from planner.pipelines.pipeline_template import TemplateMaker
from planner.problem.bounds import ROUNDING, Bounds
from planner.problem.inventory import Lot, grants_of
from planner.problem.job_options import micro_batch_sizes, tp_degrees
from planner.problem.objective import Limits
from planner.problem.preference import error_between, objective_of, simpler_by
from planner.problem.question import (
    DEFAULT_BUDGETS,
    SEARCHED,
    Answer,
    BestByEstimate,
    Question,
)
from planner.search.bound import GAP_WORK_MAX, QUICK_WORK_MAX, TRIPS_TIMES, WORK_MAX, EventBound
from planner.search.local_search import EventSearch, JudgedPlan
from planner.search.search_cache import SearchCache
from planner.search.simpler import simpler_or_cheaper
from simulator.documents.problems import InputError, Problem
from simulator.estimate.event_estimator import EventEstimator
from simulator.inputs.plan_check import check_plan
from simulator.inputs.plan_file import complete_plan
from simulator.spec.job import Goal
from simulator.spec.plan import Plan

FORMULA_PLACES_MAX = 6
"""With more (zone, GPU kind) pairs than this, no starting plans come from the paper's formula."""
FORMULA_PLANS_MAX = 8
"""Starting plans taken from the search under the paper's formula."""
BASELINE_PLANS_MAX = 3
"""Starting plans taken from each of the quick baseline planners."""
GAP_TIMES = 10
"""So many times the budget is searched where a gap is asked for and was not reached."""
SMALL_BUDGET = 400
"""Plans judged by default on up to 64 GPUs."""


def plan_by_events(
    question: Question, lots: tuple[Lot, ...], limits: Limits, cache: SearchCache
) -> Answer:
    """Find the best plan under the event estimator."""
    job, cluster = question.job, question.cluster
    if question.space == "paper":
        raise InputError(
            Problem(
                "--space",
                '"paper" is a space of the paper estimator only',
                "use --estimator paper, or --space full",
            )
        )
    judge, maker = cache.event(question, lots)
    given = _baseline_plans(question, judge)

    def searched(
        within: Limits, given: tuple[Plan, ...], times: int = 1
    ) -> tuple[EventSearch, JudgedPlan | None]:
        search = EventSearch(
            job,
            lots,
            grants_of(cluster, lots),
            maker,
            judge,
            within,
            micro_batch_sizes(job),
            tp_degrees(job),
            times * (question.budget or _default_budget(lots)),
            _formula_plans(question, lots, within, maker),
            given,
            question.proves,
        )
        best = search.run()
        # The cost frontier reads these: a plan that keeps only the relaxed limits is left out.
        cache.judged += [(judged.plan, judged.estimate) for judged in search.keeping(limits)]
        return search, best

    search, best = searched(limits, given)
    evaluations = search.evaluations
    if best is None and not search.is_complete:
        for easier in limits.relaxed():
            other, _ = searched(easier, given)
            evaluations += other.evaluations
            keeping = sorted(other.keeping(limits), key=lambda judged: judged.score)
            if keeping:
                plans = tuple(judged.plan for judged in keeping[:BASELINE_PLANS_MAX])
                search, best = searched(limits, plans)
                evaluations += search.evaluations
    if best is None:
        return Answer(None, None, evaluations, 0.0, 0.0, job.objective.goal)
    bounds, note = _bounds(search, best, question)
    if question.gap is not None and note and not search.is_stopped:
        # Perhaps there is a better plan, and the bound can be raised.
        search, best = searched(limits, (best.plan,), GAP_TIMES)
        assert best is not None, "the given plan is judged first"
        evaluations += search.evaluations
        bounds, note = _bounds(search, best, question, GAP_WORK_MAX)
    taken = best
    if question.prefer == "simple" and not search.is_stopped:
        before = search.evaluations
        taken = simpler_or_cheaper(search, best)
        evaluations += search.evaluations - before
    rejected, why = explain_event(search, taken)
    return Answer(
        taken.plan,
        taken.estimate,
        evaluations,
        bounds.objective,
        bounds.seconds,
        job.objective.goal,
        rejected=rejected,
        why=why,
        note=note,
        instead_of=_instead_of(best, taken, job.objective.goal),
        space=SEARCHED["event", "all judged" if search.is_complete else "full"],
    )


def _instead_of(best: JudgedPlan, taken: JudgedPlan, goal: Goal) -> BestByEstimate | None:
    """The best plan by its estimate, if another one was taken."""
    if taken is best:
        return None
    usd, least = best.estimate.money.total_usd, objective_of(best, goal)
    spends = taken.estimate.money.total_usd
    return BestByEstimate(
        goal,
        best.estimate.iteration_s,
        usd,
        loses=objective_of(taken, goal) / least - 1 if least > 0 else 0.0,
        error=error_between(best, taken),
        saves=1 - spends / usd if usd and spends is not None else None,
        simpler=simpler_by(taken.plan, best.plan),
    )


def _default_budget(lots: tuple[Lot, ...]) -> int:
    """Plans to judge: more on few GPUs, where judging a plan takes less time."""
    gpus = sum(lot.gpus for lot in lots)
    return max(DEFAULT_BUDGETS["event"], min(SMALL_BUDGET, SMALL_BUDGET * 64 // gpus))


def _formula_plans(
    question: Question, lots: tuple[Lot, ...], limits: Limits, maker: TemplateMaker
) -> tuple[PipelineMix, ...]:
    """Starting plans that are good under the formula; none unless all links are measured."""
    job, measured = question.job, question.measurements.network.raw_between
    ends = {(lot.zone, lot.gpu) for lot in lots}
    known = all((one, other) in measured for one in ends for other in ends)
    if (
        job.profile is None
        or job.recompute == "full"
        or not known
        or len(ends) > FORMULA_PLACES_MAX
    ):
        return ()
    profile = question.measurements.profile(job.profile, catalogue=question.cluster.catalogue)
    if 1 not in profile.sizes or not any(gpu in profile.gpus() for _, gpu in ends):
        return ()
    search = formula_search(question, lots, limits, profile)
    found = search.search()
    best = search.bench.best
    chosen = ([best] if best is not None else []) + list(found[:FORMULA_PLANS_MAX])
    return tuple(dict.fromkeys(mix_of_shape(one.shape, maker) for one in chosen))


def _baseline_plans(question: Question, judge: EventEstimator) -> tuple[Plan, ...]:
    """The first valid plans of three quick baselines, so that the answer is never worse."""
    case = Case(question.job, question.cluster, judge.costs, judge.network, judge.sites)
    found = []
    for planner in (MegatronPlanner(), WhalePlanner(), VarunaPlanner()):
        try:
            proposals = planner.proposals(case, "fixed")
        except InputError:
            continue  # This baseline does not support the case.
        plans = (one.plan for one in proposals[:BASELINE_PLANS_MAX] if one.plan is not None)
        complete = (complete_plan(plan, question.cluster) for plan in plans)
        found += [p for p in complete if not check_plan(p, question.job, question.cluster)]
    return tuple(found)


def _bounds(
    search: EventSearch, best: JudgedPlan, question: Question, work_max: float = WORK_MAX
) -> tuple[Bounds, str]:
    """Lower bounds of the searched space, exact where all plans were judged; why they end there."""
    if not question.is_bounded:
        return Bounds(0.0, 0.0), ""
    bound = EventBound(
        search.tables,
        search.lots,
        search.grants,
        search.limits,
        search.job.global_batch,
        search.micro_batches,
        work_max=work_max if question.proves else QUICK_WORK_MAX,
        trips_max=TRIPS_TIMES * work_max if question.proves else 0.0,
        gap=question.gap or 0.0,
        is_stopped=search.is_stopped,
    )
    bounds = bound.bounds(best.estimate.iteration_s, best.score[0])
    if search.is_complete:
        seconds = bounds.seconds if search.limits.goal_is_cost else best.score[0]
        bounds = Bounds(seconds, best.score[0])
    if search.is_stopped or bound.is_stopped:
        return bounds, "stopped before its end"
    if question.gap is None or bounds.objective >= best.score[0] * (1 - question.gap - ROUNDING):
        return bounds, ""
    if bound.work >= bound.work_max:
        why = "the bound has no time left"
    else:
        why = "the bound knows no better; a better plan may exist or not"
    return bounds, f"a gap of {question.gap:.3g} was not reached: {why}"
