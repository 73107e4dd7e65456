"""What each thing that ``plan --allow`` names brings, on random cases.

    python -m benchmarks.decisions
        zero-bubble|offload|zero1|outer-steps|interleaved|sequence|micro-batch-per-pipeline
        [--cases N] [--first N] [--samples N [N ...]] [--zones N [N ...]] [--outer-every N]

One line per case: the best plan found without and with it, by the estimate; the gain; whether it is
taken if simple plans are preferred; the certified gap of a question without and with it, where the
bound covers such plans; and the processor seconds of both. ``sequence`` is asked of larger models,
``offload`` of jobs that may recompute on GPUs with little memory,
``outer-steps`` of several zones with 8 or more samples for each GPU,
``micro-batch-per-pipeline`` of two kinds of GPUs, one with much memory and one with little; every
fourth of its cases has one kind only.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from planner.api import plan_job
from planner.problem.question import TRIED, Answer, Question
from sailord.text.table import table
from simulator.api import Measurements
from simulator.cluster.cluster import Cluster, Pool
from simulator.hardware.catalogue import load_catalogue
from simulator.inputs.job_file import ALLOWED
from simulator.models.layers import Model
from simulator.models.presets import preset
from simulator.spec.job import Allowed, Job
from simulator.spec.plan import Plan

MACHINES = (("A100-40", 8, 2.9), ("A100-80", 8, 3.9), ("V100-16", 8, 1.8), ("L4", 4, 0.8))
MODELS = ("gpt2-large", "opt-1.3b", "gpt-neo-2.7b", "opt-6.7b")
LARGE = (("A100-40", 8, 2.9), ("A100-80", 8, 3.9), ("H100-80", 8, 8.0))
LARGE_MODELS = ("opt-6.7b", "llama-2-7b", "llama-2-13b", "opt-30b", "llama-2-70b")
ROOMY = (("A100-80", 8, 3.9), ("H100-80", 8, 8.0), ("A100-40", 8, 2.9))
NARROW = (("T4", 4, 0.35), ("V100-16", 8, 1.8), ("L4", 4, 0.8))
ZONE = "us-central1-a"
ZONES = (ZONE, "us-central1-b", "us-east1-b", "us-west1-a", "europe-west4-a")
"""Two zones of one region, two more of its continent, and one of another continent."""
ZONED_BUDGET = 60
"""Plans judged of a case over several zones, once without and once with outer steps."""


def pool_of(kind: tuple[str, int, float], gpus: int, zone: str = ZONE) -> Pool:
    """A pool of ``gpus`` GPUs; ``kind`` is the GPU kind, the GPUs of a machine, and the price."""
    gpu, size, price = kind
    return Pool(
        zone, gpu, f"{gpu}x{size}", size, gpus,
        price_usd_per_gpu_hour=price, price_source="cluster file",
    )  # fmt: skip


def case_of(
    seed: int, pools: Sequence[Pool], model: Model, samples: int, **others: Any
) -> Question:
    """A job of ``samples`` for each GPU on these pools, with estimates from the catalogue."""
    common: dict[str, Any] = {"precision": "fp16", "optimizer": "adam"}
    batch = sum(pool.gpus for pool in pools) * samples
    job = Job(f"case-{seed}", model, global_batch=batch, **common | others)
    return Question(job, Cluster(tuple(pools), load_catalogue()), Measurements())


def question_of(seed: int, samples: list[int]) -> Question:
    """One or two kinds of GPUs in a zone, 4 to 64 in all, with one of these samples for each."""
    rng = random.Random(f"decisions {seed}")
    kinds = rng.sample(MACHINES, rng.choice([1, 1, 2]))
    pools = [pool_of(kind, kind[1] * rng.choice([1, 2, 4])) for kind in kinds]
    model = preset(rng.choice(MODELS))
    each, sequence = rng.choice(samples), min(2048, model.sequence_max)
    return case_of(seed, pools, model, each, sequence=sequence, max_tp=rng.choice([1, 2, 4]))


def mixed_question_of(seed: int) -> Question:
    """8 GPUs with much memory, and except in every fourth case 8 to 32 with little."""
    rng = random.Random(f"mixed decisions {seed}")
    kinds = [rng.choice(ROOMY), rng.choice(NARROW)][: 1 if seed % 4 == 3 else 2]
    pools = [pool_of(kind, 8 if kind in ROOMY else kind[1] * rng.choice([2, 4])) for kind in kinds]
    case = case_of(
        seed,
        pools,
        preset(rng.choice(("gpt2-large", "gpt2-xl", "opt-1.3b", "gpt-neo-2.7b"))),
        rng.choice([4, 8, 16]),
        sequence=rng.choice([256, 512, 1024]),
        recompute=rng.choice(("none", "auto")),
        max_tp=rng.choice([1, 2, 4]),
    )
    return replace(case, proves=False, is_bounded=False)


def tight_question_of(seed: int, samples: list[int]) -> Question:
    """One kind of GPUs with little memory, 8 to 32, and a job that may recompute."""
    rng = random.Random(f"tight decisions {seed}")
    kind = rng.choice((*NARROW, MACHINES[0]))
    pool = pool_of(kind, 8 * rng.choice([1, 2, 4]))
    model = preset(rng.choice(("gpt2-xl", "opt-1.3b", "opt-2.7b")))
    about = {"sequence": min(2048, model.sequence_max), "recompute": "auto"}
    return case_of(seed, [pool], model, rng.choice(samples), max_tp=rng.choice([1, 2, 4]), **about)


def large_question_of(seed: int) -> Question:
    """One kind of GPUs, 8 to 128, with one to eight samples for each and no bounds."""
    rng = random.Random(f"large decisions {seed}")
    kind = rng.choice(LARGE)
    name = rng.choice(LARGE_MODELS)
    pool = pool_of(kind, kind[1] * rng.choice([8, 16] if name.endswith("0b") else [1, 2, 4]))
    each, sequence = rng.choice([1, 2, 4, 8]), 2048 if name.startswith("opt") else 4096
    about = {"precision": "bf16", "optimizer": "adamw", "recompute": "auto", "max_tp": 8}
    case = case_of(seed, [pool], preset(name), each, sequence=sequence, **about)
    return replace(case, proves=False, is_bounded=False)


def zoned_question_of(seed: int, samples: list[int], zones: list[int], every: int) -> Question:
    """One or two kinds of GPUs in some zones, 8 or 16 in each, TP 1, outer steps, no bounds."""
    rng = random.Random(f"zoned decisions {seed}")
    kinds = rng.sample(MACHINES[:3], rng.choice([1, 1, 2]))
    pools = []
    for zone in rng.sample(ZONES, rng.choice(zones)):
        kind = rng.choice(kinds)
        pools.append(pool_of(kind, kind[1] * rng.choice([1, 2]), zone))
    model = preset(rng.choice(MODELS[:3]))
    about = {"sequence": min(2048, model.sequence_max), "micro_batches": (1, 2, 4, 8)}
    case = case_of(seed, pools, model, rng.choice(samples), max_tp=1, **about)
    return replace(case, proves=False, is_bounded=False, budget=ZONED_BUDGET, outer_every=every)


def has(plan: Plan | None, name: Allowed) -> bool:
    """Whether a plan has what the question allows."""
    if plan is None:
        return False
    if name == "micro-batch-per-pipeline":
        return len(plan.sizes) > 1
    return plan.sequence_parallel if name == "sequence" else plan.schedule == name


def row_of(seed: int, question: Question, name: Any) -> tuple[list[str], float | None]:
    """The line of a case, and the objective with what is tried by that without."""
    if name in ALLOWED:
        objective = replace(question.job.objective, allow=(name,))
        asked = replace(question, job=replace(question.job, objective=objective))
    else:
        asked = replace(question, tries=(name,))
    plain, plain_s = _time(replace(question, outer_every=None))
    found, found_s = _time(replace(asked, prefer="simple"))
    without, best, is_taken = plain.objective, None, False
    gain = next((one for one in found.gains if one.name == name), None)
    if name in ALLOWED:
        best = found.objective if found.instead_of is None else found.instead_of.iteration_s
        is_taken = has(found.plan, name)
    elif gain is not None:
        without, best, is_taken = gain.without, gain.best, gain.is_taken
    ratio = best / without if best and without else None
    row = [
        *(str(seed), question.job.model.name, str(question.job.global_batch)),
        " ".join(
            f"{p.gpus}x{p.gpu}" + (f"@{p.zone}" if question.outer_every else "")
            for p in question.cluster.pools
        ),
        *(_figure(without), _figure(best)),
        "-" if ratio is None else f"{ratio - 1:+.1%}",
        "yes" if is_taken else "no",
        *(f"{one.gap or 0:.1%}" if one.lower_bound else "-" for one in (plain, found)),
        f"{plain_s:.1f}/{found_s:.1f}",
    ]
    return row, ratio


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What a thing that the planner can try brings.")
    parser.add_argument("name", choices=(*TRIED, *ALLOWED))
    parser.add_argument("--cases", type=int, default=12)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--samples", type=int, nargs="+")
    parser.add_argument("--zones", type=int, nargs="+", default=[2, 3, 4, 5])
    parser.add_argument("--outer-every", type=int, default=50)
    asked = parser.parse_args(arguments)
    rows, ratios = [], []
    for seed in range(asked.first, asked.first + asked.cases):
        if asked.name == "outer-steps":
            samples = asked.samples or [8, 16, 32]
            question = zoned_question_of(seed, samples, asked.zones, asked.outer_every)
        elif asked.name == "offload":
            question = tight_question_of(seed, asked.samples or [8, 16, 32])
        elif asked.name == "sequence":
            question = large_question_of(seed)
        elif asked.name == "micro-batch-per-pipeline":
            question = mixed_question_of(seed)
        else:
            question = question_of(seed, asked.samples or [1, 2, 4, 8])
            question = replace(question, is_bounded=asked.name not in ALLOWED)
        row, ratio = row_of(seed, question, asked.name)
        rows.append(row)
        ratios += [] if ratio is None else [ratio]
        print(" ".join(row), file=sys.stderr, flush=True)
    head = "case model batch GPUs without with gain taken gap gap CPU s"
    print(table(head.split(" ", 10), rows))
    taken = sum(row[7] == "yes" for row in rows)
    if ratios:
        median, best = statistics.median(ratios) - 1, min(ratios) - 1
        print(f"median {median:+.1%}, best {best:+.1%}, taken {taken}")
    return 0


def _time(question: Question) -> tuple[Answer, float]:
    started = time.process_time()
    answer = plan_job(question)
    return answer, time.process_time() - started


def _figure(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.4g} s"


if __name__ == "__main__":
    sys.exit(main())
