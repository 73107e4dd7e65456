"""Explains a plan by further searches: what one more machine would bring, why GPUs are idle.

Each search gets a smaller budget. The explained plan also fits any larger cluster, so a search that
finds nothing better reports no gain rather than a loss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

from planner.api import asked_with_spot_first, find_plan
from planner.problem.inventory import grants_of, lots_of
from planner.problem.job_options import tp_degrees
from planner.problem.objective import NO_MONEY_LIMITS
from planner.problem.question import (
    DEFAULT_BUDGETS,
    Answer,
    AnswerReasons,
    IdleGpus,
    OneMoreMachine,
    Question,
)
from planner.search.search_cache import SearchCache
from simulator.api import estimator
from simulator.cluster.cluster import Cluster, Pool
from simulator.cluster.place_facts import PlaceFacts
from simulator.documents.problems import InputError
from simulator.estimate.result import Estimate
from simulator.spec.plan import Pipeline, Plan, Stage

BUDGET_SHARE = 4
"""The budget is divided by this for follow-up searches."""
POOLS_MAX = 12
"""With more pools, only the largest are tried, since each is a search."""
GAIN_MIN = 1e-3
"""Gains below this share are ignored as search noise."""


def explained(question: Question, answer: Answer) -> Answer:
    """The answer with the reasons that take further searches."""
    assert answer.plan is not None
    if answer.pays_spot_first:
        question = asked_with_spot_first(question) or question
    budget = question.budget or DEFAULT_BUDGETS[question.estimator]
    # A simpler plan that gives a little away would hide small gains.
    asked = replace(
        question,
        budget=max(1, budget // BUDGET_SHARE),
        is_stoppable=False,
        told=None,
        prefer="fastest",
    )
    idle = tuple(_reasons(asked, answer))
    one_more = tuple(_one_more(asked, answer))
    return replace(answer, why=AnswerReasons(answer.why.sentences, idle, one_more))


# -- one more machine -----------------------------------------------------------------------------


def _one_more(question: Question, answer: Answer) -> Iterator[OneMoreMachine]:
    """Search with one more machine in each pool, the largest pools if there are many.

    Gains are those over the best plan by its estimate, also where a simpler one was taken.
    """
    seconds, dollars = _best_figures(answer)
    now = _worth(answer, seconds, dollars)
    pools = sorted(question.cluster.pools, key=lambda p: (-p.gpus, p.gpu, p.zone, p.machine))
    for pool in sorted(pools[:POOLS_MAX], key=lambda p: (p.gpu, p.zone, p.machine, p.spot)):
        found, why_none = _search_with_one_more(question, pool)
        usd = None if found is None else found.money.total_usd
        least = now * (1 - GAIN_MIN)
        if found is None or now <= 0 or _worth(answer, found.iteration_s, usd) > least:
            same = (seconds, dollars, 0.0, 0.0)
            why_none = why_none or "no gain found"
            yield OneMoreMachine(pool.gpu, pool.zone, pool.gpus_per_machine, *same, why_none)
            continue
        yield OneMoreMachine(
            pool.gpu,
            pool.zone,
            pool.gpus_per_machine,
            found.iteration_s,
            usd,
            seconds - found.iteration_s,
            None if usd is None or dollars is None else dollars - usd,
        )


def _search_with_one_more(question: Question, pool: Pool) -> tuple[Estimate | None, str]:
    """The best estimate with one more machine of a pool, or the reason why there is no gain."""
    more = replace(pool, gpus=pool.gpus + pool.gpus_per_machine)
    pools = tuple(more if p is pool else p for p in question.cluster.pools)
    cluster = replace(question.cluster, pools=pools)
    facts = PlaceFacts(cluster, question.measurements.network)
    before = grants_of(question.cluster, lots_of(question.cluster, facts))
    lots = lots_of(cluster, facts)
    grants = grants_of(cluster, lots)
    # Where a quota was too small before, GPUs of its other pools may give way.
    its_own = any(all(lots[k].key == pool.key for k in grant.lots) for grant in grants)
    if its_own or len(grants) > len(before):
        return None, "no quota left for it"
    try:
        asked = replace(question, cluster=cluster, is_bounded=False)
        return find_plan(asked, SearchCache()).estimate, ""
    except InputError as error:
        return None, str(error.problems[0])


def _best_figures(answer: Answer) -> tuple[float, float | None]:
    """Seconds and dollars of an iteration of the best plan by its estimate."""
    if answer.instead_of is not None:
        return answer.instead_of.iteration_s, answer.instead_of.usd
    assert answer.estimate is not None
    return answer.estimate.iteration_s, answer.estimate.money.total_usd


def _worth(answer: Answer, seconds: float, usd: float | None) -> float:
    if answer.goal == "cost":
        assert usd is not None, "a cost objective refuses unknown prices"
        return usd
    return seconds


# -- why GPUs are idle ----------------------------------------------------------------------------


def _reasons(question: Question, answer: Answer) -> Iterator[IdleGpus]:
    """For each kind with idle GPUs: does it fit, does it pay, does it help?"""
    assert answer.plan is not None
    used = Counter(answer.plan.gpus_used())
    free = _find_fastest(question) if answer.why.idle else None
    for idle in answer.why.idle:
        name = f"{idle.gpu}@{idle.zone}"
        beyond = _name_quota(question.cluster, idle, used)
        misfit = _misfit(question, idle) if idle.gpus == idle.of and not beyond else ""
        if beyond:
            yield replace(idle, because=beyond)
        elif misfit:
            yield replace(idle, reason="does not fit", because=misfit)
        elif free is not None and Counter(free[0].gpus_used())[name] > used[name]:
            more = Counter(free[0].gpus_used())[name] - used[name]
            usd = free[1].money.total_usd or 0.0
            because = (
                f"ignoring cost, {more} more would be used and an iteration would"
                f" take {free[1].iteration_s:.4g} s and $ {usd:.4g}"
            )
            yield replace(idle, reason="does not pay", because=because)
        else:
            yield replace(idle, reason="does not help")


def _name_quota(cluster: Cluster, idle: IdleGpus, used: Mapping[str, int]) -> str:
    """Which quota the plan uses up, if one limits these GPUs; else an empty text."""
    for quota in cluster.quotas:
        zones = {pool.zone for pool in cluster.pools}
        inside = {zone for zone in zones if quota.where in (zone, cluster.region_of(zone))}
        taken = sum(used[f"{quota.gpu}@{zone}"] for zone in inside)
        if idle.gpu == quota.gpu and idle.zone in inside and taken >= quota.gpus_max:
            return f"the quota of {quota.where} allows {quota.gpus_max} {quota.gpu}"
    return ""


def _find_fastest(question: Question) -> tuple[Plan, Estimate] | None:
    """The fastest plan if cost is ignored; ``None`` if the job has no limit or goal in dollars."""
    objective = question.job.objective
    rich = replace(objective, goal="throughput", **NO_MONEY_LIMITS)
    if rich == objective:
        return None
    asked = replace(question, job=replace(question.job, objective=rich), is_bounded=False)
    found = find_plan(asked, SearchCache())
    if found.plan is None or found.estimate is None:
        return None
    return found.plan, found.estimate


def _misfit(question: Question, idle: IdleGpus) -> str:
    """Why not even one layer fits on such a GPU; empty if one does."""
    pools = [p for p in question.cluster.pools if (p.gpu, p.zone) == (idle.gpu, idle.zone)]
    largest = max(pool.gpus_per_machine for pool in pools)
    degrees = [tp for tp in tp_degrees(question.job) if tp <= largest]
    judge = estimator(
        question.estimator,
        job=question.job,
        cluster=question.cluster,
        measurements=question.measurements,
    )
    size = min(question.job.micro_batches or (1,))
    layers = range(len(question.job.model.layers))
    why = f"no layer of {question.job.model.name} fits into its memory"
    for tp in degrees:
        stages = tuple(Stage((k, k + 1), tp, (pools[0].place,)) for k in layers)
        try:
            memory = judge.estimate(Plan(size, (Pipeline(1, stages),))).memory
        except InputError as error:
            why = str(error.problems[0])
            continue
        if any(device.fits for device in memory[0]):
            return ""
    return why
