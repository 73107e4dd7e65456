"""Compare predictions with published runs of other systems, and refit what was fitted on them.

    python -m benchmarks.other_systems --runs FILE --catalogue FILE

prints the table of docs/accuracy.md, and then what the constants that were fitted on the runs on T4
say of runs that they have not seen: each TP degree and each pipeline depth is left out in turn.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast
from unittest import mock

from simulator.api import Measurements
from simulator.documents.files import Document, load_document
from simulator.hardware import runtime_constants
from simulator.hardware.catalogue import Catalogue, load_catalogue
from simulator.layer_costs import roofline
from simulator.validate_runs import ValidationReport, validate

GPU = "T4"
PAIRS = ("rank_correlation", "pairs_right", "pairs_apart", "apart_right", "tied_right")
STEPS = (0.2, 0.1)
"""Steps of the refit, as logarithms."""


@dataclass(frozen=True, slots=True)
class Constants:
    """What was fitted on the runs on T4."""

    compute_share: float
    iteration_s: float
    message_s: float
    ring_efficiency: float
    ring_bytes_per_s: float
    step_s: float


def today(catalogue: Catalogue) -> Constants:
    """Return the constants that Sailor uses."""
    platform = runtime_constants.platform_of(GPU)
    link = catalogue.machines_for(GPU)[0].intra_link
    return Constants(
        roofline.half_precision()[GPU].compute_share,
        platform.iteration_s,
        platform.message_s,
        platform.ring_efficiency,
        link.ring_bytes_per_s,
        link.step_s,
    )


def predicted(runs: Sequence[Any], catalogue: Catalogue, constants: Constants) -> ValidationReport:
    """Predict runs with other constants."""
    shares = dict(roofline.half_precision())
    shares[GPU] = replace(shares[GPU], compute_share=constants.compute_share)
    platforms = dict(runtime_constants.PLATFORMS)
    platforms[GPU] = replace(
        platforms[GPU],
        iteration_s=constants.iteration_s,
        message_s=constants.message_s,
        ring_efficiency=constants.ring_efficiency,
    )
    machines = {
        name: machine
        if machine.gpu != GPU
        else replace(
            machine,
            intra_link=replace(
                machine.intra_link,
                ring_bytes_per_s=constants.ring_bytes_per_s,
                step_s=constants.step_s,
            ),
        )
        for name, machine in catalogue.machines.items()
    }
    with (
        mock.patch.object(roofline, "half_precision", return_value=shares),
        mock.patch.object(runtime_constants, "PLATFORMS", platforms),
    ):
        return validate(
            Document("runs", {"runs": list(runs)}),
            measurements=Measurements(),
            catalogue=replace(catalogue, machines=machines),
        )


def refit(runs: Sequence[Any], catalogue: Catalogue, start: Constants) -> Constants:
    """Move one constant at a time until the squared logarithms of the errors no longer fall."""

    def loss(constants: Constants) -> float:
        pairs = predicted(runs, catalogue, constants).to_json()["runs"]
        return sum(math.log(run["predicted_s"] / run["measured_s"]) ** 2 for run in pairs)

    best, least = start, loss(start)
    for step in STEPS:
        before = math.inf
        while least < before:
            before = least
            for name in Constants.__dataclass_fields__:
                for factor in (math.exp(step), math.exp(-step)):
                    moved = replace(best, **{name: getattr(best, name) * factor})
                    found = loss(moved)
                    if found < least:
                        best, least = moved, found
    return best


def row(name: str, figures: dict[str, Any]) -> str:
    """Return a line of a table."""
    errors = [f"{figures[key]:.1f} %" for key in ("mean_abs_pct", "median_abs_pct", "max_abs_pct")]
    order = [
        "-" if figures[key] is None else f"{figures[key]:.3f}" for key in (*PAIRS, "regret_max")
    ]
    cells = [name, str(figures["n"]), *errors, f"{figures['bias_pct']:+.1f} %", *order]
    return f"| {' | '.join(cells)} |"


def left_out(
    runs: Sequence[Any], catalogue: Catalogue, what: str, part: Callable[[Any], int]
) -> None:
    """Refit without each value of ``part`` in turn, and print what is then said of it."""
    start = today(catalogue)
    for value in sorted({part(run) for run in runs}):
        constants = refit([run for run in runs if part(run) != value], catalogue, start)
        unseen = predicted([run for run in runs if part(run) == value], catalogue, constants)
        (figures,) = unseen.to_json()["sources"].values()
        print(row(f"without {what} {value}", figures), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, metavar="FILE")
    parser.add_argument("--catalogue", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.runs is None:
        print("Nothing compared: name a file of published runs with --runs FILE.")
        return
    catalogue = load_catalogue(options.catalogue)
    runs = cast(list[Any], load_document(options.runs).data["runs"])
    report = predicted(runs, catalogue, today(catalogue))
    order = (
        "rank correlation | pairs right | told apart | of these right | of others right | regret"
    )
    print(f"| source | runs | mean | median | max | bias | {order} |")
    print("|---" * 12 + "|")
    for name, figures in report.to_json()["sources"].items():
        print(row(name, figures))
    inside = [
        abs(run["predicted_s"] / run["measured_s"] - 1) <= run["error_bar"]
        for run in report.to_json()["runs"]
    ]
    print(f"\n{sum(inside)} of {len(inside)} runs lie inside their error bars.\n")
    ours = [run for run in runs if run["cluster"]["pool"][0]["gpu"] == GPU]
    left_out(ours, catalogue, "TP", lambda run: _first(run)["stages"][0]["tp"])
    left_out(ours, catalogue, "depth", lambda run: len(_first(run)["stages"]))


def _first(run: Any) -> Any:
    return run["plan"]["pipelines"][0]


if __name__ == "__main__":
    main()
