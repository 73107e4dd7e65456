"""Compares predictions with measured runs, run by run and in total."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from simulator.api import Measurements, estimator
from simulator.cluster.cluster import Cluster
from simulator.documents.files import Document
from simulator.documents.problems import InputError, Problem, Problems
from simulator.estimate.difference import are_told_apart, difference_error
from simulator.estimate.result import Estimate
from simulator.hardware.catalogue import Catalogue
from simulator.inputs.plan_check import check_plan
from simulator.layer_costs.profile import Profile
from simulator.published_cases import PublishedCase
from simulator.run_file import MeasuredRun, read_run
from simulator.spec.plan import Plan


@dataclass(frozen=True, slots=True)
class Comparison:
    """One run: measured and predicted values, and the provenance of the prediction."""

    case: str
    source: str
    group: object
    """Equal for runs of the same model and batch on the same GPUs, whose plans compete."""
    time_measured_s: float | None
    time_predicted_s: float
    memory_measured_bytes: float | None
    memory_predicted_bytes: float
    error_bar: float
    provenance: str
    notes: tuple[str, ...]
    plan: Plan

    @property
    def time_error_pct(self) -> float | None:
        return _error_pct(self.time_predicted_s, self.time_measured_s)

    @property
    def is_inside(self) -> bool | None:
        """Whether the measured time lies within the error bar of the predicted one."""
        error = self.time_error_pct
        return None if error is None else abs(error) <= 100 * self.error_bar

    @property
    def memory_error_pct(self) -> float | None:
        return _error_pct(self.memory_predicted_bytes, self.memory_measured_bytes)


def _error_pct(predicted: float, measured: float | None) -> float | None:
    return None if measured is None else 100 * (predicted / measured - 1)


@dataclass(frozen=True, slots=True)
class ValidationReport:
    """Comparisons, runs that could not be estimated with the reason, unmeasured runs, and notes."""

    comparisons: tuple[Comparison, ...]
    failures: tuple[tuple[str, str], ...]
    unmeasured: tuple[str, ...] = ()
    """Runs without a valid measurement, which are not estimated."""
    notes: tuple[tuple[str, str], ...] = ()
    """By run, what the file states and the estimate does not use, or what it assumes."""

    def to_json(self) -> dict[str, Any]:
        """Return the JSON of ``sailorctl validate --json``."""
        memory = (
            (c.case, c.memory_measured_bytes, c.memory_predicted_bytes) for c in self.comparisons
        )
        return {
            "sources": {name: source_summary(runs) for name, runs in self.by_source().items()},
            "runs": [
                {
                    "id": c.case,
                    "predicted_s": c.time_predicted_s,
                    "measured_s": c.time_measured_s,
                    "error_bar": c.error_bar,
                    "inside_error_bar": c.is_inside,
                }
                for c in self.comparisons
            ],
            "time": _summary(
                (c.case, c.time_measured_s, c.time_predicted_s) for c in self.comparisons
            ),
            "memory": _summary(memory),
            "failures": [{"id": case, "reason": reason} for case, reason in self.failures],
            "unmeasured": list(self.unmeasured),
            "notes": [{"id": case, "note": note} for case, note in self.notes],
        }

    def by_source(self) -> dict[str, list[Comparison]]:
        """Return the comparisons of each measurement campaign."""
        found: dict[str, list[Comparison]] = {}
        for comparison in self.comparisons:
            found.setdefault(comparison.source, []).append(comparison)
        return found


def _summary(cases: Iterable[tuple[str, float | None, float]]) -> dict[str, Any]:
    known = [(case, m, predicted) for case, m, predicted in cases if m is not None]
    errors = [abs(predicted / measured - 1) * 100 for _, measured, predicted in known]
    return {
        "mean_abs_pct": statistics.fmean(errors) if errors else None,
        "median_abs_pct": statistics.median(errors) if errors else None,
        "max_abs_pct": max(errors) if errors else None,
        "cases": [
            {"id": case, "measured": m, "predicted": predicted} for case, m, predicted in known
        ],
    }


# -- how well plans are ordered --------------------------------------------------------------------


def source_summary(runs: Sequence[Comparison]) -> dict[str, Any]:
    """Return the figures of a campaign: errors in time, and how well plans are ordered."""
    errors = [c.time_error_pct for c in runs if c.time_error_pct is not None]
    return {
        "n": len(errors),
        "mean_abs_pct": statistics.fmean(map(abs, errors)) if errors else None,
        "median_abs_pct": statistics.median(map(abs, errors)) if errors else None,
        "max_abs_pct": max(map(abs, errors), default=None),
        "bias_pct": statistics.fmean(errors) if errors else None,
        "inside_error_bars": _share([run.is_inside for run in runs if run.is_inside is not None]),
        **order_figures(runs),
    }


def order_figures(runs: Iterable[Comparison]) -> dict[str, float | None]:
    """Return how well the predictions order the plans of each group, and what choosing costs.

    ``rank_correlation`` is Spearman's, the mean of the groups of three runs or more weighted by
    their size. ``pairs_right`` is the share of pairs inside groups that are ordered as measured.
    ``pairs_apart`` is the share of pairs whose predictions can be told apart, ``apart_right`` the
    share of these, and ``tied_right`` that of the others, that are ordered as measured.
    The regret of a group is the measured time of the plan predicted to be fastest over the least.
    """
    correlations, weights, regrets = [], [], []
    by_apart: dict[bool, list[bool]] = {True: [], False: []}
    for group in _groups(runs):
        measured = [run.time_measured_s or 0.0 for run in group]
        predicted = [run.time_predicted_s for run in group]
        if len(measured) > 2:
            correlations.append(rank_correlation(measured, predicted))
            weights.append(len(measured))
        for a, b in combinations(range(len(group)), 2):
            if measured[a] != measured[b]:
                is_right = (measured[a] - measured[b]) * (predicted[a] - predicted[b]) > 0
                by_apart[_are_told_apart(group[a], group[b])].append(is_right)
        if len(measured) > 1:
            regrets.append(measured[predicted.index(min(predicted))] / min(measured))
    return {
        "rank_correlation": statistics.fmean(correlations, weights) if correlations else None,
        "pairs_right": _share([*by_apart[True], *by_apart[False]]),
        "pairs_apart": _share([True] * len(by_apart[True]) + [False] * len(by_apart[False])),
        "apart_right": _share(by_apart[True]),
        "tied_right": _share(by_apart[False]),
        "regret_mean": statistics.fmean(regrets) if regrets else None,
        "regret_max": max(regrets, default=None),
    }


def _share(answers: Sequence[bool]) -> float | None:
    return statistics.fmean(answers) if answers else None


def _are_told_apart(one: Comparison, other: Comparison) -> bool:
    error = difference_error(
        one.plan, other.plan, one_error=one.error_bar, other_error=other.error_bar
    )
    return are_told_apart(one.time_predicted_s, other.time_predicted_s, error)


def _groups(runs: Iterable[Comparison]) -> Iterable[list[Comparison]]:
    """The measured runs of each group."""
    found: dict[object, list[Comparison]] = {}
    for run in runs:
        if run.time_measured_s is not None:
            found.setdefault(run.group, []).append(run)
    return found.values()


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Return Spearman's rank correlation; 0 if one of the two is constant."""
    a, b = (_ranks(values) for values in (one, other))
    spread = float(np.std(a) * np.std(b))
    return float(np.mean((a - a.mean()) * (b - b.mean()))) / spread if spread else 0.0


