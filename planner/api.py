"""Finds the best plan for a job on a cluster, or says why there is none."""

from __future__ import annotations

from dataclasses import replace

from planner.event_planner import plan_by_events
from planner.explain.infeasible import refusals
from planner.formula_planner import plan_by_formula
from planner.problem.contracts import paying_spot_first
from planner.problem.inventory import Lot, grants_of, lots_of, missing_price
from planner.problem.objective import Limits
from planner.problem.question import SEARCHED, Answer, Question
from planner.search.search_cache import SearchCache
from simulator.cluster.place_facts import PlaceFacts
from simulator.documents.problems import InputError, Problem
from simulator.inputs.plan_check import check_plan
from simulator.spec.job import Objective, RecomputePolicy

SPOT_FIRST = "priced on spot GPUs before those on demand: else no plan keeps the limits in dollars"


def plan_job(question: Question) -> Answer:
    """Find the best plan for a job on a cluster, or the reasons why there is none."""
    cache = SearchCache()
    answer = best_answer(question, cache)
    if answer.plan is not None:
        return answer
    other = asked_with_spot_first(question)
    if other is not None:
        question, cache = other, SearchCache()
    return replace(answer, problems=_refusals(question, cache))


def best_answer(question: Question, cache: SearchCache) -> Answer:
    """``find_plan``; without a plan within limits in dollars, again with spot GPUs paid first."""
    answer = find_plan(question, cache)
    other = None if answer.plan is not None else asked_with_spot_first(question)
    if other is None:
        return answer
    # The cached estimates were priced with on-demand GPUs first, so use a new cache.
    answer = find_plan(other, SearchCache())
    if answer.estimate is None:
        return answer
    estimate = replace(answer.estimate, notes=(*answer.estimate.notes, SPOT_FIRST))
    return replace(answer, estimate=estimate, pays_spot_first=True)


def asked_with_spot_first(question: Question) -> Question | None:
    """The question whose plans pay spot GPUs first, if that may help with limits in dollars."""
    limits = Limits(question.job.objective, question.job.steps, question.seconds_left)
    facts = PlaceFacts(question.cluster, question.measurements.network)
    cluster = paying_spot_first(question.cluster, limits, facts)
    return None if cluster is None else replace(question, cluster=cluster)


def find_plan(question: Question, cache: SearchCache) -> Answer:
    """Find the best plan without explaining a failure; ``cache`` is shared between searches."""
    limits = Limits(question.job.objective, question.job.steps, question.seconds_left)
    lots = lots_of(question.cluster, PlaceFacts(question.cluster, question.measurements.network))
    _check(lots, limits)
    answer = _search(question, lots, limits, cache)
    if answer.plan is not None:
        job = question.job
        if not answer.batch_exact:
            job = replace(job, global_batch=answer.plan.samples_per_iteration)
        faults = check_plan(answer.plan, job, question.cluster)
        assert not faults, faults
    return answer


def _search(
    question: Question, lots: tuple[Lot, ...], limits: Limits, cache: SearchCache
) -> Answer:
    if question.estimator == "paper":
        if question.gap is not None:
            cure = "use --estimator event, or leave it out"
            raise InputError(Problem("--gap", "works under the event estimator only", cure))
        answer = plan_by_formula(question, lots, limits)
        return replace(answer, covered=SEARCHED[question.estimator, question.space])
    return plan_by_events(question, lots, limits, cache)


def _refusals(question: Question, cache: SearchCache) -> tuple[Problem, ...]:
    """Find out why there is no plan by searching again with relaxed limits or more GPUs."""
    limits = Limits(question.job.objective, question.job.steps, question.seconds_left)
    facts = PlaceFacts(question.cluster, question.measurements.network)
    lots = lots_of(question.cluster, facts)

    def ask(
        objective: Objective,
        times_gpus: int = 1,
        recompute: RecomputePolicy | None = None,
        *,
        max_tp: int | None = None,
        budget: int | None = None,
        keeps_quotas: bool = True,
        any_size: bool = False,
    ) -> Answer:
        job = replace(
            question.job,
            objective=replace(objective, allow=question.job.objective.allow),
            recompute=recompute or question.job.recompute,
            max_tp=max_tp or question.job.max_tp,
            micro_batches=None if any_size else question.job.micro_batches,
        )
        cluster = question.cluster if keeps_quotas else replace(question.cluster, quotas=())
        more = tuple(_with_more_gpus(lot, times_gpus, facts) for lot in lots)
        budget = budget or question.budget
        asked = replace(
            question,
            job=job,
            cluster=cluster,
            budget=budget,
            is_bounded=False,
            is_stoppable=False,
            told=None,
        )
        steps = Limits(objective, limits.steps, limits.seconds_left if objective.deadline else None)
        # The cache holds results of one ``max_tp`` and of these sizes of micro batches.
        is_same = max_tp is None and keeps_quotas and not any_size
        return _search(asked, more, steps, cache if is_same else SearchCache())

    grants = grants_of(question.cluster, lots)
    return refusals(question.job, lots, limits, ask, facts.capacity_bytes, grants)


def _with_more_gpus(lot: Lot, times: int, facts: PlaceFacts) -> Lot:
    """The lot with ``times`` as many GPUs, in whole machines and one for the remainder."""
    if times == 1:
        return lot
    size = facts.gpus_per_machine(lot.place)
    gpus = lot.gpus * times
    machines = ((size, gpus // size), (gpus % size, 1))
    return replace(
        lot,
        gpus=gpus,
        gpus_per_machine=min(size, gpus),
        machines=tuple((each, count) for each, count in machines if each and count),
    )


def _check(lots: tuple[Lot, ...], limits: Limits) -> None:
    """Refuse a question that no search could answer."""
    if not lots:
        cure = "raise machines or gpus of a pool"
        raise InputError(Problem("cluster", "has no GPU that is up", cure))
    unpriced = missing_price(lots)
    if unpriced is not None and limits.needs_prices:
        raise InputError(unpriced)
