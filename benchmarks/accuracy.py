"""Predicted against measured, per campaign and estimator; and how much of it is fitted.

    python -m benchmarks.accuracy --cases FILE --profiles DIR [--estimators event,paper]
    python -m benchmarks.accuracy --cases FILE --profiles DIR --messaging buffered
    python -m benchmarks.accuracy --cases FILE --profiles DIR --leave-one-out

The second form shows what the errors would be if the runtime exchanged tensors in another way. The
third refits the constants of the GH200 platform for every run of it, on a grid and from
the other runs alone, and shows what they then say about the run left out.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast, get_args

from simulator.api import ESTIMATORS, Measurements, load_measurements
from simulator.documents.files import Document, load_document
from simulator.documents.problems import InputError
from simulator.hardware import runtime_constants
from simulator.hardware.catalogue import load_catalogue
from simulator.hardware.runtime_constants import Platform
from simulator.validate_runs import Comparison, validate

REFITTED = "GH-96"
RUNTIME = "megatron-deepspeed"
CAMPAIGN = "clariden"
# Steps that a person would try; the fit starts in the middle of each, not at today's constants.
GRID: Mapping[str, tuple[float, ...]] = {
    "message_s": (0.0, 0.5e-3, 1e-3, 1.5e-3, 2e-3, 3e-3),
    "load_s": (0.0, 2e-3, 4e-3, 6e-3, 8e-3),
    "iteration_s": (0.0, 10e-3, 20e-3, 40e-3),
    "profiled_hook_s": (0.0, 0.15e-3, 0.3e-3, 0.45e-3),
    "ring_efficiency": (0.3, 0.5, 0.7, 1.0),
}
Point = tuple[float, ...]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare predictions with measured runs.")
    parser.add_argument("--cases", type=Path, metavar="FILE")
    parser.add_argument("--profiles", type=Path, metavar="DIR")
    parser.add_argument("--estimators", default=",".join(ESTIMATORS))
    parser.add_argument("--leave-one-out", action="store_true")
    parser.add_argument(
        "--messaging",
        choices=get_args(runtime_constants.Messaging),
        help="how the runtime of the runs is taken to exchange tensors",
    )
    options = parser.parse_args(arguments)
    if options.cases is None or options.profiles is None:
        print("Nothing compared: give measured runs with --cases and their --profiles.")
        return 0
    if options.messaging is not None:
        runtimes = cast(dict[str, runtime_constants.Runtime], runtime_constants.RUNTIMES)
        runtimes[RUNTIME] = replace(runtimes[RUNTIME], messaging=options.messaging)
    try:
        runs = Runs(options.cases, options.profiles)
        if options.leave_one_out:
            leave_one_out(runs)
        else:
            compare(runs, options.estimators.split(","))
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


class Runs:
    """Measured runs with the profiles that they need, read once."""

    def __init__(self, cases: Path, profiles: Path) -> None:
        document = load_document(cases)
        self.raw: dict[str, Any] = document.data
        self.name = document.name
        self.catalogue = load_catalogue()
        self.measurements: Measurements = load_measurements(profiles, catalogue=self.catalogue)

    def campaigns(self, estimator: str, *, only: str | None = None) -> dict[str, list[Comparison]]:
        """The comparisons of each campaign; a run that cannot be estimated stops everything."""
        raw = dict(self.raw)
        if only is not None:
            raw["cases"] = [case for case in self.raw["cases"] if case["source"] == only]
        report = validate(
            Document(self.name, raw),
            measurements=self.measurements,
            catalogue=self.catalogue,
            estimator_name=estimator,
        )
        for case, reason in report.failures:
            print(f"could not estimate {case}: {reason}", file=sys.stderr)
        return report.by_source()


# -- the table of campaigns -------------------------------------------------------------------


def compare(runs: Runs, estimators: Sequence[str]) -> None:
    """Print one line per campaign and estimator, then every run."""
    print("Absolute error in per cent: mean, median and largest.\n")
    print("| estimator | campaign | runs | time mean | median | max | memory mean | median | max |")
    print("|---|---|---|---|---|---|---|---|---|")
    lines = []
    for name in estimators:
        for campaign, found in runs.campaigns(name).items():
            times = [c.time_error_pct for c in found if c.time_error_pct is not None]
            memories = [c.memory_error_pct for c in found if c.memory_error_pct is not None]
            print(
                f"| {name} | {campaign} | {len(found)} | {_summary(times)} | {_summary(memories)} |"
            )
            lines += [(name, c) for c in found]
    print("\n| estimator | run | time measured s | predicted s | error | memory error |")
    print("|---|---|---|---|---|---|")
    for name, run in lines:
        measured = "-" if run.time_measured_s is None else f"{run.time_measured_s:.3f}"
        print(
            f"| {name} | {run.case} | {measured} | {run.time_predicted_s:.3f} "
            f"| {_format_signed(run.time_error_pct)} | {_format_signed(run.memory_error_pct)} |"
        )


def _summary(errors: Sequence[float]) -> str:
    if not errors:
        return "- | - | -"
    sizes = [abs(error) for error in errors]
    return " | ".join(
        f"{value:.1f}" for value in (statistics.fmean(sizes), statistics.median(sizes), max(sizes))
    )


def _format_signed(error: float | None) -> str:
    return "-" if error is None else f"{error:+.1f} %"


# -- how much is fitted -----------------------------------------------------------------------


def leave_one_out(runs: Runs) -> None:
    """Refit the platform without each run in turn, and print what it then says of that run."""
    tried: dict[Point, dict[str, float]] = {}

    def errors_at(point: Point) -> dict[str, float]:
        if point not in tried:
            tried[point] = _time_errors(runs, dict(zip(GRID, point, strict=True)))
        return tried[point]

    today = _time_errors(runs, {})
    if len(today) < 3:
        print(f"There are {len(today)} runs on {REFITTED}: too few to leave one out.")
        return
    print(f"| run left out | {' | '.join(GRID)} | error unseen | error today |")
    print("|---" * (len(GRID) + 3) + "|")
    unseen = {}
    for case in today:
        point = _fit(errors_at, [other for other in today if other != case])
        unseen[case] = errors_at(point)[case]
        print(f"| {case} | {' | '.join(f'{value:g}' for value in point)} "
              f"| {unseen[case]:+.1f} % | {today[case]:+.1f} % |")  # fmt: skip
    for what, errors in (("unseen", unseen), ("with today's constants", today)):
        print(f"\nmean | median | max, {what}: {_summary(list(errors.values()))}", end="")
    print(f"\n\n{len(tried)} points of the grid were tried.")


def _fit(errors_at: Any, cases: Sequence[str]) -> Point:
    """Move one constant at a time along its grid until the mean error no longer falls."""

    def loss(point: Point) -> float:
        errors = errors_at(point)
        return statistics.fmean(abs(errors[case]) for case in cases)

    best = tuple(steps[len(steps) // 2] for steps in GRID.values())
    while True:
        before = best
        for index, steps in enumerate(GRID.values()):
            best = min(
                ((*best[:index], step, *best[index + 1 :]) for step in steps),
                key=lambda point: (loss(point), point),
            )
        if best == before:
            return best


def _time_errors(runs: Runs, constants: Mapping[str, float]) -> dict[str, float]:
    """Time errors of the campaign with some constants of its platform replaced for a moment."""
    table = cast(dict[str, Platform], runtime_constants.PLATFORMS)
    kept = table[REFITTED]
    table[REFITTED] = replace(kept, **constants)  # type: ignore[arg-type]  # all are floats
    try:
        found = runs.campaigns("event", only=CAMPAIGN).get(CAMPAIGN, [])
    finally:
        table[REFITTED] = kept
    return {c.case: c.time_error_pct for c in found if c.time_error_pct is not None}


if __name__ == "__main__":
    raise SystemExit(main())
