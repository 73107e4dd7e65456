"""Sailor's own planner: one question in, the best plan it finds and a bound on all plans out."""

from __future__ import annotations

import math

from planner.answer import Answer, Question
from planner.limits import Limits
from planner.paper_model import PaperModel
from planner.paper_search import PaperSearch
from planner.supply import lots_of
from simulator.errors import InputError, Problem
from simulator.job_model import unfit_tp
from simulator.plan_check import check_plan
from simulator.request import estimator, network_of
from simulator.sites import Sites


def plan_job(question: Question) -> Answer:
    """Find the best plan for a job on a cluster."""
    job, cluster = question.job, question.cluster
    limits = Limits(job.objective, job.steps, question.seconds_left)
    sites = Sites(cluster, question.measurements.network)
    lots = lots_of(cluster, sites)
    if not lots:
        raise InputError(
            Problem("cluster", "has no GPU that is up", "raise machines or gpus of a pool")
        )
    unpriced = sorted({f"{x.gpu}@{x.zone}" for x in lots if x.price_usd_per_gpu_hour is None})
    if unpriced and limits.needs_prices:
        raise InputError(
            Problem(
                "objective",
                f"counts dollars, and no price is known for {', '.join(unpriced)}",
                "set price_usd_per_gpu_hour of the pool in the cluster file",
            )
        )
    judge = estimator(
        question.estimator, job=job, cluster=cluster, measurements=question.measurements
    )
    assert job.profile is not None
    profile = question.measurements.profile(job.profile, catalogue=cluster.catalogue)
    model = PaperModel(
        profile,
        network_of(cluster, question.measurements.network),
        lots,
        tuple(float(cluster.catalogue.gpu(lot.gpu).memory_bytes) for lot in lots),
        job.global_batch,
    )
    allowed = job.micro_batches or tuple(sorted({b for _, _, b in profile.timings}))
    search = PaperSearch(
        model,
        limits,
        tuple(b for b in allowed if job.global_batch % b == 0),
        max(
            tp for tp in (1, 2, 4, 8, 16) if tp <= job.max_tp and unfit_tp(job.model, tp) is None
        ),
        question.budget,
    )
    result = search.run()
    if result.best is None:
        problem = Problem("plan", "no plan keeps every limit", "relax a limit of [objective]")
        return Answer(
            None, None, result.evaluations, math.inf, result.bounds.seconds, job.objective.goal,
            problems=(problem,),
        )  # fmt: skip
    plan = model.to_plan(result.best.shape)
    assert not check_plan(plan, job, cluster), check_plan(plan, job, cluster)
    return Answer(
        plan,
        judge.estimate(plan),
        result.evaluations,
        result.bounds.objective,
        result.bounds.seconds,
        job.objective.goal,
    )
