"""A job: which model is trained, on which batch, towards which objective, within which limits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from simulator.models.layers import Model, Precision

Optimizer = Literal["adam", "adamw", "sgd"]
RecomputePolicy = Literal["none", "full", "auto"]
Goal = Literal["throughput", "cost"]
DataKind = Literal["synthetic", "tokens", "images"]
Engine = Literal["sailor", "deepspeed"]

OPTIMIZER_MOMENTS: dict[str, int] = {"adam": 2, "adamw": 2, "sgd": 1}
"""Moments that each optimizer keeps per parameter (SGD with momentum keeps one)."""


@dataclass(frozen=True, slots=True)
class Objective:
    """What is to be best, and the limits that hold meanwhile (``None``: no limit)."""

    goal: Goal = "throughput"
    max_usd_per_iteration: float | None = None
    max_usd_per_hour: float | None = None
    max_usd_total: float | None = None
    min_iterations_per_s: float | None = None
    deadline: str | None = None
    max_spot_share: float | None = None


@dataclass(frozen=True, slots=True)
class Data:
    """Where the samples come from."""

    kind: DataKind = "synthetic"
    seed: int = 0
    tokens: str | None = None
    images: str | None = None
    """An array of images, or a folder that has one folder of images for each class."""
    labels: str | None = None
    """The classes of an array of images."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Where and how often state is kept."""

    uri: str | None = None
    memory_every: int | Literal["auto"] = "auto"
    persist_every: int | Literal["auto"] = "auto"
    keep: int = 3
    survive: Literal["node", "zone"] = "node"


@dataclass(frozen=True, slots=True)
class Job:
    """Everything that a plan must respect, and nothing about machines."""

    name: str
    model: Model
    global_batch: int
    sequence: int
    profile: str | None = None
    precision: Precision = "bf16"
    optimizer: Optimizer = "adamw"
    recompute: RecomputePolicy = "none"
    max_tp: int = 1
    micro_batches: tuple[int, ...] | None = None
    flash_attention: bool = True
    zero: Literal[0, 1] = 0
    gradient_sync: Literal["overlap", "serial"] = "overlap"
    steps: int | None = None
    learning_rate: float = 3e-4
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    warmup_steps: int = 0
    clip_norm: float | None = None
    dropout: float = 0.0
    objective: Objective = field(default_factory=Objective)
    data: Data = field(default_factory=Data)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    factory: str | None = None
    """The user's own code that makes the layers, as ``module:function``; no code runs before the
    runtime does, which is why such a model comes with a description."""
    weights: str | None = None
    """A Hugging Face checkpoint to begin from, in place of random weights."""
    engine: Engine = "sailor"
    """Who computes the steps, wherever it can; no loss, weight or checkpoint depends on it."""
    runtime: str = "sailor"
    """Which runtime trains it: its name selects ``simulator.hardware.runtime_constants``."""
