"""The command ``replay``: simulates jobs on a trace of availability, under each policy."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click

from planner.api import plan_job
from planner.library.plan_library import PlanLibrary
from planner.problem.question import Question
from planner.replay.run_replay import (
    POLICIES,
    POLICIES_BY_DEADLINE,
    Replay,
    replayed,
)
from planner.replay.several_jobs import WAYS, replayed_together
from planner.replay.trace_plans import DEFAULT_SEARCHES
from sailord.cli.planning.question import (
    BUDGET,
    chosen_names,
    exit_without_plan,
    read_question,
    search_afresh,
)
from sailord.cli.planning.replay_jobs import check_together, text_of, to_json
from sailord.cli.planning.several_jobs import WEIGHTS, begins_of, weights_of
from sailord.cli.shared.described_job import JobFile
from sailord.cli.shared.exit_codes import FAILED
from sailord.cli.shared.inputs import ESTIMATOR, PROFILES, check_outputs
from sailord.cli.shared.options import FILE, JSON, FiniteRange, show
from sailord.plots.figure import check_picture
from sailord.plots.replay import draw_replay
from sailord.text.table import table
from sailord.text.units import duration
from simulator.cluster.cluster import Cluster
from simulator.documents.problems import InputError, Problem
from simulator.spec.job import Job
from simulator.traces.play_types import (
    PolicyResult,
    ReconfigurationCosts,
)
from simulator.traces.trace import LostSlots, Trace, cluster_at
from simulator.traces.trace_file import TraceChoice, load_trace

_COSTS = ReconfigurationCosts()

F = TypeVar("F", bound=Callable[..., Any])


def _seconds(name: str, default: float, what: str) -> Callable[[F], F]:
    return click.option(
        name, type=FiniteRange(min=0), default=default, show_default=True, help=what
    )


@click.command()
@click.argument("trace", type=FILE)
@click.argument("jobs", type=FILE, nargs=-1, required=True, metavar="JOB...")
@click.argument("cluster", type=FILE)
@PROFILES
@WEIGHTS
@click.option(
    "--begins",
    metavar="SECONDS",
    help="Of several jobs, separated by commas: when each comes. By default all are there at 0.",
)
@click.option(
    "--policy",
    "policies",
    default="all",
    show_default=True,
    metavar="NAMES",
    help=f"Policies, separated by commas: {', '.join(POLICIES)}; of several jobs"
    f" {', '.join(WAYS)}.",
)
@click.option("--trace", "trace_name", metavar="NAME", help="The trace, in a file with several.")
@click.option("--pool", metavar="GPU@ZONE", help="The pool of a trace that names none.")
@click.option(
    "--until",
    "until_s",
    type=FiniteRange(min=0, min_open=True),
    metavar="SECONDS",
    help="End of the replay.",
)
@click.option(
    "--from",
    "from_s",
    type=FiniteRange(min=0),
    default=0.0,
    metavar="SECONDS",
    help="Where in the trace the replay begins.",
)
@click.option(
    "--deadline",
    "deadline_s",
    type=FiniteRange(min=0, min_open=True),
    metavar="SECONDS",
    help="By when the job's steps have to be done, as cheaply as possible, from the beginning."
    " Default: objective.deadline, if the trace has starts_at.",
)
@click.option(
    "--seed", default=0, show_default=True, help="Seed that draws which machines a loss takes."
)
@click.option(
    "--searches",
    type=click.IntRange(min=1),
    default=DEFAULT_SEARCHES,
    show_default=True,
    help="Availabilities for which a plan is searched, the longest-lasting first.",
)
@BUDGET
@ESTIMATOR
@_seconds("--planned-s", _COSTS.planned_s, "Downtime of a planned reconfiguration.")
@_seconds("--unplanned-s", _COSTS.unplanned_s, "Downtime of a reconfiguration after a loss.")
@_seconds("--restart-s", _COSTS.restart_s, "Downtime of a restart from a durable checkpoint.")
@click.option(
    "--checkpoint-every-s",
    type=FiniteRange(min=0, min_open=True),
    help="Interval of durable checkpoints of every policy. By default sailor chooses its own, from"
    f" their cost and the losses so far, and the others take {_COSTS.checkpoint_every_s:g} s.",
)
@click.option(
    "--snapshot-steps",
    type=click.IntRange(min=1),
    default=_COSTS.snapshot_steps,
    show_default=True,
    help="Steps between snapshots in the nodes' memory.",
)
@click.option(
    "--plot", type=FILE, metavar="FILE", help="Draw the replay over time as .svg or .png."
)
@JSON
def replay(
    trace: Path,
    jobs: tuple[Path, ...],
    cluster: Path,
    profiles: Path | None,
    weights: str | None,
    begins: str | None,
    policies: str,
    trace_name: str | None,
    pool: str | None,
    until_s: float | None,
    from_s: float,
    deadline_s: float | None,
    seed: int,
    searches: int,
    budget: int | None,
    estimator_name: str,
    planned_s: float,
    unplanned_s: float,
    restart_s: float,
    checkpoint_every_s: float | None,
    snapshot_steps: int,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Replay an availability TRACE under several replanning policies.

    Prints what JOB on CLUSTER would train, lose and cost; of several jobs, at once on parts of the
    cluster and one after another. Exits with 1 if the trace never has enough GPUs for a job.
    """
    check_outputs((plot,), (trace, *jobs, cluster))
    if plot is not None:
        check_picture(plot)
    by_weight = weights_of(weights, jobs)
    questions = [
        read_question(JobFile(job), cluster, profiles, estimator_name, budget=budget)
        for job in jobs
    ]
    question = questions[0]
    the_trace = load_trace(trace, question.cluster, TraceChoice(trace_name, pool, until_s, from_s))
    comes_s = begins_of(begins, jobs, the_trace.end_s)
    every_s = _COSTS.checkpoint_every_s if checkpoint_every_s is None else checkpoint_every_s
    costs = ReconfigurationCosts(planned_s, unplanned_s, restart_s, every_s, snapshot_steps)
    if len(jobs) > 1:
        check_together(
            questions, the_trace, has_deadline=deadline_s is not None, has_plot=plot is not None
        )
        ways = chosen_names(policies, WAYS, "--policy")
        found = replayed_together(
            questions,
            by_weight,
            the_trace,
            costs,
            taken=machines_taken(the_trace, question.cluster, seed),
            search=search_afresh,
            searches=searches,
            chooses_checkpoints=checkpoint_every_s is None,
            begins=comes_s,
        )
        show(to_json(found, ways), as_json, lambda _: text_of(found, ways))
        for asked, each in zip(questions, found.jobs, strict=True):
            if not each.figures:
                _exit_never_ran(asked, each.plans, the_trace, f"the job {asked.job.name}")
        return
    deadline_s = _deadline(question.job, the_trace, from_s, deadline_s)
    if deadline_s is not None:
        the_trace = _until_deadline(the_trace, deadline_s)
    known = POLICIES if deadline_s is None else POLICIES_BY_DEADLINE
    wanted = chosen_names(policies, known, "--policy")
    result = replayed(
        question,
        the_trace,
        costs,
        taken=machines_taken(the_trace, question.cluster, seed),
        search=search_afresh,
        searches=searches,
        chooses_checkpoints=checkpoint_every_s is None,
        deadline_s=deadline_s,
    )
    shown = [outcome for outcome in result.policy_results if outcome.policy in wanted]
    if plot is not None:
        draw_replay(result, shown, plot)
    show(_to_json(result, shown), as_json, lambda _: _text(result, shown, question.job.name))
    if not result.plans.known:
        _exit_never_ran(question, result.plans, the_trace)


