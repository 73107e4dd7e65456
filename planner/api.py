"""Sailor's own planner: one question in, the best plan it finds and a bound on all plans out."""

from __future__ import annotations

from dataclasses import replace

from planner.baselines.megatron.planner import MegatronPlanner
from planner.baselines.varuna.planner import VarunaPlanner
from planner.baselines.whale.planner import WhalePlanner
from planner.compare.interface import Case
from planner.explain.infeasible import refusals
from planner.explain.reasons import explain_event, explain_paper
from planner.paper_search.bound import Bounds
from planner.paper_search.formula_tables import PaperModel
from planner.paper_search.published_rules import PublishedModel
from planner.paper_search.search import PaperSearch
from planner.pipelines.pipeline_mix import Fleet, fleet_of
from planner.pipelines.pipeline_template import TemplateMaker
from planner.problem.inventory import Lot, grants_of, lots_of
from planner.problem.objective import Limits
from planner.problem.question import DEFAULT_BUDGETS, Answer, Question
from planner.problem.search_cache import Tables
from planner.search.bound import EventBound
from planner.search.local_search import EventSearch, Judged, micro_batch_sizes
from simulator.api import estimator, network_of
from simulator.cluster.place_facts import PlaceFacts
from simulator.documents.problems import InputError, Problem, Problems
from simulator.estimate.event_estimator import EventEstimator
from simulator.inputs.model_section import model_tp_problem
from simulator.inputs.plan_check import check_plan
from simulator.inputs.plan_file import complete_plan
from simulator.layer_costs.profile import Profile
from simulator.spec.job import Job, Objective, RecomputePolicy
from simulator.spec.plan import Plan

SEEDED_ENDS_MAX = 6
SEEDS_MAX = 8
GIVEN_MAX = 3
"""Plans of each other planner that are judged too."""
SMALL_BUDGET = 400
"""Plans judged by default where there are up to 64 GPUs."""


def plan_job(question: Question, tables: Tables | None = None) -> Answer:
    """Find the best plan for a job on a cluster, or say what stands in the way."""
    tables = tables or Tables()
    answer = find_plan(question, tables)
    if answer.plan is not None:
        return answer
    return replace(answer, problems=_refusals(question, tables))


def find_plan(question: Question, tables: Tables) -> Answer:
    """Find the best plan, and nothing else; ``tables`` of an earlier search save time."""
    limits = Limits(question.job.objective, question.job.steps, question.seconds_left)
    lots = lots_of(question.cluster, PlaceFacts(question.cluster, question.measurements.network))
    _check(lots, limits)
    answer = _search(question, lots, limits, tables)
    if answer.plan is not None:
        job = question.job
        if not answer.batch_exact:
            job = replace(job, global_batch=answer.plan.samples_per_iteration)
        faults = check_plan(answer.plan, job, question.cluster)
        assert not faults, faults
    return answer


def _search(question: Question, lots: tuple[Lot, ...], limits: Limits, tables: Tables) -> Answer:
    if question.estimator == "paper":
        return _paper(question, lots, limits)
    return _event(question, lots, limits, tables)


def _refusals(question: Question, tables: Tables) -> tuple[Problem, ...]:
    """Why there is no plan, found out by asking easier questions."""
    limits = Limits(question.job.objective, question.job.steps, question.seconds_left)
    sites = PlaceFacts(question.cluster, question.measurements.network)
    lots = lots_of(question.cluster, sites)

    def ask(
        objective: Objective,
        times_gpus: int = 1,
        recompute: RecomputePolicy | None = None,
        *,
        budget: int | None = None,
    ) -> Answer:
        job = replace(
            question.job, objective=objective, recompute=recompute or question.job.recompute
        )
        more = tuple(_grown(lot, times_gpus, sites) for lot in lots)
        asked = replace(question, job=job, budget=budget or question.budget)
        steps = Limits(objective, limits.steps, limits.seconds_left if objective.deadline else None)
        return _search(asked, more, steps, tables)

    return refusals(question.job, lots, limits, ask)


