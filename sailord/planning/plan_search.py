"""Runs in planner processes: turns a request about live nodes into a plan on them."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from agents.protocol.records import ComputeTimes, NodeId, Peak
from planner.api import plan_job
from planner.move_policy.checkpoint_interval import write_s
from planner.move_policy.decide_move import judge_move
from planner.move_policy.move_gain import full_pools, offer_of, pool_name
from planner.move_policy.spot_losses import expected_losses
from planner.problem.question import Question, read_ahead
from planner.replan.answers_ahead import Precomputed
from planner.replan.damage import RunningPlan
from planner.replan.move_cost import DEFAULT_TIMES, cost_of_move
from planner.replan.next_move import replacement_s
from planner.replan.nodes import (
    PlannerNode,
    cluster_with,
    is_placed,
    nodes_used,
    paid_first,
    spot_by_id,
)
from planner.replan.replanner import Replan, Replanner
from planner.replan.transfers import transfers_of
from sailord.core.model.proposal import Proposal
from sailord.planning.gpu_worths import gpu_worths
from sailord.planning.job_spec import read_job, with_speed_goal
from sailord.planning.limited_nodes import why_limited
from sailord.planning.live_cluster import (
    Profiles,
    cluster_of,
    files_of,
    planner_node,
    priced_nodes,
    ran_on,
)
from sailord.planning.messages import (
    FoundPlan,
    MoveContext,
    PlanRequest,
    PoolPrice,
    predicted_phases,
    why_none,
)
from simulator.api import OtherModelError, load_measurements
from simulator.documents.files import parse_document
from simulator.documents.problems import InputError
from simulator.estimate.result import Estimate
from simulator.inputs.plan_file import plan_from_document, plan_text
from simulator.layer_costs.live_times import Correction, corrections_of
from simulator.spec.job import Job
from simulator.spec.plan import Plan

HURRIED = "answers a loss at once, and may leave nodes unused until all plans are searched"


def answer(request: PlanRequest) -> FoundPlan | str:
    """Answer one question."""
    try:
        job = _key_of(request).job()
        before = _running_plan(request)
        nodes, left_out = priced_nodes(job, request, before)
        if left_out and not nodes:
            return "; ".join(left_out)
        if before is None:
            found = _from_nothing(job, nodes, request)
        else:
            found = _from_running(job, nodes, before, request)
        if job.profile is not None and replanner_for(request, nodes).job.profile is None:
            left_out += (f"profile {job.profile} is of another model, and not used",)
        if isinstance(found, str):
            return type(found)("; ".join([found, *left_out]))
        left_out += why_limited(replanner_for(request, nodes), nodes, found)
        told = replace(found, about={**found.about, "why": [*found.about["why"], *left_out]})
        return _complete(told, job, nodes, request)
    except InputError as error:
        return "; ".join(map(str, error.problems))


@dataclass(frozen=True, slots=True)
class _JobKey:
    """What a request says of its job."""

    spec: str
    begun: int
    usd_max: float | None
    keeps_deadline: bool

    def job(self) -> Job:
        job = read_job(self.spec, begun=self.begun, usd_max=self.usd_max)
        return with_speed_goal(job, keeps_deadline=self.keeps_deadline)


def _key_of(request: PlanRequest) -> _JobKey:
    return _JobKey(request.spec, request.begun, request.usd_max, request.keeps_deadline)


@lru_cache(maxsize=4)
def _replanner(
    about: _JobKey,
    file: Path,
    profiles: Profiles,
    links: tuple[Path, int] | None,
    kinds: tuple[PlannerNode, ...],
    live: tuple[Correction, ...],
    prices: tuple[PoolPrice, ...],
) -> Replanner:
    cluster, job = cluster_of(file, kinds, prices), about.job()
    found = load_measurements(
        profiles[0], catalogue=cluster.catalogue, links=None if links is None else links[0]
    )
    measurements = replace(found, live=live)
    try:
        ready = read_ahead(measurements, job, cluster.catalogue)
    except OtherModelError:
        # The job was accepted by a version that counted its layers differently: it goes on.
        job = replace(job, profile=None)
        ready = read_ahead(measurements, job, cluster.catalogue)
    return Replanner(job, cluster, ready)


def replanner_for(
    request: PlanRequest, nodes: Sequence[PlannerNode], live: tuple[Correction, ...] = ()
) -> Replanner:
    """The replanner, cached by kinds of machines and profiles; past moves are this request's."""
    kinds = {(n.gpu, n.machine, n.zone, n.spot): replace(n, id="") for n in sorted(nodes)}
    files = request.cluster_file, files_of(request), request.links
    found = _replanner(_key_of(request), *files, tuple(kinds.values()), live, request.prices)
    found.times = replace(DEFAULT_TIMES, past=request.past.moves)
    return found


