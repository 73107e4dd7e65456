"""Where a training step's time goes, from the timelines that ``python -m worker run`` writes.

    python -m benchmarks.overhead [--hidden N] [--layers N] [--sequence N] [--steps N]

A GPT is trained by one rank, and by four (two stages, two pipelines). Overhead is everything but
the layers' passes, the optimizer's step and communication: samples, the norm of the gradients (the
vote of a single rank; with several ranks the vote includes waiting and is left out), and the time
between recorded activities.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from sailord.text.table import table

ROOT = Path(__file__).resolve().parent.parent
LAYERS, OPTIMIZER, COMMUNICATION = "layers", "optimizer step", "communication"
OWN = ("data", "vote", "between")
FIRST_STEPS = 2
"""Warm-up steps, not counted: memory is reserved and libraries are loaded."""

JOB = """
[model]
family = "gpt2"
layers = {layers}
hidden = {hidden}
heads = 8
vocab = 1024
sequence = {sequence}
tied = false

[training]
global_batch = 16
sequence = {sequence}
precision = "fp32"
steps = {steps}
clip_norm = 1.0
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, and print each activity's share of a step."""
    parser = argparse.ArgumentParser(description="Say where a training step's time goes.")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--steps", type=int, default=8)
    asked = parser.parse_args(arguments)
    print(f"hidden {asked.hidden}, {asked.layers} layers, sequence {asked.sequence}")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for stages, pipelines in ((1, 1), (2, 2)):
            timeline = _train(Path(folder), asked, stages=stages, pipelines=pipelines)
            ranks = stages * pipelines
            step_ms, shares = _shares(timeline)
            # A single rank does not wait: its vote is the norm.
            own = sum(shares[kind] for kind in OWN if kind != "vote" or ranks == 1)
            parts = (*(shares[kind] for kind in _KINDS), own)
            rows.append([str(ranks), f"{step_ms:.1f}", *(f"{part:.1%}" for part in parts)])
    print(table(("ranks", "ms/step", *_KINDS, "overhead"), rows))
    return 0


_KINDS = (LAYERS, OPTIMIZER, COMMUNICATION, *OWN)


def _train(folder: Path, asked: argparse.Namespace, *, stages: int, pipelines: int) -> Any:
    sizes = {name: getattr(asked, name) for name in ("hidden", "layers", "sequence", "steps")}
    (folder / "job.toml").write_text(JOB.format(**sizes), encoding="utf-8")
    count = asked.layers + 2  # Embedding and head are layers too.
    bounds = [count * number // stages for number in range(stages + 1)]
    where = {"gpu": "any", "machine": "this", "zone": "here"}
    cut = [{"layers": [first, end], "tp": 1, **where} for first, end in pairwise(bounds)]
    pipeline = {"micro_batches": 8 // pipelines, "stages": cut}
    plan = {"micro_batch_size": 2, "pipelines": [pipeline] * pipelines}
    (folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    command = [sys.executable, "-m", "worker", "run", "--json", "--device", "cpu"]
    for option in ("job.toml", "plan.json", "timeline.json"):
        command += [f"--{option.partition('.')[0]}", str(folder / option)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    return json.loads((folder / "timeline.json").read_text(encoding="utf-8"))


def _shares(timeline: Any) -> tuple[float, Counter[str]]:
    """Return a step's mean time in ms and each activity's share, over all ranks' steps."""
    spent: Counter[str] = Counter()
    total_us, steps = 0.0, 0
    for row in _rows(timeline):
        first_us = {step: min(event["ts"] for event in events) for step, events in row.items()}
        # A step ends where the next begins, so that nothing is left out.
        for step in sorted(row)[FIRST_STEPS:-1]:
            lasted_us = first_us[step + 1] - first_us[step]
            for event in row[step]:
                spent[_kind(event["name"])] += event["dur"]
            spent["between"] += lasted_us - sum(event["dur"] for event in row[step])
            total_us += lasted_us
            steps += 1
    return total_us / steps / 1e3, Counter({kind: us / total_us for kind, us in spent.items()})


def _rows(timeline: Any) -> Iterator[dict[int, list[Any]]]:
    """Return each rank's activities, by steps."""
    rows: defaultdict[int, defaultdict[int, list[Any]]] = defaultdict(lambda: defaultdict(list))
    names: dict[int, str] = {}
    for event in timeline["traceEvents"]:
        if event["ph"] == "X" and event["name"] not in ("start", "end"):
            rows[event["tid"]][event["args"].get("step", -1)].append(event)
        elif event["name"] == "thread_name":
            names[event["tid"]] = event["args"]["name"]
    for number, row in rows.items():
        if re.search(r"rank \d+$", names[number]):
            yield row


def _kind(name: str) -> str:
    """Return the kind of activity that an event of the timeline counts as."""
    if re.fullmatch(r"[FB]\d+", name):
        return LAYERS
    if name.startswith(("send", "receive")) or name == "wait":
        return COMMUNICATION
    assert name in (OPTIMIZER, *OWN), f"{name} is no activity that a step consists of"
    return name


if __name__ == "__main__":
    sys.exit(main())
