"""The command ``plan``: the best plan for a job on a cluster."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from planner.api import SPOT_FIRST, asked_with_spot_first, best_answer, plan_job
from planner.compare.interface import Mode
from planner.compare.judge_all import JudgedPlanner, case_of, judge_entry
from planner.compare.registry import SAILOR, baseline, names
from planner.event_planner import SMALL_BUDGET
from planner.move_policy.deadline_outlook import DeadlineOutlook, deadline_outlook
from planner.move_policy.node_lifetimes import LifetimeHistory
from planner.move_policy.spot_losses import expected_losses, history_of
from planner.problem.question import (
    DEFAULT_BUDGETS,
    SPACES,
    STOPPED,
    TRIED,
    Answer,
    Question,
    Space,
)
from planner.replan.nodes import nodes_of, paid_first
from planner.replan.replan_tables import ReplanTables
from planner.search.search_cache import SearchCache
from planner.what_if import explained
from sailord.cli.planning.estimate_text import estimate_text
from sailord.cli.planning.host_memory import HostMemory
from sailord.cli.planning.question import (
    chosen_names,
    exit_without_plan,
    judge_of,
    read_question,
    rejected_text,
)
from sailord.cli.shared.described_job import JobFile, takes_script
from sailord.cli.shared.inputs import ESTIMATOR, PROFILES, check_outputs
from sailord.cli.shared.options import FILE, JSON, show
from sailord.plots.figure import check_picture
from sailord.plots.plan import write_plot
from sailord.text.units import duration
from simulator.documents.problems import InputError, Problem
from simulator.estimate.result import Estimate
from simulator.inputs.job_file import ALLOWED, PREFERENCES
from simulator.inputs.plan_file import DEGREE_MAX, plan_text
from simulator.spec.job import Preference
from simulator.spec.plan import Plan
from simulator.traces.trace import Trace
from simulator.traces.trace_file import load_trace

PROGRESS_S = 3.0
"""Seconds between two lines of progress."""


def _share(_context: click.Context, _option: click.Parameter, text: str | None) -> float | None:
    """Read ``5%`` or ``0.05``."""
    if text is None:
        return None
    number = text.strip().removesuffix("%")
    try:
        share = float(number) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise InputError(Problem("--gap", f'"{text}" is not a share', "write 5% or 0.05"))
    return share


@click.command()
@click.argument("job", type=FILE)
@click.argument("cluster", type=FILE)
@takes_script
@PROFILES
@click.option(
    "--planner",
    default=SAILOR,
    show_default=True,
    metavar="NAME",
    help=f"Our planner, or one of the literature: {', '.join(names())}.",
)
@click.option(
    "--mode",
    type=click.Choice(["fixed", "published"]),
    default="fixed",
    show_default=True,
    help="A planner of the literature with its known defects fixed, or as published.",
)
@ESTIMATOR
@click.option("--space", type=click.Choice(SPACES), default="full", show_default=True)
@click.option(
    "--budget",
    type=click.IntRange(min=1),
    help=f"Plans to judge; default: {DEFAULT_BUDGETS['paper']} (paper), {SMALL_BUDGET} on up to 64"
    f" GPUs and down to {DEFAULT_BUDGETS['event']} on more (event). Placements and simpler"
    " variants of the best, and small cases to their end, are judged on top.",
)
@click.option(
    "--gap",
    callback=_share,
    metavar="PERCENT",
    help="Search until no plan in the searched space can be better by more than this, e.g. 5%, or"
    " say why not; Ctrl-C prints the best plan so far.",
)
@click.option(
    "--prefer",
    type=click.Choice(PREFERENCES),
    help="Among plans that cannot be told apart, take the cheaper and simpler one, or the best by"
    " estimate; default: the job's, which is simple, and fastest with --gap.",
)
@click.option(
    "--allow",
    type=click.Choice((*ALLOWED, *TRIED)),
    multiple=True,
    help="Where that is faster: interleaved, several chunks of layers on each device in turn"
    " (interleaved 1F1B); sequence, ranks that split layers share the tokens between split parts"
    " (sequence parallelism); micro-batch-per-pipeline, pipelines with a micro batch size of their"
    " own; default: the job's objective.allow. zero-bubble: see what it would"
    " bring to divide backward passes; no runtime does yet, so such a plan cannot be submitted."
    " offload: the same for activations that wait in the hosts' memory instead of being recomputed."
    " zero1: try ZeRO-1 off and on, whatever the job says. outer-steps: see what it would bring if"
    " pipelines in separate zones averaged their parameters only every --outer-every iterations,"
    " which changes the loss; no runtime does yet.",
)
@click.option(
    "--outer-every",
    type=click.IntRange(1, DEGREE_MAX),
    metavar="N",
    help="Iterations between outer steps, for --allow outer-steps.",
)
@click.option(
    "--trace",
    type=FILE,
    help="An availability trace: losses as in it, for the warning about spot machines, instead of"
    " one an hour that takes half of a pool.",
)
@click.option("--save", type=FILE, metavar="PLAN", help="Write the plan to this file.")
@click.option("--plot", type=FILE, metavar="FILE", help="Draw the plan as .svg or .png.")
@click.option("--explain", is_flag=True, help="Say why this plan won, and why others did not.")
@JSON
def plan(
    job: JobFile,
    cluster: Path,
    profiles: Path | None,
    planner: str,
    mode: Mode,
    estimator_name: str,
    space: Space,
    budget: int | None,
    gap: float | None,
    prefer: Preference | None,
    allow: tuple[str, ...],
    outer_every: int | None,
    trace: Path | None,
    save: Path | None,
    plot: Path | None,
    explain: bool,
    as_json: bool,
) -> None:
    """Find the best plan for JOB on CLUSTER.

    Exits with 0 if it prints a plan, with 1 if there is none.
    """
    check_outputs((save, plot), (job.path, cluster))
    if plot is not None:
        check_picture(plot)
    (planner,) = chosen_names(planner, names(), "--planner")
    question = read_question(
        *(job, cluster, profiles, estimator_name), space=space, budget=budget, has_deadline=True
    )
    past = None if trace is None else load_trace(trace, question.cluster)
    if planner == SAILOR:
        prefer = _preference(prefer, question, gap)
        question = _allow(allow, outer_every, question)
        told = None if as_json or gap is None else _progress(time.monotonic)
        asked = replace(question, gap=gap, prefer=prefer, is_stoppable=True, told=told)
        found = _search(asked, explain=explain)
    else:
        ours = {"--allow": allow, "--outer-every": outer_every, "--gap": gap is not None}
        for name, is_given in ours.items():
            if is_given:
                raise InputError(Problem(name, "is for our planner only", "leave --planner out"))
        found = _run_baseline(question, planner, mode)
    if isinstance(found, list):
        exit_without_plan(found)
    # Saved at once: who interrupts what follows keeps the plan.
    if save is not None:
        save.write_text(plan_text(found.plan), encoding="utf-8")
    try:
        found = _with_placement(found, question, past)
        if question.seconds_left is not None and not found.is_stopped:
            found = _with_outlook(found, question, past)
    except KeyboardInterrupt:
        stopped = "            what follows from the plan was stopped before its end"
        found = replace(found, lines=(*found.lines, stopped))
    if plot is not None:
        write_plot(found.plan, found.estimate, judge_of(question), plot)
    page = estimate_text(found.plan, question.job, found.estimate)
    show(found.document, as_json, lambda _: "\n".join([page, *found.lines]))


def _preference(asked: Preference | None, question: Question, gap: float | None) -> Preference:
    """What to take among plans that cannot be told apart."""
    is_event = question.estimator == "event"
    if asked == "simple" and (gap is not None or not is_event):
        what = (
            "simple takes the error bars of the event estimator, and --gap asks for the best plan"
        )
        raise InputError(Problem("--prefer", what, "leave it out, or say fastest"))
    if gap is not None or not is_event:
        return "fastest"
    return asked or question.job.objective.prefer


def _allow(asked: tuple[str, ...], outer_every: int | None, question: Question) -> Question:
    """Return the question with what ``--allow`` lets the job's plan have."""
    if ("outer-steps" in asked) != (outer_every is not None):
        what = "needs --allow outer-steps" if outer_every else "is needed by --allow outer-steps"
        cure = "give both: --allow outer-steps --outer-every 50"
        raise InputError(Problem("--outer-every", what, cure))
    if not asked:
        return question
    if question.estimator != "event":
        cure = "use --estimator event, or leave it out"
        raise InputError(Problem("--allow", "works under the event estimator only", cure))
    allow = tuple(name for name in ALLOWED if name in asked)
    tries = tuple(name for name in TRIED if name in asked)
    objective = replace(question.job.objective, allow=allow or question.job.objective.allow)
    return replace(
        question,
        job=replace(question.job, objective=objective),
        tries=tries,
        outer_every=outer_every,
    )


