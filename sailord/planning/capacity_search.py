"""Which machines to want: the planner chooses among what is up and what could be had.

The question is put with machines that are not there yet. Those that the best plan stands on are
wanted, if the plan is enough better than the best one on what is up to be worth waiting and
moving for; the lives of spot machines in each zone count in that.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from planner.api import plan_job
from planner.move_policy.decide_move import DEFAULT_RULES, Offer, judge_move
from planner.move_policy.move_gain import pool_name
from planner.problem.question import Answer, Question, read_ahead
from planner.replan.nodes import Node, cluster_with
from sailord.planning.plan_search import cluster_of
from sailord.planning.pool import Wanted, WantedPool, WantRequest, read_job
from sailord.planning.spot_mix import Place, shared_out
from simulator.api import load_measurements
from simulator.cluster.cluster import Cluster
from simulator.documents.problems import InputError
from simulator.estimate.result import Estimate
from simulator.spec.job import Job


def want(request: WantRequest) -> Wanted:
    """Say how many machines of each pool there should be, and why."""
    try:
        job = _within_budget(read_job(request.spec), request.usd_per_hour_max)
        up, hoped = _nodes_of(request.pools, "up"), _nodes_of(request.pools, "more")
        if not up and not hoped:
            return Wanted(None, "nothing is up, and nothing can be had at this moment")
        cluster = _priced(cluster_of(request.cluster_file, (*up, *hoped)), request.pools)
        measurements = read_ahead(
            load_measurements(request.profiles, catalogue=cluster.catalogue), job, cluster.catalogue
        )
        now = plan_job(Question(job, cluster_with(cluster, up), measurements)) if up else None
        best = plan_job(Question(job, cluster_with(cluster, (*up, *hoped)), measurements))
    except InputError as error:
        return Wanted(None, "; ".join(map(str, error.problems)))
    if best.plan is None or best.estimate is None:
        return Wanted(None, "; ".join(map(str, best.problems)) or "no plan fits what can be had")
    if now is None or now.plan is None or now.estimate is None:
        return Wanted(_counts(best, request), "nothing that is up is enough")
    verdict = judge_move(
        _offer(now, best, job, request),
        request.past.history,
        now_s=request.past.now_s,
        rules=DEFAULT_RULES,
    )
    if verdict.moves:
        return Wanted(_counts(best, request), verdict.reason)
    return Wanted(_counts(now, request), verdict.reason)


def _within_budget(job: Job, usd_per_hour_max: float | None) -> Job:
    if usd_per_hour_max is None:
        return job
    own = job.objective.max_usd_per_hour
    most = usd_per_hour_max if own is None else min(own, usd_per_hour_max)
    return replace(job, objective=replace(job.objective, max_usd_per_hour=most))


def _nodes_of(pools: Sequence[WantedPool], which: str) -> tuple[Node, ...]:
    return tuple(
        Node(f"{which}-{p.zone}-{p.machine}-{number}-{p.spot}", p.gpu, p.machine, p.zone, p.gpus,
             p.spot)
        for p in pools
        for number in range(p.up if which == "up" else p.obtainable)
    )  # fmt: skip


def _priced(cluster: Cluster, pools: Sequence[WantedPool]) -> Cluster:
    """The cluster at the provider's prices, where it names them."""
    prices = {(p.gpu, p.machine, p.zone, p.spot): p.usd_per_hour for p in pools}
    gpus = {(p.gpu, p.machine, p.zone, p.spot): p.gpus for p in pools}
    found = []
    for pool in cluster.pools:
        key = (pool.gpu, pool.machine, pool.zone, pool.spot)
        price = prices.get(key)
        if price is not None:
            pool = replace(  # noqa: PLW2901 - the same pool at another price
                pool, price_usd_per_gpu_hour=price / gpus[key], price_source="provider"
            )
        found.append(pool)
    return replace(cluster, pools=tuple(found))


def _counts(answer: Answer, request: WantRequest) -> tuple[int, ...]:
    """How many machines of each pool a plan stands on; what it leaves out is not wanted."""
    assert answer.plan is not None
    gpus: Counter[Place] = Counter()
    for pipeline in answer.plan.pipelines:
        for stage in pipeline.stages:
            for place in stage.places:
                gpus[place.gpu, place.machine, place.zone] += stage.tp
    return shared_out(gpus, request.pools, request.mix)


def _offer(now: Answer, best: Answer, job: Job, request: WantRequest) -> Offer:
    assert now.estimate is not None
    assert best.estimate is not None
    old, new = now.estimate, best.estimate
    counts = _counts(best, request)
    newcomers: dict[str, int] = {}
    for pool, count in zip(request.pools, counts, strict=True):
        if count > pool.up:
            node = Node("", pool.gpu, pool.machine, pool.zone, pool.gpus, pool.spot)
            newcomers[pool_name(node)] = newcomers.get(pool_name(node), 0) + count - pool.up
    usd = old.money.total_usd, new.money.total_usd
    left_s = _seconds_left(new, request.usd_left)
    if job.objective.goal == "cost" and usd[0] is not None and usd[1] is not None:
        gain = (usd[0] - usd[1]) / new.iteration_s
        cost = usd[0] / old.iteration_s * request.move_s
        return Offer(gain, "$", cost, request.move_s, newcomers, math.inf, seconds_left=left_s)
    gain = new.throughput_samples_per_s - old.throughput_samples_per_s
    cost = old.throughput_samples_per_s * request.move_s
    return Offer(gain, "samples", cost, request.move_s, newcomers, math.inf, seconds_left=left_s)


def _seconds_left(estimate: Estimate, usd_left: float | None) -> float | None:
    """How long a plan could run on what is left of a budget."""
    usd = estimate.money.total_usd
    return None if usd_left is None or not usd else usd_left / usd * estimate.iteration_s
