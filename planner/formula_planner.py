"""Plans under the paper estimator: runs the search of ``paper_search`` and answers."""

from __future__ import annotations

from dataclasses import replace

from planner.explain.reasons import explain_paper
from planner.paper_search.formula_tables import PaperModel
from planner.paper_search.published_rules import PublishedModel
from planner.paper_search.search import PaperSearch
from planner.problem.contracts import with_less_spot
from planner.problem.inventory import Lot, grants_of, lots_of
from planner.problem.job_options import tp_degrees
from planner.problem.objective import Limits
from planner.problem.question import DEFAULT_BUDGETS, Answer, Question
from simulator.api import estimator, network_of
from simulator.cluster.place_facts import PlaceFacts
from simulator.documents.problems import InputError, Problem
from simulator.layer_costs.profile import Profile
from simulator.spec.job import Job


def plan_by_formula(question: Question, lots: tuple[Lot, ...], limits: Limits) -> Answer:
    """Find the best plan under the paper's closed formula."""
    job, cluster = question.job, question.cluster
    judge = estimator("paper", job=job, cluster=cluster, measurements=question.measurements)
    if job.recompute == "full":
        what = 'is "full", and the paper estimator knows no recomputation'
        cure = 'use --estimator event, or set it to "none" or "auto"'
        raise InputError(Problem("training.recompute", what, cure))
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
    search = formula_search(question, lots, limits, profile)
    result = search.run()
    evaluations, bounds = result.evaluations, [result.bounds]
    if question.space == "paper":
        for size in _uneven_sizes(job, profile):
            other = formula_search(question, lots, limits, profile, rounded_to=size)
            rounded = other.run()
            evaluations += rounded.evaluations
            bounds.append(rounded.bounds)
            if rounded.best is not None and (
                result.best is None or rounded.best.score[:1] < result.best.score[:1]
            ):
                search, result = other, rounded
    for fewer in with_less_spot(cluster, job.objective.max_spot_share):
        few = lots_of(fewer, PlaceFacts(fewer, question.measurements.network))
        other = formula_search(replace(question, cluster=fewer), few, limits, profile)
        partial = other.run()
        evaluations += partial.evaluations
        if partial.best is not None and (
            result.best is None or partial.best.score[:1] < result.best.score[:1]
        ):
            search, result = other, partial
    figures = (evaluations, min(b.objective for b in bounds), min(b.seconds for b in bounds))
    if result.best is None:
        return Answer(None, None, *figures, job.objective.goal)
    plan = search.model.to_plan(result.best.shape)
    rejected, why = explain_paper(search.model, limits, result)
    is_exact = plan.samples_per_iteration == job.global_batch
    goal, estimate = job.objective.goal, judge.estimate(plan)
    return Answer(plan, estimate, *figures, goal, is_exact, rejected=rejected, why=why)


def formula_search(
    question: Question,
    lots: tuple[Lot, ...],
    limits: Limits,
    profile: Profile,
    *,
    rounded_to: int | None = None,
) -> PaperSearch:
    """Set up the search.

    With ``rounded_to``, the global batch is rounded up to a multiple of that micro batch, and no
    other micro batch is tried.
    """
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
        PlaceFacts(cluster, question.measurements.network).usd_per_hour,
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


def _uneven_sizes(job: Job, profile: Profile) -> tuple[int, ...]:
    """Micro batches that do not divide the global batch; the published planner rounds it up."""
    measured = {b for _, _, b in profile.timings}
    wanted = sorted(measured.intersection(job.micro_batches or measured))
    return tuple(b for b in wanted if b < job.global_batch and job.global_batch % b)