def _ranks(values: Sequence[float]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return ranks; equal values share the mean of theirs."""
    _, number, count = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2.0)[number]


# -- predict ---------------------------------------------------------------------------------------


def validate(
    document: Document,
    *,
    measurements: Measurements,
    catalogue: Catalogue,
    estimator_name: str = "event",
) -> ValidationReport:
    """Estimate every run of a file that has a valid measurement."""
    found = [key for key in ("runs", "cases") if key in document.data]
    runs = document.data[found[0]] if len(found) == 1 else None
    if not isinstance(runs, list) or not runs:
        raise InputError(
            Problem(
                f"{document.name}: runs", "must be a list of measured runs", "see docs/formats.md"
            )
        )
    profiles: dict[str, Profile] = {}
    comparisons, failures, unmeasured, notes = [], [], [], []
    for index, raw in enumerate(runs):
        where = f"{document.name}: {found[0]}[{index}]"
        name = str(raw.get("id", where)) if isinstance(raw, dict) else where
        try:
            if found[0] == "runs":
                run = read_run(raw, where, document.folder, catalogue)
            else:
                run = _read_published(
                    PublishedCase.read(raw, where), profiles, measurements, catalogue
                )
            notes += [(name, note) for note in run.notes]
            if run.time_s is None and run.memory_bytes is None:
                unmeasured.append(name)
                continue
            comparisons.append(_compare(run, measurements, estimator_name))
        except InputError as error:
            failures.append((name, str(error)))
    return ValidationReport(tuple(comparisons), tuple(failures), tuple(unmeasured), tuple(notes))


def _read_published(
    case: PublishedCase,
    profiles: dict[str, Profile],
    measurements: Measurements,
    catalogue: Catalogue,
) -> MeasuredRun:
    if case.model not in profiles:
        profiles[case.model] = measurements.profile(case.model, catalogue=catalogue)
    return MeasuredRun(
        case.identifier,
        case.source,
        case.job(profiles[case.model]),
        case.cluster(catalogue),
        case.plan(catalogue),
        case.time_s,
        case.memory_bytes,
        case.notes,
    )


def _compare(run: MeasuredRun, measurements: Measurements, estimator_name: str) -> Comparison:
    job, cluster = run.job, run.cluster
    Problems(list(check_plan(run.plan, job, cluster, place="plan"))).raise_if_any()
    judge = estimator(estimator_name, job=job, cluster=cluster, measurements=measurements)
    estimate = judge.estimate(run.plan)
    return Comparison(
        case=run.identifier,
        source=run.source,
        group=(run.source, job.model.fingerprint, job.sequence, job.global_batch, _gpus(cluster)),
        time_measured_s=run.time_s,
        time_predicted_s=estimate.iteration_s,
        memory_measured_bytes=run.memory_bytes,
        memory_predicted_bytes=_fullest(estimate),
        error_bar=estimate.provenance.relative_error,
        provenance=estimate.provenance.source,
        notes=(*run.notes, *estimate.notes, *estimate.provenance.notes),
        plan=run.plan,
    )


def _gpus(cluster: Cluster) -> tuple[tuple[str, str, int], ...]:
    return tuple(sorted((pool.zone, pool.machine, pool.gpus) for pool in cluster.pools))


def _fullest(estimate: Estimate) -> float:
    return max(device.total for pipeline in estimate.memory for device in pipeline)
