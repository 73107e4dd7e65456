"""The planner on the reference cases: ours against the published answers and the best known.

Run ``python -m benchmarks.planners FOLDER`` with the folder that holds ``planner_cases.json``,
its profiles and ``network.json``; ``--budget N`` searches longer, ``--estimator event`` plans
for the event estimator, where the published plans are judged by it too, and ``--prefer simple``
takes the cheaper and simpler of those that cannot be told apart, and says what that gives away.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from planner.api import plan_job
from planner.problem.question import Answer, Question, read_ahead
from sailord.text.table import table
from simulator.api import Measurements, estimator, load_measurements
from simulator.cluster.cluster import Cluster, Pool
from simulator.hardware.catalogue import load_catalogue
from simulator.models.presets import preset
from simulator.spec.job import Job, Objective
from simulator.spec.plan import Pipeline, Place, Plan, Stage

PRESETS = {"OPT-350": "opt-350m", "GPT-Neo-2.7": "gpt-neo-2.7b"}


def question_of(
    case: dict[str, Any], document: dict[str, Any], measurements: Measurements, **options: Any
) -> Question:
    """A reference case as a question to the planner."""
    prices = document["prices_usd_per_gpu_hour"]
    limits = case["constraint"] or {}
    pools = tuple(
        Pool(
            zone=pool["zone"],
            gpu=pool["type"],
            machine=f"{pool['type']}x4",
            gpus_per_machine=4,
            gpus=pool["count"],
            price_usd_per_gpu_hour=prices[pool["type"]],
            price_source="cluster file",
        )
        for pool in case["cluster"]
    )
    job = Job(
        case["name"],
        preset(PRESETS[case["model"]]),
        global_batch=case["gbs"],
        sequence=document["sequence_length"],
        profile=case["model"],
        precision="fp32",
        optimizer="adam",
        max_tp=max(document["allowed_tp"]),
        objective=Objective(
            goal="cost" if case["objective"] == "iteration_cost" else "throughput",
            max_usd_per_iteration=limits.get("max_cost"),
            min_iterations_per_s=limits.get("min_throughput"),
        ),
    )
    catalogue = load_catalogue()
    ready = read_ahead(measurements, job, catalogue)
    return Question(job, Cluster(pools, catalogue), ready, **options)


def published_plan(case: dict[str, Any]) -> Plan | None:
    """The published planner's answer, with the batch met exactly."""
    chosen = case["sailor_plan"]
    if chosen is None:
        return None
    columns: list[list[Stage]] = []
    first = 0
    for row in chosen["stages"]:
        column: list[Stage] = []
        for name, count in row["replicas"].items():
            pool, tp = name.split("/tp")
            gpu, zone = pool.split("@")
            stage = Stage((first, first + row["layers"]), int(tp), (Place(gpu, f"{gpu}x4", zone),))
            column += [stage] * count
        columns.append(column)
        first += row["layers"]
    fewest, longer = divmod(case["gbs"] // chosen["mbs"], chosen["dp"])
    return Plan(
        chosen["mbs"],
        tuple(
            Pipeline(fewest + (index < longer), stages)
            for index, stages in enumerate(zip(*columns, strict=True))
        ),
    )


def row_of(case: dict[str, Any], question: Question) -> list[str]:
    """One line of the table."""
    judge = estimator(
        question.estimator,
        job=question.job,
        cluster=question.cluster,
        measurements=question.measurements,
    )
    plan = published_plan(case)
    published = None
    if plan is not None:
        estimate = judge.estimate(plan)
        cost = question.job.objective.goal == "cost"
        published = estimate.money.total_usd if cost else estimate.iteration_s
    started = time.perf_counter()
    answer: Answer = plan_job(question)
    seconds = time.perf_counter() - started
    ours = answer.objective
    known = case.get("best_known_iter_time_s") or case.get("best_known_cost_usd")
    if question.estimator != "paper":
        known = None
    return [
        case["name"],
        f"{ours:.4f}" if ours is not None else "no plan",
        f"{published:.4f}" if published else "-",
        f"{100 * (ours / published - 1):+.1f}" if published and ours else "-",
        f"{known:.4f}" if known else "-",
        f"{100 * (ours / known - 1):+.2f}" if known and ours else "-",
        f"{answer.gap:.1%}" if answer.gap is not None else "-",
        f"{answer.instead_of.loses:.2%}" if answer.instead_of else "-",
        f"{answer.instead_of.saves:.1%}" if answer.instead_of and answer.instead_of.saves else "-",
        f"{seconds:.3f}",
        f"{case['sailor_search_s']:.3f}",
        str(answer.evaluations),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--budget", type=int)
    parser.add_argument("--prefer", default="fastest")
    parser.add_argument("--estimator", default="paper")
    parser.add_argument("--only", nargs="*")
    given = parser.parse_args()
    document = json.loads((given.folder / "planner_cases.json").read_text(encoding="utf-8"))
    measurements = load_measurements(given.folder, catalogue=load_catalogue())
    options = {name: getattr(given, name) for name in ("estimator", "budget", "prefer")}
    rows = [
        row_of(case, question_of(case, document, measurements, **options))
        for case in document["cases"]
        if not given.only or case["name"] in given.only
    ]
    header = ["case", "ours", "published", "%", "best known", "%", "gap", "given away", "saved"]
    print(table([*header, "search s", "published s", "judged"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
