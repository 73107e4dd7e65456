"""The command ``replan``: the next plan after a change, and whether moving to it pays off."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import click

from planner.move_policy.decide_move import DEFAULT_THRESHOLDS, MoveVerdict, judge_move
from planner.move_policy.move_gain import offer_of
from planner.move_policy.node_lifetimes import LifetimeHistory
from planner.problem.inventory import missing_price
from planner.problem.question import read_ahead
from planner.replan.damage import RunningPlan
from planner.replan.match_nodes import MatchedNodes, match_nodes, with_pools_of
from planner.replan.nodes import cluster_with, is_placed, lots_on, nodes_used
from planner.replan.replanner import Replan, Replanner
from planner.replan.transfers import Transfers
from sailord.cli.planning.estimate_text import estimate_text
from sailord.cli.planning.question import exit_without_plan
from sailord.cli.shared.described_job import JobFile, takes_script
from sailord.cli.shared.inputs import PROFILES, check_outputs, load_all
from sailord.cli.shared.options import FILE, JSON, FiniteRange, show
from simulator.api import load_measurements
from simulator.cluster.cluster import Cluster
from simulator.documents.problems import InputError, Problems
from simulator.inputs.plan_check import check_plan
from simulator.inputs.plan_file import complete_plan, plan_text, plan_to_json
from simulator.spec.job import Job
from simulator.spec.plan import Plan


@click.command()
@click.argument("plan", type=FILE)
@click.argument("job", type=FILE)
@click.argument("cluster", type=FILE)
@takes_script
@PROFILES
@click.option("--lost", multiple=True, metavar="NODE", help="A lost node; repeatable.")
@click.option(
    "--life",
    "life_s",
    type=FiniteRange(min=0),
    help="Seconds until the next change, at most: the time in which a move must pay off.",
)
@click.option(
    "--deep",
    is_flag=True,
    help="Search longer and from scratch, as sailord does while the job runs.",
)
@click.option("--save", type=FILE, metavar="PLAN", help="Write the next plan to this file.")
@JSON
def replan(
    plan: Path,
    job: JobFile,
    cluster: Path,
    profiles: Path | None,
    lost: tuple[str, ...],
    life_s: float | None,
    deep: bool,
    save: Path | None,
    as_json: bool,
) -> None:
    """Find the plan that should follow PLAN on the new CLUSTER.

    Prints what the reconfiguration would move, what it costs, and whether it pays off. Exits with
    0 if there is a next plan, with 1 if there is none.
    """
    check_outputs((save,), (plan, job.path, cluster))
    the_job, the_cluster, old = load_all(job, cluster, plan)
    old = complete_plan(old, the_cluster)
    the_cluster = with_pools_of(the_cluster, old)
    matched = match_nodes(old, the_cluster, lost)
    _check(old, the_job, the_cluster, matched, plan.name)
    measurements = load_measurements(profiles, catalogue=the_cluster.catalogue)
    ready = read_ahead(measurements, the_job, the_cluster.catalogue)
    replanner = Replanner(the_job, the_cluster, ready)
    unpriced = missing_price(lot for lot in lots_on(replanner.lots, matched.now) if lot.gpus)
    if unpriced is not None and replanner.limits.needs_prices:
        raise InputError(unpriced)
    placed = old if is_placed(old) else replanner.place(old, matched.before)
    assert placed is not None, "a checked plan fits its cluster"
    running = replanner.prepare(placed, matched.before)
    started = time.perf_counter()
    found = (replanner.improve if deep else replanner.replan)(running, matched.now)
    seconds = time.perf_counter() - started
    if found.plan is None:
        exit_without_plan(found.problems)
    verdict = _verdict(running, found, matched, the_job, life_s)
    if save is not None:
        save.write_text(plan_text(found.plan), encoding="utf-8")
    gone = tuple(name for name in matched.lost if name in nodes_used(placed))
    if the_job.objective.deadline is not None:
        what = "how many steps are done is unknown"
        click.echo(f"note: objective.deadline is not checked: {what}", err=True)
    result = _Result(running, found, matched, gone, verdict, the_job, seconds)
    show(_document(result), as_json, lambda _: _text(result))


@dataclass(frozen=True, slots=True)
class _Result:
    running: RunningPlan
    found: Replan
    matched: MatchedNodes
    gone: tuple[str, ...]
    """Nodes of the running plan that were lost."""
    verdict: MoveVerdict
    job: Job
    seconds: float


def _check(old: Plan, job: Job, cluster: Cluster, matched: MatchedNodes, name: str) -> None:
    """Check the running plan against the job and the nodes on which it ran."""
    # A running plan has passed its quotas.
    wide = replace(cluster_with(cluster, matched.before), quotas=())
    Problems(list(check_plan(old, job, wide, place=name))).raise_if_any()


def _verdict(
    running: RunningPlan, found: Replan, matched: MatchedNodes, job: Job, life_s: float | None
) -> MoveVerdict:
    """Judge the move without a history of node lifetimes: no node counts as new."""
    offer = offer_of(
        running,
        found,
        matched.now,
        goal=job.objective.goal,
        age_s={node.id: math.inf for node in matched.now},
    )
    rules = DEFAULT_THRESHOLDS if life_s is None else replace(DEFAULT_THRESHOLDS, horizon_s=life_s)
    return judge_move(offer, LifetimeHistory(), now_s=0.0, rules=rules)


def _document(result: _Result) -> dict[str, Any]:
    running, found = result.running, result.found
    plan, estimate, transfers, move = found.found
    return {
        "plan": plan_to_json(plan),
        "estimate": estimate.to_json(),
        "gpus_used": plan.gpus_used(),
        "running": {
            "iteration_s": running.estimate.iteration_s,
            "cost_usd_per_iteration": running.estimate.money.total_usd,
            "lost_nodes": list(result.gone),
            "other_nodes": list(result.matched.unused),
            "cannot_go_on": found.needed,
        },
        "moves": _moves(transfers),
        "cost": move.to_json(),
        "verdict": result.verdict.to_json(),
        "search": {"seconds": result.seconds, "evaluations": found.evaluations},
    }


def _moves(transfers: Transfers) -> dict[str, Any]:
    return {
        "network_bytes": transfers.network_bytes,
        "restored_bytes": transfers.restored_bytes,
        "own_device_bytes": transfers.own_device_bytes,
        "same_node_bytes": transfers.same_node_bytes,
        "lost_layers": list(transfers.lost_layers),
        "transfers": [
            {"from": t.source, "to": t.target, "layers": list(t.layers), "bytes": t.size_bytes}
            for t in transfers.between_nodes
        ],
        "restored": [
            {"to": r.target, "layers": list(r.layers), "bytes": r.size_bytes}
            for r in transfers.restored
        ],
    }


def _text(result: _Result) -> str:
    running, found = result.running, result.found
    plan, estimate, transfers, move = found.found
    phases = ", ".join(
        f"{field.name.removesuffix('_s').replace('_', ' ')} {getattr(move.phases, field.name):.2g}"
        for field in fields(move.phases)
        if getattr(move.phases, field.name) > 0
    )
    lines = [
        estimate_text(plan, result.job, estimate),
        "",
        f"before      {running.estimate.iteration_s:.4g} s an iteration"
        + (f"; {found.needed}" if found.needed else ""),
        f"lost        {_join_names(result.gone)}",
        f"unused      {_join_names(result.matched.unused)}",
        f"transfers   {_gb(transfers.network_bytes)} between nodes in"
        f" {len(transfers.between_nodes)} transfers, {_gb(transfers.restored_bytes)} from replicas;"
        f" {_gb(transfers.own_device_bytes)} stay on their devices",
    ]
    if plan != running.plan:
        rent = "" if move.rent_usd is None else f", ${move.rent_usd:.2f} for rent"
        lines.append(
            f"downtime    {move.seconds:.1f} s ({phases} s, less {move.trained_s:.2g} s of steps"
            f" done; {move.steps_lost:g} steps repeated), ${move.egress_usd:.2f} for egress{rent}"
        )
    lines += [
        f"verdict     {result.verdict.sentence}",
        f"search      {result.seconds * 1e3:.0f} ms, {found.evaluations} plans judged",
    ]
    return "\n".join(lines)


def _join_names(names: tuple[str, ...]) -> str:
    if not names:
        return "none"
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _gb(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:.3g} GB"