def _deadline(job: Job, trace: Trace, from_s: float, given_s: float | None) -> float | None:
    """Seconds from the beginning of the replay until the job's deadline, if it has one."""
    date = job.objective.deadline
    if given_s is None and date is None:
        return None
    if job.steps is None:
        what = "needs the number of iterations of the job"
        raise InputError(Problem("deadline", what, "set training.steps, or leave the deadline out"))
    if given_s is not None:
        return given_s
    if trace.starts_at is None:
        what = "is a date, and the trace does not say when it begins"
        cure = "set starts_at in the trace, or give --deadline SECONDS"
        raise InputError(Problem("objective.deadline", what, cure))
    begins = datetime.fromisoformat(trace.starts_at).timestamp() + from_s
    left_s = datetime.fromisoformat(date or "").timestamp() - begins
    if left_s <= 0:
        what = f"is {-left_s:.0f} s before the replay begins"
        raise InputError(Problem("objective.deadline", what, "set a later date"))
    return left_s


def _until_deadline(trace: Trace, deadline_s: float) -> Trace:
    """The trace up to the deadline."""
    if trace.end_s < deadline_s:
        what = f"is {deadline_s:g} s after the beginning, and the trace ends at {trace.end_s:g} s"
        raise InputError(Problem("deadline", what, "give an earlier one, or a longer trace"))
    return trace.until(deadline_s)