def _live_corrections(
    request: PlanRequest, before: Plan, nodes: Sequence[PlannerNode]
) -> tuple[Correction, ...]:
    """What the running plan's steps say of the profile, if the job has one.

    Not while a job waits: corrected tables take seconds to build.
    """
    if request.is_urgent or request.slow or not request.ratios:
        return ()
    replanner = replanner_for(request, nodes)
    judge, profile = replanner.judge, replanner.judge.costs.profile
    kinds = () if profile is None else profile.gpus()
    ratios, error = dict(request.ratios), request.relative_error
    if request.predicted:  # Perhaps with a profile that has changed since.
        now = _busy(replanner.job, before, judge.estimate(before)).seconds
        ratios = {rank: each * request.predicted[rank] / now[rank] for rank, each in ratios.items()}
    found = corrections_of(before, ratios, relative_error=error)
    return tuple(each for each in found if each.gpu in kinds)


def _running_plan(request: PlanRequest) -> Plan | None:
    if request.running is None:
        return None
    plan = plan_from_document(parse_document(request.running, name="the running plan"))
    return plan if is_placed(plan) else None


def _from_nothing(job: Job, nodes: Sequence[PlannerNode], request: PlanRequest) -> FoundPlan | str:
    replanner = replanner_for(request, nodes)
    # Nothing runs: proving the plan optimal would take longer than finding it.
    found = plan_job(
        Question(
            *(job, cluster_with(replanner.cluster, nodes), replanner.measurements),
            proves=False,
            is_bounded=False,
            prefer=job.objective.prefer,
        )
    )
    if found.plan is None:
        return why_none(found.problems)
    spot_nodes = paid_first(nodes, found.plan, spot=True) if found.pays_spot_first else nodes
    placed = replanner.place(found.plan, spot_nodes) or replanner.place(found.plan, nodes)
    assert placed is not None, "a plan for these nodes has room on them"
    # The search does not know which nodes the plan is placed on.
    estimate = replanner.judge.estimate_on(placed, spot_by_id(nodes))
    again = _predict_restart(replanner, placed, estimate, nodes)
    why = (*found.explain, *_warnings(replanner, placed, estimate, nodes, request.past))
    return _build_found(job, placed, estimate, again=again, why=why)


def _from_running(
    job: Job, nodes: Sequence[PlannerNode], before: Plan, request: PlanRequest
) -> FoundPlan | str:
    replanner, running = _tables_for(request, before)
    live = replanner.measurements.live
    if request.slow:
        return _without_slow(job, replanner, running, nodes, request)
    leaving = [node for node in ran_on(before, request) if node.id in request.leaving]
    found = replanner.replan(running, nodes, leaving=leaving)
    is_hurried = found.needed is not None or request.is_urgent
    if not is_hurried:
        # The running plan continues meanwhile, so the search may take longer.
        found = replanner.improve(running, nodes)
    if found.plan is None:
        return why_none(found.problems)
    told = _judge(replanner, job, running, found, nodes, request.past, is_hurried=is_hurried)
    if not live:
        return told
    judge = replanner_for(request, [*nodes, *ran_on(before, request)]).judge
    about = {**told.about, "why": [*told.about["why"], *map(str, live)]}
    plan = found.found[0]
    return _with_plain(replace(told, about=about), job, plan, judge.estimate(plan))


def _without_slow(
    job: Job,
    replanner: Replanner,
    running: RunningPlan,
    nodes: Sequence[PlannerNode],
    request: PlanRequest,
) -> FoundPlan | str:
    """The best plan without the stragglers, compared with continuing at their speed.

    Both are judged by measured compute times; the search itself uses predicted ones.
    """
    found = replanner.improve(running, nodes)
    if found.plan is None:
        return why_none(found.problems)
    plan, plain, *_ = found.found
    factors, slow = dict(request.factors), dict(request.slow)
    others = statistics.mean(factors.values()) if factors else 1.0
    times: dict[str, float] = {
        node.id: factors.get(node.gpu, others) * slow.get(node.id, 1.0)
        for node in (*request.nodes, *request.ran_on)
    }
    spot = spot_by_id([*nodes, *ran_on(running.plan, request)])

    def at_their_speed(some: Plan) -> Estimate:
        return replanner.judge.estimate_on(some, spot, times_slower=times)

    slowed = replace(running, estimate=at_their_speed(running.plan))
    # No move is needed: the running plan can go on, at the speed of the stragglers.
    without = replace(found, estimate=at_their_speed(plan), needed=None)
    told = _judge(replanner, job, slowed, without, nodes, request.past)
    return _with_plain(told, job, plan, plain)


