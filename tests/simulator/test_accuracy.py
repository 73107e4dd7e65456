"""Predictions for the published runs stay within the documented errors."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from simulator.api import load_measurements
from simulator.documents.files import load_document
from simulator.hardware.catalogue import load_catalogue
from simulator.validate_runs import Comparison, validate

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def campaigns(reference: Path) -> dict[str, list[Comparison]]:
    """Every measured run with its prediction by the event estimator."""
    catalogue = load_catalogue()
    document = load_document(reference / "validation.json")
    report = validate(
        document,
        measurements=load_measurements(reference, catalogue=catalogue),
        catalogue=catalogue,
    )
    assert report.failures == ()
    return report.by_source()


def time_errors(comparisons: Iterable[Comparison]) -> list[float]:
    return [abs(c.time_error_pct) for c in comparisons if c.time_error_pct is not None]


def memory_errors(comparisons: Iterable[Comparison]) -> list[float]:
    return [abs(c.memory_error_pct) for c in comparisons if c.memory_error_pct is not None]


def test_iteration_time_on_gh200(campaigns: dict[str, list[Comparison]]) -> None:
    errors = time_errors(campaigns["clariden"])
    assert len(errors) >= 8
    assert statistics.fmean(errors) <= 5


def test_iteration_time_on_rtx(campaigns: dict[str, list[Comparison]]) -> None:
    errors = time_errors([*campaigns["mit"], *campaigns["mit_v1"]])
    assert len(errors) >= 8
    assert statistics.fmean(errors) <= 4


def test_peak_memory(campaigns: dict[str, list[Comparison]]) -> None:
    errors = memory_errors(c for found in campaigns.values() for c in found)
    assert len(errors) >= 13
    assert statistics.fmean(errors) <= 2
    assert max(errors) <= 6


def test_flags_of_a_profile_are_quoted(campaigns: dict[str, list[Comparison]]) -> None:
    """The worst run uses timings that their authors flag, and its estimate has the note."""
    worst = max(campaigns["clariden"], key=lambda c: abs(c.time_error_pct or 0))
    assert worst.case == "clariden/OPT-350/N2_D2"
    assert any("hand edited" in note for note in worst.notes), worst.notes


@pytest.mark.parametrize("program", ["accuracy", "calibrate"])
def test_program_without_measurements_says_what_it_needs(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{program}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "--profiles" in done.stdout


def test_document_shows_what_its_program_prints(reference: Path) -> None:
    printed = subprocess.run(
        [
            sys.executable,
            "-m",
            "benchmarks.accuracy",
            "--cases",
            str(reference / "validation.json"),
            "--profiles",
            str(reference),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    document = (ROOT / "docs/accuracy.md").read_text(encoding="utf-8")
    head, *lines = printed.split("\n\n")[1].splitlines()
    assert head in document
    for line in lines:
        assert line in document, "the table in docs/accuracy.md is of another day"