def _grown(lot: Lot, times: int, sites: PlaceFacts) -> Lot:
    """The lot with so many times its GPUs, in whole machines."""
    if times == 1:
        return lot
    size = sites.gpus_per_machine(lot.place)
    gpus = lot.gpus * times
    machines = ((size, gpus // size), (gpus % size, 1))
    return replace(
        lot,
        gpus=gpus,
        gpus_per_machine=min(size, gpus),
        machines=tuple((each, count) for each, count in machines if each and count),
    )


def _check(lots: tuple[Lot, ...], limits: Limits) -> None:
    """Refuse what no search could answer, all of it at once."""
    problems = Problems()
    if not lots:
        problems.add("cluster", "has no GPU that is up", "raise machines or gpus of a pool")
    unpriced = sorted({f"{x.gpu}@{x.zone}" for x in lots if x.price_usd_per_gpu_hour is None})
    if unpriced and limits.needs_prices:
        problems.add(
            "objective",
            f"counts dollars, and no price is known for {', '.join(unpriced)}",
            "set price_usd_per_gpu_hour of the pool in the cluster file, or the goal throughput",
        )
    problems.raise_if_any()


def _event_budget(lots: tuple[Lot, ...]) -> int:
    """More plans where judging one takes less."""
    gpus = sum(lot.gpus for lot in lots)
    return max(DEFAULT_BUDGETS["event"], min(SMALL_BUDGET, SMALL_BUDGET * 64 // gpus))


def tp_degrees(job: Job) -> tuple[int, ...]:
    """The TP degrees that the job's model and limit allow."""
    return tuple(tp for tp in range(1, job.max_tp + 1) if model_tp_problem(job.model, tp) is None)


def _paper(question: Question, lots: tuple[Lot, ...], limits: Limits) -> Answer:
    job, cluster = question.job, question.cluster
    judge = estimator("paper", job=job, cluster=cluster, measurements=question.measurements)
    assert job.profile is not None, "the paper estimator refuses jobs without a profile"
    profile = question.measurements.profile(job.profile, catalogue=cluster.catalogue)
    if len(profile.layer_names) != len(job.model.layers):
        raise InputError(
            Problem(
                f"profile {profile.name}",
                f"has {len(profile.layer_names)} layers, but the model {job.model.name} has"
                f" {len(job.model.layers)}",
                "name a profile of this model in [model] profile",
            )
        )
    search = _paper_search(question, lots, limits, profile)
    result = search.run()
    evaluations, bounds = result.evaluations, [result.bounds]
    if question.space == "paper":
        for size in _uneven_sizes(job, profile):
            other = _paper_search(question, lots, limits, profile, rounded_to=size)
            rounded = other.run()
            evaluations += rounded.evaluations
            bounds.append(rounded.bounds)
            if rounded.best is not None and (
                result.best is None or rounded.best.worth[:1] < result.best.worth[:1]
            ):
                search, result = other, rounded
    figures = (evaluations, min(b.objective for b in bounds), min(b.seconds for b in bounds))
    if result.best is None:
        return Answer(None, None, *figures, job.objective.goal)
    plan = search.model.to_plan(result.best.shape)
    rejected, why = explain_paper(search.model, limits, result)
    is_exact = plan.samples_per_iteration == job.global_batch
    goal, estimate = job.objective.goal, judge.estimate(plan)
    return Answer(plan, estimate, *figures, goal, is_exact, rejected=rejected, why=why)


def _uneven_sizes(job: Job, profile: Profile) -> tuple[int, ...]:
    """Micro batches that do not divide the batch: the published planner rounds it up for them."""
    measured = {b for _, _, b in profile.timings}
    wanted = sorted(measured.intersection(job.micro_batches or measured))
    return tuple(b for b in wanted if b < job.global_batch and job.global_batch % b)


def _paper_search(
    question: Question,
    lots: tuple[Lot, ...],
    limits: Limits,
    profile: Profile,
    *,
    rounded_to: int | None = None,
) -> PaperSearch:
    """The search; where the batch is rounded up to a micro batch, among its multiples alone."""
    job, cluster = question.job, question.cluster
    measured = {b for _, _, b in profile.timings}
    timed = {tp for _, tp, _ in profile.timings}
    degrees = tuple(tp for tp in tp_degrees(job) if tp in timed)
    wanted = sorted(measured.intersection(job.micro_batches or measured))
    batch, sizes = job.global_batch, tuple(b for b in wanted if job.global_batch % b == 0)
    if rounded_to is not None:
        batch, sizes = -(-batch // rounded_to) * rounded_to, (rounded_to,)
    tables = (
        profile,
        network_of(cluster, question.measurements.network),
        lots,
        tuple(float(cluster.catalogue.gpu(lot.gpu).memory_bytes) for lot in lots),
        batch,
    )
    if question.space == "paper":
        regions = dict(cluster.zone_regions)
        model: PaperModel = PublishedModel(
            *tables,
            degrees=degrees,
            regions=tuple(cluster.catalogue.zone_region(lot.zone, regions) for lot in lots),
        )
    else:
        model = PaperModel(*tables)
    budget = question.budget if question.estimator == "paper" else None
    return PaperSearch(
        model,
        limits,
        grants_of(cluster, lots),
        sizes,
        degrees,
        budget or DEFAULT_BUDGETS["paper"],
        is_uniform=question.space == "paper",
    )


def _seeds(
    question: Question, lots: tuple[Lot, ...], limits: Limits, maker: TemplateMaker
) -> tuple[Fleet, ...]:
    """Plans that are good under the paper's formula, where all it needs was measured."""
    job, measured = question.job, question.measurements.network.raw_between
    ends = {(lot.zone, lot.gpu) for lot in lots}
    known = all((one, other) in measured for one in ends for other in ends)
    if job.profile is None or job.recompute == "full" or not known or len(ends) > SEEDED_ENDS_MAX:
        return ()
    profile = question.measurements.profile(job.profile, catalogue=question.cluster.catalogue)
    if 1 not in profile.sizes or not any(gpu in profile.gpus() for _, gpu in ends):
        return ()
    search = _paper_search(question, lots, limits, profile)
    found = search.search()
    best = search.bench.best
    chosen = ([best] if best is not None else []) + list(found[:SEEDS_MAX])
    return tuple(dict.fromkeys(fleet_of(one.shape, maker) for one in chosen))


def _given(question: Question, judge: EventEstimator) -> tuple[Plan, ...]:
    """The first lawful plans of planners that answer at once, so that ours is no worse."""
    case = Case(question.job, question.cluster, judge.costs, judge.network, judge.sites)
    found = []
    for planner in (MegatronPlanner(), WhalePlanner(), VarunaPlanner()):
        try:
            proposals = planner.proposals(case, "fixed")
        except InputError:
            continue  # It cannot start on this case.
        plans = (one.plan for one in proposals[:GIVEN_MAX] if one.plan is not None)
        complete = (complete_plan(plan, question.cluster) for plan in plans)
        found += [p for p in complete if not check_plan(p, question.job, question.cluster)]
    return tuple(found)


def _event(question: Question, lots: tuple[Lot, ...], limits: Limits, tables: Tables) -> Answer:
    job, cluster = question.job, question.cluster
    if question.space == "paper":
        raise InputError(
            Problem("--space", "paper goes with the paper's formula", "use --estimator paper")
        )
    judge, maker = tables.event(question, lots)
    given = _given(question, judge)

    def searched(within: Limits, given: tuple[Plan, ...]) -> tuple[EventSearch, Judged | None]:
        search = EventSearch(
            job,
            lots,
            grants_of(cluster, lots),
            maker,
            judge,
            within,
            micro_batch_sizes(job),
            tp_degrees(job),
            question.budget or _event_budget(lots),
            _seeds(question, lots, within, maker),
            given,
            question.proves,
        )
        best = search.run()
        # Frontiers show these: what keeps eased limits alone is not among them.
        tables.judged += [(judged.plan, judged.estimate) for judged in search.keeping(limits)]
        return search, best

    search, best = searched(limits, given)
    evaluations = search.evaluations
    if best is None and not search.is_complete:
        for easier in limits.eased():
            other, _ = searched(easier, given)
            evaluations += other.evaluations
            keeping = sorted(other.keeping(limits), key=lambda judged: judged.worth)
            if keeping:
                search, best = searched(limits, tuple(j.plan for j in keeping[:GIVEN_MAX]))
                evaluations += search.evaluations
    if best is None:
        return Answer(None, None, evaluations, 0.0, 0.0, job.objective.goal)
    bounds = _event_bounds(search, best)
    figures = (evaluations, bounds.objective, bounds.seconds)
    rejected, why = explain_event(search, best)
    return Answer(
        best.plan, best.estimate, *figures, job.objective.goal, rejected=rejected, why=why
    )


def _event_bounds(search: EventSearch, best: Judged) -> Bounds:
    """What no plan can beat, and what is known where all plans were looked at."""
    bound = EventBound(
        search.floors,
        search.lots,
        search.grants,
        search.limits,
        search.job.global_batch,
        search.micro_batches,
    )
    bounds = bound.bounds(best.estimate.iteration_s, best.worth[0])
    if not search.is_complete:
        return bounds
    seconds = bounds.seconds if search.limits.goal_is_cost else best.worth[0]
    return Bounds(seconds, best.worth[0])