def _with_plain(told: FoundPlan, job: Job, plan: Plan, plain: Estimate) -> FoundPlan:
    """Return the answer with uncorrected predictions, with which measurements are compared."""
    busy = _busy(job, plan, plain)
    return replace(told, proposal=replace(told.proposal, busy=busy, plain_s=plain.iteration_s))


def _tables_for(request: PlanRequest, before: Plan) -> tuple[Replanner, RunningPlan]:
    """The replanner and its tables for the running plan, cached."""
    nodes = [*map(planner_node, request.nodes), *ran_on(before, request)]
    live = _live_corrections(request, before, nodes)
    replanner = replanner_for(request, nodes, live)
    key = request.running, live
    known = _RUNNING.get(key)
    if known is None or known[0] is not replanner:
        # The plain tables of the running plan stay, for the next urgent request.
        for other in [each for each in _RUNNING if each[0] != request.running or each[1]]:
            del _RUNNING[other]
        known = _RUNNING[key] = replanner, replanner.prepare(before, nodes)
    return known


_RUNNING: dict[tuple[bytes | None, tuple[Correction, ...]], tuple[Replanner, RunningPlan]] = {}
"""The tables of the running plan of the last request, plain and corrected."""


def _judge(
    replanner: Replanner,
    job: Job,
    running: RunningPlan,
    found: Replan,
    nodes: Sequence[PlannerNode],
    past: MoveContext,
    *,
    is_hurried: bool = False,
) -> FoundPlan:
    """Judge whether the job should reconfigure to the plan.

    One that was found in a hurry may leave nodes unused: soon the whole search follows.
    """
    plan, estimate, _, move = found.found
    ages = dict(past.age_s)
    again = _predict_restart(replanner, plan, estimate, nodes)
    offer = offer_of(
        running,
        found,
        nodes,
        goal=job.objective.goal,
        age_s={node.id: ages.get(node.id, math.inf) for node in nodes},
        loss_s=again["seconds"],
        full=full_pools(replanner.cluster, nodes),
        seconds_left=past.left_s,
    )
    verdict = judge_move(
        offer,
        past.history,
        now_s=past.now_s,
        last_move_s=past.last_move_s,
    )
    return _build_found(
        job,
        plan,
        estimate,
        again=again,
        why=(
            verdict.sentence,
            *((HURRIED,) if is_hurried else ()),
            # After a loss the job waits for this answer.
            *(() if found.needed else _warnings(replanner, plan, estimate, nodes, past)),
        ),
        reason=verdict.reason,
        is_worth_it=verdict.moves,
        move_s=move.seconds,
        move=move.to_json(),
        ask_again_s=past.settle_s if is_hurried else verdict.ask_again_s,
    )


def _complete(
    found: FoundPlan, job: Job, nodes: Sequence[PlannerNode], request: PlanRequest
) -> FoundPlan:
    """Add what does not follow from the plan alone.

    The interval of checkpoints follows from observed losses and the state's size, a job's part of
    the cluster from what GPUs are worth to it.
    """
    past = request.past
    members = frozenset(found.proposal.members)
    pools = Counter(pool_name(node) for node in nodes if node.id in members)
    losses, observed_s = past.history.hits(pools, past.now_s)
    writes_s = write_s(job, len(members))
    worths = gpu_worths(replanner_for(request, nodes), request.kinds)
    proposal = replace(
        found.proposal, losses=losses, observed_s=observed_s, write_s=writes_s, worths=worths
    )
    return replace(found, proposal=proposal, about={**found.about, "write_s": writes_s})


# ---- precomputed plans ----------------------------------------------------------------------


@dataclass(eq=False)
class _Ahead:
    """The losses that this process precomputes, and its progress."""

    request: PlanRequest
    job: Job
    ahead: Precomputed
    steps: Iterator[frozenset[str]]


_AHEAD: list[_Ahead] = []


def start_precomputing(request: PlanRequest) -> None:
    """Start precomputing the next plans for losses of nodes of the running plan."""
    _AHEAD.clear()
    before = _running_plan(request)
    if before is None:
        return
    replanner, running = _tables_for(request, before)
    job = _key_of(request).job()
    nodes, _ = priced_nodes(job, request, before)
    ahead = Precomputed(replanner, running, nodes)
    _AHEAD.append(_Ahead(request, job, ahead, ahead.steps()))