@dataclass(frozen=True, slots=True)
class _Found:
    """A plan, its JSON document, and the lines that follow its estimate in the text."""

    plan: Plan
    estimate: Estimate
    document: dict[str, Any]
    lines: tuple[str, ...]
    pays_spot_first: bool = False
    """Whether it is priced on spot GPUs before those on demand."""
    is_stopped: bool = False
    """The search or its explanation was interrupted: nothing more is searched."""


def _progress(clock: Callable[[], float]) -> Callable[[str], None]:
    """Print on stderr how far the search is, every ``PROGRESS_S``."""
    due_s = clock() + PROGRESS_S

    def tell(text: str) -> None:
        nonlocal due_s
        if clock() >= due_s:
            click.echo(text, err=True)
            due_s = clock() + PROGRESS_S

    return tell


def _search(question: Question, *, explain: bool) -> _Found | list[Problem]:
    started = time.perf_counter()
    answer = plan_job(question)
    seconds = time.perf_counter() - started
    if answer.plan is None or answer.estimate is None:
        return list(answer.problems)
    plan, estimate, lines = answer.plan, answer.estimate, [_search_line(answer, seconds)]
    is_stopped = answer.note == STOPPED
    if explain and not is_stopped:
        try:
            answer = explained(question, answer)
        except KeyboardInterrupt:
            is_stopped = True
            lines.append("            the explanation was stopped before its end")
    if explain:
        lines += ["", *answer.explain]
    document, spot = answer.to_json(seconds=seconds), answer.pays_spot_first
    return _Found(plan, estimate, document, tuple(lines), spot, is_stopped)


