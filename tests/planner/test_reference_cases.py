"""The published planner's cases: never worse than its answer, and close to the best known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.planners import question_of
from planner.api import plan_job
from simulator.api import load_measurements
from simulator.hardware.catalogue import load_catalogue

QUICK = ("fig7-opt-32", "fig7-opt-128", "fig8a-opt-32+32", "opt-1", "opt-a100-2", "opt-gh-64")
"""Cases that are tried with the default number of examples; with more, all are."""


@pytest.mark.sim
def test_plans_are_as_good_as_the_best_known(reference: Path, examples: int) -> None:
    document = json.loads((reference / "planner_cases.json").read_text(encoding="utf-8"))
    measurements = load_measurements(reference, catalogue=load_catalogue())
    for case in document["cases"]:
        if examples <= 50 and case["name"] not in QUICK:
            continue
        answer = plan_job(question_of(case, document, measurements, estimator="paper"))
        assert answer.objective is not None, case["name"]
        costs = case["objective"] == "iteration_cost"
        published = case["sailor_cost_per_iter"] if costs else case["sailor_iter_time_s"]
        known = case["best_known_cost_usd"] if costs else case["best_known_iter_time_s"]
        if published is not None:
            assert answer.objective <= published * (1 + 1e-9), case["name"]
        assert answer.objective <= 1.02 * known, case["name"]
        # The bound never exceeds a known plan (rounded to six digits).
        assert answer.lower_bound <= known * (1 + 1e-5), case["name"]