def machines_taken(trace: Trace, cluster: Cluster, seed: int) -> list[LostSlots]:
    """Return which GPUs of each pool a change takes: those of the nodes that the trace names.

    Where it names none, whole machines are drawn in random order.
    """
    chance = random.Random(seed)
    intervals, pools = trace.intervals, cluster.pools
    named = [trace.named_losses(n, pool.gpus_per_machine) for n, pool in enumerate(pools)]
    return [
        tuple(
            _slots(chance, was, was - up, pool.gpus_per_machine) if slots is None else slots
            for pool, was, up, slots in zip(pools, before.gpus, now.gpus, lost, strict=True)
        )
        for before, now, lost in zip(
            (intervals[0], *intervals), intervals, zip(*named, strict=True), strict=False
        )
    ]


def _slots(chance: random.Random, count: int, gone: int, size: int) -> tuple[int, ...]:
    """Return the numbers of the GPUs that are taken, machine after machine."""
    if gone <= 0:
        return ()
    machines = list(range(-(-count // size)))
    chance.shuffle(machines)
    slots = [
        slot
        for machine in machines
        for slot in range(machine * size, min((machine + 1) * size, count))
    ]
    return tuple(sorted(slots[:gone]))


def _exit_never_ran(
    question: Question, plans: PlanLibrary, trace: Trace, job: str = "the job"
) -> NoReturn:
    """Print why a job never ran, and exit."""
    most = max(plans.states, key=lambda gpus: (sum(gpus), gpus))
    click.echo(
        f"{job} never runs: no availability of {trace.name} has a plan for it;"
        f" at most {sum(most)} GPUs are up",
        err=True,
    )
    if sum(most):
        asked = replace(question, cluster=cluster_at(question.cluster, most))
        exit_without_plan(plan_job(asked).problems)
    raise SystemExit(FAILED)


def _to_json(result: Replay, shown: Sequence[PolicyResult]) -> dict[str, Any]:
    trace, plans = result.trace, result.plans
    return {
        "trace": trace.name,
        "duration_s": trace.end_s,
        "changes": len(trace.intervals) - 1,
        "availabilities": len(trace.distinct()),
        "searches": plans.searched,
        "plans": plans.distinct_plans,
        "ideal_samples": result.ideal_samples,
        "deadline": _deadline_json(result),
        "policies": [_outcome_json(result, outcome) for outcome in shown],
    }


def _outcome_json(result: Replay, outcome: PolicyResult) -> dict[str, Any]:
    index = result.policy_results.index(outcome)
    return {
        "policy": outcome.policy,
        "goodput_samples_per_s": outcome.goodput_samples_per_s,
        "share_of_ideal": result.share_of_ideal(outcome),
        "samples": outcome.samples,
        "steps": outcome.steps,
        "steps_lost": outcome.steps_lost,
        "reconfigurations": outcome.reconfigurations,
        "losses": outcome.losses,
        "cost_usd": outcome.usd,
        "useful_s": outcome.useful_s,
        "lost_s": outcome.lost_s,
        "downtime_s": outcome.downtime_s,
        "standing_s": outcome.idle_s,
        "gpu_seconds": dict(zip(result.plans.names, outcome.gpu_seconds, strict=False)),
        "ended": outcome.ended,
        "ended_s": outcome.duration_s,
        "least_usd": result.least_usd[index],
    }


def _text(result: Replay, shown: Sequence[PolicyResult], job: str) -> str:
    trace, plans = result.trace, result.plans
    gpus = [sum(interval.gpus) for interval in trace.intervals]
    lines = [
        f"trace       {trace.name}: {duration(trace.end_s)}, {len(gpus) - 1} changes,"
        f" {min(gpus)} to {max(gpus)} GPUs",
        f"job         {job}: {plans.distinct_plans} plans for {len(trace.distinct())}"
        f" availabilities, {plans.searched} searches",
        f"ideal       {result.ideal_samples / trace.end_s:.4g} samples/s without any downtime",
        *_deadline_lines(result),
        "",
        _table(result, shown),
    ]
    return "\n".join(lines)


def _deadline_json(result: Replay) -> dict[str, Any] | None:
    """What is known of the job's deadline; ``None``: it has none."""
    if result.deadline_s is None:
        return None
    steady, why_not = result.steady, _why_not_guaranteed(result)
    return {
        "deadline_s": result.deadline_s,
        "is_guaranteed": not why_not,
        "why_not": why_not,
        "on_demand_s": None if steady is None else steady.seconds,
        "on_demand_usd": None if steady is None else steady.usd,
        "missed": result.missed,
    }


def _why_not_guaranteed(result: Replay) -> str:
    """Why on-demand GPUs alone cannot meet the deadline; empty: they can."""
    steady, left_s, budget = result.steady, result.deadline_s, result.limits.max_usd
    if left_s is None:
        return ""
    if steady is None:
        return "no on-demand GPUs are there for the job, and spot GPUs may go"
    if steady.seconds > left_s:
        return (
            f"on demand the job takes {duration(steady.seconds)}, and {duration(left_s)} are left"
        )
    if budget is not None and steady.usd is not None and steady.usd > budget:
        return f"on demand the job costs ${steady.usd:,.2f}, and max_usd_total is ${budget:,.2f}"
    return ""


def _deadline_lines(result: Replay) -> list[str]:
    """Which policies meet the deadline, if the job has one, and the least that it costs."""
    if result.deadline_s is None:
        return []
    lines, missed = [], result.missed
    why_not = _why_not_guaranteed(result)
    if why_not:
        lines.append(f"deadline    cannot be guaranteed: {why_not}")
    least = result.least_usd[0]
    lines.append(
        f"deadline    {duration(result.deadline_s)}: "
        + (f"missed by {', '.join(missed)}" if missed else "met by all")
        + ("" if least is None or missed else f"; at least ${least:.2f}")
    )
    return lines


def _table(result: Replay, shown: Sequence[PolicyResult]) -> str:
    header = ["policy", "samples/s", "of ideal", "$", "$/1000 samples", "steps", "steps lost",
              "moves", "down", "redone", "idle"]  # fmt: skip
    rows = []
    for outcome in shown:
        share, usd = result.share_of_ideal(outcome), outcome.usd
        each = None if usd is None or not outcome.samples else usd / outcome.samples * 1000
        idle_s = (outcome.downtime_s, outcome.lost_s, outcome.idle_s)
        rows.append(
            [
                outcome.policy,
                f"{outcome.goodput_samples_per_s:.4g}",
                "-" if share is None else f"{share:.1%}",
                "-" if usd is None else f"{usd:.2f}",
                "-" if each is None else f"{each:.4g}",
                f"{outcome.steps:,.0f}",
                f"{outcome.steps_lost:,.0f}",
                str(outcome.reconfigurations),
                *(f"{seconds / outcome.duration_s:.1%}" for seconds in idle_s),
            ]
        )
    return table(header, rows)