def _with_placement(found: _Found, question: Question, trace: Trace | None) -> _Found:
    """The plan with what its nodes tell: the memory for snapshots, and losses of spot machines."""
    told: dict[str, Any] = {"spot_losses": None, "host_memory": None}
    lines: tuple[str, ...] = ()
    tables = ReplanTables(question.job, question.cluster, question.measurements)
    nodes = nodes_of(question.cluster)
    # Nodes are assigned to unsplit stages.
    is_split = any(len(s.places) > 1 for each in found.plan.pipelines for s in each.stages)
    placed = None
    # What a lost outer group repeats, and snapshots of its two values per parameter: unknown.
    if not is_split and found.plan.outer_every is None:
        paid = paid_first(nodes, found.plan, spot=True) if found.pays_spot_first else nodes
        placed = tables.place(found.plan, paid) or tables.place(found.plan, nodes)
    if placed is not None:
        memory = HostMemory.of(question.job, placed, nodes, question.cluster)
        told["host_memory"], lines = memory.to_json(), memory.lines
    if placed is not None and question.estimator == "event" and any(node.spot for node in nodes):
        history, now_s, source = LifetimeHistory(), 0.0, "assumed"
        if trace is not None:
            history, now_s = history_of(trace, question.cluster)
            source = f"as in {trace.name}"
        losses = expected_losses(tables, placed, found.estimate, nodes, history, now_s=now_s)
        if losses is not None:
            told["spot_losses"] = losses.to_json()
            lines += (f"warning     {losses.sentence} (losses {source})",)
    return replace(found, document=found.document | told, lines=(*lines, *found.lines))


