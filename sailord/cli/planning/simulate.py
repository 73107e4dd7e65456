"""The commands ``simulate`` and ``validate``: estimate a plan; check the simulator's accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from sailord.cli.planning.estimate_text import estimate_text, validation_text
from sailord.cli.shared.described_job import JobFile, takes_script
from sailord.cli.shared.exit_codes import DOES_NOT_FIT, FAILED
from sailord.cli.shared.inputs import ESTIMATOR, PROFILES, check_outputs, load_all
from sailord.cli.shared.options import FILE, JSON, show
from sailord.plots.plan import write_plot
from sailord.plots.timeline import write_timeline
from sailord.text.units import counted
from simulator.api import ESTIMATORS, Estimator, estimator, load_measurements
from simulator.documents.files import load_document
from simulator.documents.problems import InputError, Problem, Problems
from simulator.estimate.event_estimator import EventEstimator
from simulator.estimate.memory_advice import MemoryShortage
from simulator.estimate.result import Estimate
from simulator.hardware.catalogue import load_catalogue
from simulator.inputs.plan_check import check_plan
from simulator.inputs.plan_file import complete_plan
from simulator.spec.plan import Plan
from simulator.validate_runs import ValidationReport
from simulator.validate_runs import validate as validate_cases

SHORTAGES_SHOWN_MAX = 6


@click.command()
@click.argument("plan", type=FILE)
@click.argument("job", type=FILE)
@click.argument("cluster", type=FILE)
@takes_script
@PROFILES
@ESTIMATOR
@click.option(
    "--timeline",
    type=FILE,
    metavar="FILE",
    help="Write one iteration as a trace for ui.perfetto.dev.",
)
@click.option("--plot", type=FILE, metavar="FILE", help="Draw the plan as .svg or .png.")
@JSON
def simulate(
    plan: Path,
    job: JobFile,
    cluster: Path,
    profiles: Path | None,
    estimator_name: str,
    timeline: Path | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Estimate the time, memory and cost of PLAN for JOB on CLUSTER.

    Exits with 3 if the plan does not fit the memory of its devices.
    """
    check_outputs((timeline, plot), (plan, job.path, cluster))
    the_job, the_cluster, the_plan = load_all(job, cluster, plan)
    the_plan = complete_plan(the_plan, the_cluster)
    Problems(list(check_plan(the_plan, the_job, the_cluster, place=plan.name))).raise_if_any()
    measurements = load_measurements(profiles, catalogue=the_cluster.catalogue)
    judge = estimator(estimator_name, job=the_job, cluster=the_cluster, measurements=measurements)
    estimate = judge.estimate(the_plan)
    shortages: tuple[MemoryShortage, ...] = ()
    if not estimate.fits and isinstance(judge, EventEstimator):
        shortages = judge.memory_shortages(the_plan)
    if timeline is not None or plot is not None:
        _draw(the_plan, judge, estimate, timeline=timeline, picture=plot)
    document = estimate.to_json() | {
        "gpus_used": the_plan.gpus_used(),
        "misfits": [str(shortage) for shortage in shortages],
    }
    show(document, as_json, lambda _: estimate_text(the_plan, the_job, estimate))
    for shortage in shortages[:SHORTAGES_SHOWN_MAX]:
        click.echo(f"does not fit: {shortage}", err=True)
    if len(shortages) > SHORTAGES_SHOWN_MAX:
        rest = len(shortages) - SHORTAGES_SHOWN_MAX
        click.echo(f"does not fit: {rest} more kinds of device groups (--json has all)", err=True)
    if not estimate.fits:
        raise SystemExit(DOES_NOT_FIT)


def _draw(
    plan: Plan,
    judge: Estimator,
    estimate: Estimate,
    *,
    timeline: Path | None,
    picture: Path | None,
) -> None:
    """Write the timeline and the picture, if asked for."""
    if timeline is not None:
        if not isinstance(judge, EventEstimator):
            what = f"the estimator {judge.name} has no schedule"
            raise InputError(Problem("--timeline", what, "use --estimator event"))
        write_timeline(plan, judge, timeline)
    if picture is not None:
        write_plot(plan, estimate, judge, picture)


@click.command()
@click.argument("cases", type=FILE)
@PROFILES
@ESTIMATOR
@click.option(
    "--catalogue",
    type=FILE,
    metavar="FILE",
    help="Your own facts, merged over the built-in catalogue.",
)
@JSON
def validate(
    cases: Path,
    profiles: Path | None,
    estimator_name: str,
    catalogue: Path | None,
    as_json: bool,
) -> None:
    """Compare predictions with measured runs.

    Prints the errors of each case and, by source, their means, how well plans are ordered and how
    many lie inside their error bars. Exits with 0 if every case with a valid measurement could be
    estimated, whatever the error, and there is one.
    """
    if estimator_name not in ESTIMATORS:
        known = ", ".join(ESTIMATORS)
        raise InputError(Problem("--estimator", f'"{estimator_name}" is not known', f"try {known}"))
    facts = load_catalogue(catalogue)
    document = load_document(cases)
    result = validate_cases(
        document,
        measurements=load_measurements(profiles, catalogue=facts),
        catalogue=facts,
        estimator_name=estimator_name,
    )
    show(result.to_json(), as_json, lambda _: validation_text(result, estimator_name))
    tell_report(result)
    if result.failures or not result.comparisons:
        raise SystemExit(FAILED)


def tell_report(report: ValidationReport) -> None:
    """Say on stderr what was not compared, and what of the file was not used."""
    by_note: dict[str, list[str]] = {}
    for case, note in report.notes:
        by_note.setdefault(note, []).append(case)
    for note, cases in by_note.items():
        click.echo(f"note: {_name_first(cases)}: {note}", err=True)
    if report.unmeasured:
        what = "not compared, for want of a valid measurement"
        click.echo(f"note: {_name_first(report.unmeasured)}: {what}", err=True)
    for case, reason in report.failures:
        click.echo(f"error: {case}: {reason}", err=True)
    if not report.comparisons and not report.failures:
        click.echo("error: no run has a valid measurement; see docs/formats.md", err=True)


def _name_first(cases: Sequence[str]) -> str:
    rest = len(cases) - 1
    return cases[0] + (f" and {counted(rest, 'other')}" if rest else "")
