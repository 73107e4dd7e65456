"""How good plans and bounds are on random heterogeneous clusters, class by class.

    python -m benchmarks.plan_quality [--cases N] [--budget N] [--prefer simple] [--json FILE]
        [--against FILE]

One line per case with the objective, the gap and the processor seconds of plan and bound; then the
median and the worst gap of each class. ``--against`` compares with an earlier ``--json`` file,
``--prefer simple`` takes the cheaper and simpler plan among those that cannot be told apart.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from planner.api import plan_job
from planner.compare.judge_all import case_of
from planner.problem.question import Question
from sailord.text.table import table
from simulator.api import Measurements
from simulator.cluster.cluster import Cluster, Pool
from simulator.hardware.catalogue import load_catalogue
from simulator.models.presets import preset
from simulator.spec.job import Job, Objective, Preference

KINDS = ("A100-40", "V100-16", "T4", "A100-80", "L4")
PRICES = {"A100-40": 2.9, "V100-16": 1.8, "T4": 0.45, "A100-80": 3.9, "L4": 0.8}
ZONES = ("us-central1-a", "us-central1-b", "us-central1-c", "us-west1-a", "europe-west4-a")
MODELS = ("opt-350m", "gpt2-large", "opt-1.3b", "gpt-neo-2.7b", "opt-6.7b")
CLASSES = ("one kind, one zone", "two kinds or zones", "more kinds or zones")


def random_question(seed: int, budget: int | None) -> Question:
    """One to four kinds in one to five zones, 8 to 512 GPUs, any objective."""
    rng = random.Random(f"plan quality {seed}")
    sort = seed % 3
    kinds = rng.sample(KINDS, (1, rng.randint(1, 2), rng.randint(2, 4))[sort])
    near = 1 if len(kinds) == 2 else 2
    zones = rng.sample(ZONES, (1, near, rng.randint(2, 5))[sort])
    places = [(gpu, zone) for gpu in kinds for zone in zones]
    places = rng.sample(places, max(len(kinds), len(zones), rng.randint(1, len(places))))
    size = {gpu: rng.choice([4, 8]) for gpu in kinds}
    left = int(8 * 2 ** rng.uniform(0, 6))
    pools = []
    for gpu, zone in places:
        machines = max(1, round(left / len(places) / size[gpu]))
        pools.append(
            Pool(
                zone, gpu, f"{gpu}x{size[gpu]}", size[gpu], machines * size[gpu],
                price_usd_per_gpu_hour=PRICES[gpu], price_source="cluster file",
            )
        )  # fmt: skip
    name = rng.choice(MODELS)
    job = Job(
        f"case-{seed}",
        preset(name),
        global_batch=rng.choice([128, 256, 512, 1024]),
        sequence=min(2048, preset(name).sequence_max),
        precision=rng.choice(["fp32", "fp16"]),
        optimizer="adam",
        max_tp=rng.choice([2, 4, 8]),
        recompute=rng.choice(["none", "auto"]),
        objective=Objective(goal=rng.choice(["throughput", "throughput", "cost"])),
    )
    question = Question(job, Cluster(tuple(pools), load_catalogue()), Measurements(), budget=budget)
    if rng.random() < 0.2:
        _, usd = perfect_figures(question)
        objective = Objective(goal="throughput", max_usd_per_iteration=usd * rng.uniform(1.5, 4))
        question = replace(question, job=replace(job, objective=objective))
    return question


def perfect_figures(question: Question) -> tuple[float, float]:
    """Seconds on all GPUs, and dollars on the cheapest kind, if GPUs did nothing but compute.

    Limits of random questions are multiples of these, for a limit taken from a plan would move
    with the planner that is measured.
    """
    costs, pools = case_of(question).costs, question.cluster.pools
    gpu_s = {}
    for gpu in {pool.gpu for pool in pools}:
        times = costs.times(gpu, tp=1, samples=1)
        gpu_s[gpu] = float((times.forward + times.backward).sum()) * question.job.global_batch
    least_usd = min(PRICES[gpu] / 3600 * seconds for gpu, seconds in gpu_s.items())
    return 1 / sum(pool.gpus / gpu_s[pool.gpu] for pool in pools), least_usd


def class_of(question: Question) -> str:
    """How heterogeneous the cluster is."""
    pools = question.cluster.pools
    most = max(len({p.gpu for p in pools}), len({p.zone for p in pools}))
    return CLASSES[min(most, 3) - 1]


def measured(seed: int, budget: int | None, prefer: Preference) -> dict[str, Any]:
    """The figures of one case."""
    question = replace(random_question(seed, budget), prefer=prefer)
    started = time.process_time()
    answer = plan_job(question)
    seconds = time.process_time() - started
    pools = " ".join(f"{p.gpus}x{p.gpu}@{p.zone}" for p in question.cluster.pools)
    return {
        "case": seed,
        "class": class_of(question),
        "cluster": pools,
        "model": question.job.model.name,
        "goal": question.job.objective.goal,
        "objective": answer.objective,
        "bound": answer.lower_bound,
        "gap": answer.gap,
        "judged": answer.evaluations,
        "seconds": seconds,
        "instead_of": answer.instead_of and answer.instead_of.to_json(),
    }


def row_of(found: dict[str, Any], before: dict[str, Any] | None) -> list[str]:
    """One line of the table."""
    ours = found["objective"]
    row = [str(found["case"]), found["class"], found["model"], found["goal"]]
    row += ["no plan", "-"] if ours is None else [f"{ours:.4g}", f"{found['gap']:.1%}"]
    row += [str(found["judged"]), f"{found['seconds']:.2f}"]
    if before is not None:
        known = before["objective"]
        row += [f"{ours / known - 1:+.2%}" if ours and known else "-", f"{before['seconds']:.2f}"]
    return row


def main() -> int:
    """Print one row per case, and the gaps of each class."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--budget", type=int)
    parser.add_argument("--prefer", default="fastest")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--against", type=Path)
    given = parser.parse_args()
    known = {}
    if given.against:
        known = {one["case"]: one for one in json.loads(given.against.read_text(encoding="utf-8"))}
    found = []
    for seed in range(given.first, given.first + given.cases):
        found.append(measured(seed, given.budget, given.prefer))
        if given.json:
            given.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    header = ["case", "class", "model", "goal", "plan", "gap", "judged", "s"]
    if known:
        header += ["change", "s before"]
    print(table(header, [row_of(one, known.get(one["case"])) for one in found]))
    for name in CLASSES:
        gaps = [one["gap"] for one in found if one["class"] == name and one["gap"] is not None]
        if gaps:
            print(f"{name}: {len(gaps)} cases, gap {statistics.median(gaps):.1%} at the median, "
                  f"{max(gaps):.1%} at worst")  # fmt: skip
    taken = [one["instead_of"] for one in found if one["instead_of"]]
    if taken:
        print(f"{len(taken)} of {len(found)} cases prefer another plan, which gives away"
              f" {statistics.fmean(one['loses'] for one in taken):.2%} on average, and saves"
              f" {statistics.fmean(one['saves'] or 0.0 for one in taken):.1%}")  # fmt: skip
    seconds = [one["seconds"] for one in found]
    print(f"processor seconds: {statistics.median(seconds):.2f} at the median, {max(seconds):.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