def _with_outlook(found: _Found, question: Question, past: Trace | None) -> _Found:
    """The plan with what becomes of the deadline."""

    def search(asked: Question) -> Answer:
        return best_answer(asked, SearchCache())

    outlook = deadline_outlook(question, found.estimate, search, past)
    document = found.document | {"deadline": outlook.to_json()}
    lines = _deadline_lines(outlook, "" if past is None else f" (as in {past.name})")
    return replace(found, document=document, lines=(*found.lines, *lines))


def _deadline_lines(outlook: DeadlineOutlook, source: str) -> tuple[str, ...]:
    """Return whether the plan meets the deadline, and what spot with a safety net would cost."""
    usd = "" if outlook.usd is None else f", for ${outlook.usd:,.2f}"
    verdict = "met" if outlook.slack_s >= 0 else "MISSED"
    spare = f"{duration(abs(outlook.slack_s))} {'to spare' if outlook.slack_s >= 0 else 'late'}"
    lines = [
        f"deadline    in {duration(outlook.seconds_left)}: {verdict}, {spare};"
        f" all steps take {duration(outlook.run_s)}{usd}"
    ]
    mix = outlook.mixture
    if mix is not None:
        share = f"{mix.spot_share:.0%}"
        net = "guaranteed" if mix.is_guaranteed else "not guaranteed: on demand alone is too slow"
        lines.append(
            f"mixture     spot while there is any, else on demand in time: ${mix.expected_usd:,.2f}"
            f" expected\n            if spot is there {share} of the time{source},"
            f" at most ${mix.most_usd:,.2f}; {net}"
        )
    return tuple(lines)


def _search_line(answer: Answer, seconds: float) -> str:
    unit = "$" if answer.goal == "cost" else "s"
    return (
        f"search      {seconds:.3f} s, {answer.evaluations} plans judged\n"
        f"bound       {answer.lower_bound:.4g} {unit} over the searched space"
        f" ({answer.space}); gap {answer.gap or 0:.1%}"
        + (f"\n            {answer.note}" if answer.note else "")
        + "".join(f"\ntried       {gain}" for gain in answer.gains)
        + _tied_line(answer)
    )


def _tied_line(answer: Answer) -> str:
    """What the plan cannot be told apart from: the best by estimate, or else the next best."""
    if answer.instead_of is not None:
        return f"\npreferred   {answer.instead_of} (--prefer fastest takes that plan)"
    tied = next((one for one in answer.rejected if one.is_tied), None)
    if tied is None or tied.loses is None or tied.error is None:
        return ""
    better = "cheaper" if answer.goal == "cost" else "faster"
    share = 1 - 1 / (1 + tied.loses)
    return (
        f"\nnext best   {share:.1%} {better} than {tied.family}, ±{tied.error:.1%}:"
        " cannot be told apart"
    )


def _run_baseline(question: Question, name: str, mode: Mode) -> _Found | list[Problem]:
    started = time.perf_counter()
    entry = _enter(question, name, mode)
    other = None if entry.plan is not None else asked_with_spot_first(question)
    if other is not None:
        entry = _enter(other, name, mode)
    seconds = time.perf_counter() - started
    plan, estimate = entry.plan, entry.estimate
    if plan is None or estimate is None:
        return [_why_none(entry)]
    if other is not None:
        estimate = replace(estimate, notes=(*estimate.notes, SPOT_FIRST))
        entry = replace(entry, estimate=estimate)
    document = entry.to_json(seconds=seconds, goal=question.job.objective.goal)
    own = ""
    if entry.own_seconds is not None:
        own = f"; its own estimate {entry.own_seconds:.4g} s ({entry.own_error:+.0%})"
    counts = rejected_text(entry)
    taken = f"rejected {counts}" if counts else "its first plan"
    line = f"search      {seconds:.3f} s by {name}, {taken}{own}"
    return _Found(plan, estimate, document, (line,), other is not None)


def _enter(question: Question, name: str, mode: Mode) -> JudgedPlanner:
    judge, left = judge_of(question), question.seconds_left
    return judge_entry(baseline(name), case_of(question), mode, judge, left)


def _why_none(entry: JudgedPlanner) -> Problem:
    counts = rejected_text(entry)
    proposed = f"rejected {counts}" if counts else "it proposed no plan"
    return Problem(entry.planner, f"{entry.why_not} ({proposed})", "try another planner")
