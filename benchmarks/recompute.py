"""What the choice of how many layers each stage recomputes brings, case by case.

    python -m benchmarks.recompute [--json FILE] [--against FILE]

Each job is planned three times: nothing is recomputed, everything, or as the planner chooses. One
line per case with the seconds of an iteration, the gain over the better of the first two, the
recomputed layers of the plan's stages, and the gap. Answers are the best by estimate, and under
``--prefer simple`` those that are cheaper and simpler. ``--against`` compares with the ``--json``
file of an earlier commit.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from planner.api import plan_job
from planner.problem.question import Question
from sailord.text.table import table
from simulator.api import Measurements
from simulator.cluster.cluster import Cluster, Pool
from simulator.hardware.catalogue import load_catalogue
from simulator.models.presets import preset
from simulator.spec.job import Job, Preference, RecomputePolicy
from simulator.spec.plan import Plan

CASES = (
    ("opt-350m", 2048, 512, 4, "16xV100-16"),
    ("opt-1.3b", 2048, 512, 4, "8xA100-40"),
    ("opt-1.3b", 2048, 256, 4, "16xA100-40 16xV100-16"),
    ("opt-2.7b", 2048, 256, 4, "32xV100-16"),
    ("gpt2-xl", 1024, 512, 8, "16xT4"),
    ("opt-6.7b", 2048, 256, 8, "16xA100-40"),
    ("llama-2-7b", 4096, 128, 8, "8xA100-80"),
    ("llama-2-7b", 4096, 256, 8, "32xA100-40"),
    ("llama-3-8b", 8192, 128, 8, "16xA100-80"),
    ("llama-3-8b", 8192, 128, 8, "16xA100-40 16xL4"),
    ("llama-2-13b", 4096, 256, 8, "32xA100-80"),
    ("opt-13b", 2048, 512, 8, "64xA100-40"),
    ("opt-30b", 2048, 256, 8, "64xA100-40 64xV100-16"),
    ("llama-2-70b", 4096, 256, 8, "128xA100-80"),
    ("opt-1.3b", 2048, 256, 1, "8xV100-16"),
    ("gpt2-large", 1024, 256, 1, "8xT4"),
    ("llama-3.2-3b", 8192, 64, 1, "8xA100-80"),
    ("llama-3-8b", 8192, 64, 1, "16xA100-80"),
    ("llama-2-7b", 4096, 128, 1, "16xA100-40"),
    ("opt-6.7b", 2048, 128, 1, "16xA100-40"),
)
"""Model, sequence, samples an iteration, largest TP degree, and GPUs on machines of eight."""
POLICIES: tuple[RecomputePolicy, ...] = ("none", "full", "auto")
SIZE = 8


def question(case: tuple[str, int, int, int, str], policy: RecomputePolicy) -> Question:
    """One case under one policy."""
    name, sequence, batch, max_tp, gpus = case
    kinds = (pool.split("x", 1) for pool in gpus.split())
    pools = [Pool("us-central1-a", gpu, f"{gpu}x{SIZE}", SIZE, int(n)) for n, gpu in kinds]
    model = replace(preset(name), sequence_max=sequence)
    job = Job(name, model, batch, sequence, precision="bf16", max_tp=max_tp, recompute=policy)
    return Question(job, Cluster(tuple(pools), load_catalogue()), Measurements())


def measured(case: tuple[str, int, int, int, str], prefer: Preference) -> dict[str, Any]:
    """The seconds of an iteration under each policy, and figures of the planner's own choice."""
    found: dict[str, Any] = {"case": " ".join(map(str, case))}
    for policy in POLICIES:
        started = time.process_time()
        answer = plan_job(replace(question(case, policy), prefer=prefer))
        found[policy] = answer.objective
        if policy == "auto":
            found["processor_s"] = time.process_time() - started
            found["gap"], found["judged"] = answer.gap, answer.evaluations
            found["layers"] = None if answer.plan is None else recomputed(answer.plan)
    return found


def recomputed(plan: Plan) -> str:
    """For each kind of pipeline, how many of each stage's layers are recomputed."""
    ways = dict.fromkeys(pipeline.stages for pipeline in plan.pipelines)
    return "; ".join(
        " ".join(
            f"{_count(stage.recompute, *stage.layers)}/{stage.layers[1] - stage.layers[0]}"
            for stage in stages
        )
        for stages in ways
    )


def _count(recompute: str | int, first: int, end: int) -> int:
    return recompute if isinstance(recompute, int) else (end - first) * (recompute == "full")


def row_of(found: dict[str, Any], before: dict[str, Any] | None) -> list[str]:
    """One line of the table."""
    known = [found[policy] for policy in ("none", "full") if found[policy]]
    row = [found["case"], *(f"{found[p]:.4g}" if found[p] else "-" for p in POLICIES)]
    row.append(f"{found['auto'] / min(known) - 1:+.1%}" if known and found["auto"] else "-")
    row.append(f"{found['gap']:.1%}" if found["gap"] is not None else "-")
    if before is not None:
        both = before["auto"] and found["auto"]
        row.append(f"{found['auto'] / before['auto'] - 1:+.2%}" if both else "-")
        row.append(f"{before['gap']:.1%}" if before["gap"] is not None else "-")
    return [*row, f"{found['processor_s']:.1f}", (found["layers"] or "-")[:60]]


def main() -> int:
    """Print one row per case."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prefer", choices=get_args(Preference), default="fastest")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--against", type=Path)
    given = parser.parse_args()
    before = {}
    if given.against:
        before = {one["case"]: one for one in json.loads(given.against.read_text(encoding="utf-8"))}
    found = []
    for case in CASES:
        found.append(measured(case, given.prefer))
        print(found[-1], file=sys.stderr, flush=True)
        if given.json:
            given.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    header = ["case", "none", "full", "chosen", "gain", "gap"]
    header += ["change", "gap before"] if before else []
    header += ["s", "recomputed"]
    print(table(header, [row_of(one, before.get(one["case"])) for one in found]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
