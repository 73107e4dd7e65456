"""The zones, the job and the plans of ``fidelity.py``."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.models.layers import Recompute
from simulator.spec.plan import Pipeline, Place, Plan, Schedule, Stage

SLOWER = {"large": 4.0, "small": 8.0}
ZONES = f"""
[[zone]]
name = "zone-a"
nodes = 2
delay_ms = 0.2
nic_mbit_per_s = 400
times_slower = {SLOWER["large"]}

[[zone]]
name = "zone-b"
nic_mbit_per_s = 400
times_slower = {SLOWER["large"]}

[[zone]]
name = "zone-c"
gpu = "small"
nic_mbit_per_s = 400
times_slower = {SLOWER["small"]}

[[link]]
from = "zone-a"
to = "zone-b"
delay_ms = 2
mbit_per_s = 200

[[link]]
from = "zone-a"
to = "zone-c"
delay_ms = 15
mbit_per_s = 100

[[link]]
from = "zone-b"
to = "zone-c"
delay_ms = 15
mbit_per_s = 100
"""
LAYERS = 8
TEXT_OF_JOB = """
[job]
name = "fidelity"

[model]
family = "llama"
layers = 6
hidden = 192
heads = 4
ffn = 512
vocab = 256
sequence = 64

[training]
global_batch = 16
sequence = 64
precision = "fp32"
max_tp = 2
learning_rate = 5e-4
schedule = "constant"
clip_norm = 1.0
recompute = "auto"

[data]
tokens = "text.npy"
"""


def _place(node: str, *, gpus: int = 1) -> Place:
    kind = "small" if node[0] == "c" else "large"
    machine = f"emulated-{kind}" + ("" if gpus == 1 else f"-{gpus}")
    return Place(f"emulated-{kind}", machine, f"zone-{node[0]}", node, tuple(range(gpus)))


NODES = {name: _place(name) for name in ("a1", "a2", "b1", "c1")}


@dataclass(frozen=True, slots=True)
class NamedPlan:
    """A plan with a name."""

    name: str
    plan: Plan


def pipe(micro_batches: int, *stages: str, recompute: Recompute = "none") -> Pipeline:
    """Return a pipeline of stages such as ``a1*2:3``: node, TP degree, and the layer it ends at."""
    found, first = [], 0
    for text in stages:
        where, _, end = text.partition(":")
        node, _, tp = where.partition("*")
        layers = (first, int(end) if end else LAYERS)
        place = _place(node, gpus=int(tp or 1))
        found.append(Stage(layers, int(tp or 1), (place,), recompute))
        first = layers[1]
    return Pipeline(micro_batches, tuple(found))


def plan(micro_batch: int, *pipelines: Pipeline, schedule: Schedule = "1f1b") -> Plan:
    """Return a plan of pipelines."""
    return Plan(micro_batch, pipelines, schedule)


def named_plans() -> tuple[NamedPlan, ...]:
    """Return all plans."""
    return tuple(
        NamedPlan(*each)
        for each in (
            ("one node", plan(2, pipe(8, "a1"))),
            ("one slow node", plan(4, pipe(4, "c1"))),
            ("recompute", plan(1, pipe(16, "a1", recompute="full"))),
            ("TP 2", plan(2, pipe(8, "a1*2"))),
            ("DP 2 in a zone", plan(2, pipe(4, "a1"), pipe(4, "a2"))),
            ("DP 2, two zones", plan(4, pipe(2, "a1"), pipe(2, "b1"))),
            ("DP 2, far, uneven", plan(2, pipe(5, "a1"), pipe(3, "c1"))),
            ("PP 2 in a zone", plan(2, pipe(8, "a1:4", "a2"))),
            ("PP 2 uneven layers", plan(1, pipe(16, "a1:5", "a2"))),
            ("PP 2, two zones", plan(2, pipe(8, "a1:4", "b1"))),
            ("PP 2, far, uneven", plan(2, pipe(8, "a1:6", "c1"))),
            ("PP 3, three zones", plan(1, pipe(16, "a1:3", "b1:6", "c1"))),
            ("PP 3, slow first", plan(2, pipe(8, "c1:2", "a1:5", "b1"))),
            ("TP 2 then TP 1", plan(2, pipe(8, "a1*2:6", "b1"))),
            ("TP 2 beside TP 1", plan(2, pipe(5, "a1*2"), pipe(3, "b1"))),
            ("PP 2 beside one", plan(2, pipe(5, "a1:4", "a2"), pipe(3, "b1"))),
            ("2 x PP 2, uneven", plan(2, pipe(5, "a1:4", "b1"), pipe(3, "a2:6", "c1"))),
            ("DP 3, three zones", plan(1, pipe(7, "a1"), pipe(6, "b1"), pipe(3, "c1"))),
            ("DP 4, mixed order",
             plan(1, pipe(5, "a1"), pipe(2, "c1"), pipe(5, "a2"), pipe(4, "b1"))),
            ("GPipe, recompute", plan(4, pipe(4, "a1:4", "a2", recompute="full"),
                                      schedule="gpipe")),
        )
    )  # fmt: skip
