"""A small job and a plan of four ranks, as files, for tests of the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.worker.warm import Done, Warm

JOB = """
[model]
family = "FAMILY"
layers = 2
hidden = 16
heads = 4
vocab = 64
sequence = 8

[training]
global_batch = 8
sequence = 8
precision = "fp32"
max_tp = 2
steps = 3
learning_rate = 0.01
"""


def stage(first: int, end: int, *, tp: int = 1, recompute: str = "none") -> dict[str, Any]:
    """Return a stage of a plan."""
    where = {"gpu": "any", "machine": "this", "zone": "here"}
    return {"layers": [first, end], "tp": tp, "recompute": recompute, **where}


PLAN = {
    "micro_batch_size": 1,
    "pipelines": [
        {"micro_batches": 5, "stages": [stage(0, 2, tp=2), stage(2, 4)]},
        {"micro_batches": 3, "stages": [stage(0, 4, recompute="full")]},
    ],
}


def write(
    folder: Path, *, family: str = "gpt2", change: tuple[str, str] = ("", ""), more: str = ""
) -> None:
    """Write the job, with a change to its text, and the plan to a folder."""
    assert change[0] in JOB
    (folder / "job.toml").write_text(JOB.replace("FAMILY", family).replace(*change, 1) + more)
    (folder / "plan.json").write_text(json.dumps(PLAN))


def run(warm: Warm, folder: Path, *args: str | Path, plan: bool = True, **env: str) -> Done:
    """Run ``python -m worker run`` and check that no process is left behind."""
    given = ["--plan", folder / "plan.json"] if plan else []
    done = warm.run("run", "--job", folder / "job.toml", *given, "--json", *args, **env)
    assert done.left == [], "processes were left behind"
    return done
