"""Our planner against the best of all published ones, on random heterogeneous clusters.

    python -m benchmarks.contest FILE [--cases N] [--first SEED] [--gpus-max N] [--parts N]
        [--again] [--budget N] [--loser]

A case has two to four GPU kinds in one to five zones, 8 to 512 GPUs (or ``--gpus-max``), and any
objective. Every planner is judged by the event estimator. The published ones are asked about up to
``--parts`` parts of the cluster each, by default as many as by ``sailorctl compare`` (1: the whole
cluster only), and their best answer counts; ours is asked once. FILE keeps one line of JSON per
case: cases in it are not asked again, with ``--again`` only ours is. ``--loser`` prints the best
published plan and ours of each case.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.plan_quality import KINDS, MODELS, PRICES, ZONES, perfect_figures
from planner.api import plan_job
from planner.compare.judge_all import case_of, judge_entry
from planner.compare.registry import BASELINES, baseline
from planner.compare.sub_clusters import TRIED_MAX, sub_clusters
from planner.problem.question import Question
from sailord.text.table import table
from simulator.api import Measurements, estimator
from simulator.cluster.cluster import Cluster, Pool
from simulator.documents.problems import InputError
from simulator.estimate.result import Estimate
from simulator.hardware.catalogue import load_catalogue
from simulator.inputs.plan_file import plan_to_json
from simulator.models.presets import preset
from simulator.spec.job import Job, Objective
from simulator.spec.plan import Plan

OBJECTIVES = (
    "fastest", "cheapest", "within $ per iteration", "within $ per hour", "cheapest within a time",
)  # fmt: skip
TIE = 1e-6
"""Objectives within this share of each other are equal."""


def random_case(seed: int, gpus_max: int = 512) -> tuple[str, Question]:
    """The name of the objective, and a question; nothing of it depends on any planner."""
    rng = random.Random(f"contest {seed} {gpus_max}")
    kinds = rng.sample(KINDS, rng.randint(2, 4))
    zones = rng.sample(ZONES, rng.randint(1, 5))
    places = {(kind, rng.choice(zones)) for kind in kinds}
    places |= {(rng.choice(kinds), zone) for zone in zones}
    places |= {(rng.choice(kinds), rng.choice(zones)) for _ in range(rng.randint(0, 4))}
    size = {kind: rng.choice([1, 2, 4, 8]) for kind in kinds}
    gpus = 8 * (gpus_max / 8) ** rng.random()
    pools = []
    for kind, zone in sorted(places):
        share = gpus / len(places) * rng.choice([0.5, 1.0, 1.5])
        machines = max(1, round(share / size[kind]))
        pools.append(
            Pool(
                zone, kind, f"{kind}x{size[kind]}", size[kind], machines * size[kind],
                price_usd_per_gpu_hour=PRICES[kind], price_source="cluster file",
            )
        )  # fmt: skip
    model = preset(rng.choice(MODELS))
    job = Job(
        f"case-{seed}",
        model,
        global_batch=rng.choice([64, 128, 256, 512, 1024]),
        sequence=min(2048, model.sequence_max),
        precision=rng.choice(["fp32", "fp16"]),
        optimizer="adam",
        max_tp=rng.choice([1, 2, 4, 8]),
        recompute=rng.choice(["none", "auto"]),
    )
    question = Question(
        job, Cluster(tuple(pools), load_catalogue()), Measurements(), is_bounded=False
    )
    name = rng.choice(OBJECTIVES)
    objective = _objective(name, question, rng)
    return name, replace(question, job=replace(job, objective=objective))


def _objective(name: str, question: Question, rng: random.Random) -> Objective:
    """The objective of this name; a limit is a multiple of what perfect efficiency would need."""
    least_s, least_usd = perfect_figures(question)
    hourly = sum(pool.gpus * PRICES[pool.gpu] for pool in question.cluster.pools)
    if name == "within $ per iteration":
        return Objective("throughput", max_usd_per_iteration=least_usd * rng.uniform(1.2, 4))
    if name == "within $ per hour":
        return Objective("throughput", max_usd_per_hour=hourly * rng.uniform(0.2, 1))
    if name == "cheapest within a time":
        return Objective("cost", min_iterations_per_s=1 / (least_s * rng.uniform(1.5, 6)))
    return Objective("cost" if name == "cheapest" else "throughput")


def value_of(estimate: Estimate | None, goal: str) -> float | None:
    """What is minimised."""
    if estimate is None:
        return None
    return estimate.money.total_usd if goal == "cost" else estimate.iteration_s


def published(question: Question, parts: int) -> dict[str, Any]:
    """The best answer of each published planner, and the plan of the best of all."""
    job, network = question.job, question.measurements
    judge = estimator("event", job=job, cluster=question.cluster, measurements=network)
    values: dict[str, float] = {}
    best: tuple[float, Plan] | None = None
    seconds = dict.fromkeys(BASELINES, 0.0)
    for cluster in sub_clusters(question.cluster)[:parts]:
        case = case_of(replace(question, cluster=cluster))
        for name in BASELINES:
            started = time.process_time()
            try:
                entry = judge_entry(baseline(name), case, "fixed", judge)
            except InputError:
                continue
            finally:
                seconds[name] += time.process_time() - started
            value = value_of(entry.estimate, job.objective.goal)
            if value is None or entry.plan is None:
                continue
            values[name] = min(value, values.get(name, math.inf))
            if best is None or value < best[0]:
                best = value, entry.plan
    return {
        "values": values,
        "plan": best and plan_to_json(best[1]),
        "seconds": {name: round(each, 2) for name, each in seconds.items()},
    }


def ours(question: Question) -> dict[str, Any]:
    """Our answer."""
    started = time.process_time()
    answer = plan_job(question)
    return {
        "value": answer.objective,
        "plan": answer.plan and plan_to_json(answer.plan),
        "judged": answer.evaluations,
        "seconds": round(time.process_time() - started, 2),
    }


def ratio_of(found: dict[str, Any]) -> float | None:
    """Ours by the best of the published ones; ``None`` where neither has a plan."""
    best = min(found["published"]["values"].values(), default=math.inf)
    mine = found["ours"]["value"]
    if best == math.inf:
        return None if mine is None else 0.0
    return math.inf if mine is None else mine / best if best > 0 else 1.0


def splits(plan: dict[str, Any] | None) -> bool:
    """Whether a stage is split over several places, which ours does not search."""
    pipelines = () if plan is None else plan["pipelines"]
    return any("places" in stage for each in pipelines for stage in each["stages"])


def shape_of(plan: dict[str, Any] | None) -> str:
    """A plan in one line: its pipelines, with their micro batches and stages."""
    if plan is None:
        return "no plan"
    found: Counter[str] = Counter()
    for pipeline in plan["pipelines"]:
        words = [f"{pipeline['micro_batches']} micro batches"]
        for stage in pipeline["stages"]:
            places = stage.get("places", [stage])
            where = "+".join(f"{place['gpu']}@{place['zone']}" for place in places)
            first, end = stage["layers"]
            often = " recomputed" if stage["recompute"] != "none" else ""
            words.append(f"{where} tp {stage['tp']} layers {first}-{end - 1}{often}")
        found[", ".join(words)] += 1
    size, together = plan["micro_batch_size"], plan.get("together")
    each = "; ".join(f"{count} x {words}" for words, count in found.items())
    return f"micro batch {size}, together {together}: {each}"


def row_of(found: dict[str, Any], before: dict[str, Any] | None) -> list[str]:
    """One line of the table."""
    values, ratio = found["published"]["values"], ratio_of(found)
    best = min(values, key=values.__getitem__, default="-")
    row = [str(found["seed"]), found["objective"], found["model"], str(found["gpus"])]
    row += [best + " (splits)" * splits(found["published"]["plan"])]
    row += [f"{values[best]:.4g}" if values else "-"]
    mine = found["ours"]["value"]
    row += ["-" if mine is None else f"{mine:.4g}", "-" if ratio is None else f"{ratio:.4f}"]
    row += ["-" if before is None or (was := ratio_of(before)) is None else f"{was:.4f}"]
    return [*row, str(found["ours"]["judged"]), f"{found['ours']['seconds']:.2f}"]


def summary(name: str, found: list[dict[str, Any]]) -> list[str]:
    """Wins (of these: where no other has a plan), ties and losses of one objective."""
    ratios = [ratio_of(one) for one in found]
    lost = [one for one in found if (ratio_of(one) or 0.0) > 1 + TIE]
    known = [ratio for ratio in ratios if ratio is not None]
    wins = sum(ratio < 1 - TIE for ratio in known)
    both = [ratio for ratio in known if 0 < ratio < math.inf]
    only_ours = sum(ratio == 0 for ratio in known)
    row = [
        name,
        str(len(ratios)),
        str(wins),
        str(only_ours),
        str(len(known) - wins - len(lost)),
        str(len(lost)),
    ]
    row += [str(sum(splits(one["published"]["plan"]) for one in lost))]
    row += [str(len(ratios) - len(known))]
    row += [f"{statistics.median(both):.4f}" if both else "-"]
    return [*row, f"{max(known):.4f}" if known else "-"]


def read(file: Path) -> dict[int, dict[str, Any]]:
    """The cases in a file, by seed; of two lines of a case the last counts."""
    if not file.exists():
        return {}
    lines = file.read_text(encoding="utf-8").splitlines()
    return {one["seed"]: one for one in map(json.loads, lines)}


def main() -> int:
    """Print the cases that ours loses, the worst first, and a summary by objective."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--cases", type=int, default=40)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--gpus-max", type=int, default=512)
    parser.add_argument("--parts", type=int, default=TRIED_MAX)
    parser.add_argument("--budget", type=int)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--loser", action="store_true")
    given = parser.parse_args()
    known = read(given.file)
    for case in known.values():
        for name in ("gpus_max", "parts"):
            if case[name] != getattr(given, name):
                option = "--" + name.replace("_", "-")
                parser.error(
                    f"{given.file} holds cases of {option} {case[name]}: give that, or another file"
                )
    found = []
    for seed in range(given.first, given.first + given.cases):
        one = known.get(seed)
        if one is None or given.again:
            name, question = random_case(seed, given.gpus_max)
            if one is None:
                one = {
                    "seed": seed, "gpus_max": given.gpus_max, "parts": given.parts,
                    "objective": name, "model": question.job.model.name,
                    "gpus": sum(pool.gpus for pool in question.cluster.pools),
                    "published": published(question, given.parts),
                }  # fmt: skip
            one = one | {"ours": ours(replace(question, budget=given.budget))}
            with given.file.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(one) + "\n")
        found.append(one)
    found.sort(key=lambda one: -(ratio_of(one) or 0.0))
    header = ["seed", "objective", "model", "GPUs", "best", "its value", "ours", "ratio"]
    losses = [one for one in found if (ratio_of(one) or 0.0) > 1 + TIE]
    before = known if given.again else {}
    rows = [row_of(one, before.get(one["seed"])) for one in losses]
    if rows:
        print(table([*header, "before", "judged", "s"], rows))
    if given.loser:
        for one in found:
            print(one["seed"], "best:", shape_of(one["published"]["plan"]))
            print(one["seed"], "ours:", shape_of(one["ours"]["plan"]))
    header = ["objective", "cases", "better", "only ours", "equal", "worse", "to splits"]
    header += ["no plan", "median", "worst"]
    sums = [
        summary(name, [one for one in found if one["objective"] == name]) for name in OBJECTIVES
    ]
    print(table(header, [*sums, summary("all", found)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