def precompute_next() -> tuple[frozenset[str], frozenset[str], FoundPlan | str] | None:
    """The next loss, the nodes in use, and the next plan, or why there is none; ``None`` after the
    last."""
    for current in _AHEAD:
        ahead = current.ahead
        for lost in current.steps:
            found = ahead.by_loss[lost]
            if found.plan is None:
                return lost, ahead.used, why_none(found.problems)
            nodes = ahead.without(lost)
            past = current.request.past
            about = ahead.replanner, current.job, ahead.running, found, nodes, past
            judged = _judge(*about, is_hurried=True)
            return lost, ahead.used, _complete(judged, current.job, nodes, current.request)
    return None


def build_tables(request: PlanRequest) -> None:
    """Build the tables for requests about the running plan."""
    before = _running_plan(request)
    if before is not None:
        _tables_for(request, before)


def _warnings(
    replanner: Replanner,
    plan: Plan,
    estimate: Estimate,
    nodes: Sequence[PlannerNode],
    past: MoveContext,
) -> tuple[str, ...]:
    """What losses of spot nodes cost, if they are in every pipeline."""
    losses = expected_losses(replanner, plan, estimate, nodes, past.history, now_s=past.now_s)
    return () if losses is None else (losses.sentence,)


def _predict_restart(
    replanner: Replanner, plan: Plan, estimate: Estimate, nodes: Sequence[PlannerNode]
) -> dict[str, Any]:
    """Predict the cost of restarting the plan on the same nodes, should a process fail.

    With the seconds of a move that replaces a node.
    """
    state, routes = replanner.state, replanner.routes
    cost = cost_of_move(
        plan,
        transfers_of(plan, nodes, running=plan, state=state, routes=routes),
        nodes,
        state=state,
        network=replanner.judge.network,
        old_iteration_s=estimate.iteration_s,
        new_iteration_s=estimate.iteration_s,
        is_planned=False,
        usd_per_hour=estimate.rent_usd_per_hour,
        times=replanner.times,
    )
    return {**cost.to_json(), "replacement_s": replacement_s(replanner, plan, estimate, nodes)}


def _build_found(
    job: Job,
    plan: Plan,
    estimate: Estimate,
    *,
    again: dict[str, Any],
    why: Sequence[str],
    reason: str = "",
    is_worth_it: bool = True,
    move_s: float = 0.0,
    move: dict[str, Any] | None = None,
    ask_again_s: float | None = None,
) -> FoundPlan:
    text = plan_text(plan).encode()
    sha = hashlib.sha256(text).hexdigest()
    members = tuple(sorted(NodeId(id_) for id_ in nodes_used(plan)))
    figures = estimate.to_json()
    proposal = Proposal(
        plan=sha,
        members=members,
        is_worth_it=is_worth_it,
        why=reason or (why[0] if why else "the best plan that was found"),
        iteration_s=estimate.iteration_s,
        move_s=move_s,
        next_move_s=again["replacement_s"],
        ask_again_s=ask_again_s,
        usd_per_hour=figures["cost_usd_per_hour"],
        busy=_busy(job, plan, estimate),
        peaks=_peaks(plan, estimate),
        move_phases=predicted_phases(move),
        move_uncorrected=predicted_phases(move, "uncorrected"),
    )
    about = {
        "estimate": figures,
        "tokens_per_iteration": estimate.samples_per_iteration * job.sequence,
        "unit": "tokens" if job.sequence > 1 else "samples",
        "why": list(why),
        "move": move,
        "again": again,
    }
    return FoundPlan(proposal, text, about)


def _peaks(plan: Plan, estimate: Estimate) -> tuple[Peak, ...]:
    """Predicted memory of each rank on its device."""
    return tuple(
        Peak(round(memory.total - memory.context), round(memory.context))
        for pipeline, memories in zip(plan.pipelines, estimate.memory, strict=True)
        for stage, memory in zip(plan.owning_stages(pipeline), memories, strict=True)
        for _ in range(stage.tp)
    )


def _busy(job: Job, plan: Plan, estimate: Estimate) -> ComputeTimes:
    """Predicted compute seconds per step of each rank, as workers measure them."""
    seconds = [
        # With ZeRO-1 the update waits for other ranks and is not measured.
        round(time.compute_s + (0.0 if job.zero else time.optimizer_s), 9)
        for pipeline, times in zip(plan.pipelines, estimate.stages, strict=True)
        for stage, time in zip(plan.owning_stages(pipeline), times, strict=True)
        for _ in range(stage.tp)
    ]
    error = estimate.compute_error
    assert error is not None, "the event estimator tells the error of compute times"
    return ComputeTimes(tuple(seconds), round(error, 3))
