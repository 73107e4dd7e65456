"""A training job: model, batch, optimizer, objective and limits."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Literal

from simulator.models.layers import Model, Precision

Optimizer = Literal["adam", "adamw", "sgd"]
RecomputePolicy = Literal["none", "full", "auto"]
Goal = Literal["throughput", "cost"]
Preference = Literal["simple", "fastest"]
Allowed = Literal["interleaved", "sequence", "micro-batch-per-pipeline"]
RateSchedule = Literal["constant", "cosine", "linear"]
"""How the learning rate goes on after the warm-up."""
DataKind = Literal["synthetic", "tokens", "images"]
Engine = Literal["sailor", "deepspeed"]

OPTIMIZER_MOMENTS: dict[str, int] = {"adam": 2, "adamw": 2, "sgd": 1}
"""Moments per parameter (SGD has momentum)."""


@dataclass(frozen=True, slots=True)
class Objective:
    """The goal to optimise, and the limits to respect (``None``: no limit)."""

    goal: Goal = "throughput"
    max_usd_per_iteration: float | None = None
    max_usd_per_hour: float | None = None
    max_usd_total: float | None = None
    min_iterations_per_s: float | None = None
    deadline: str | None = None
    max_spot_share: float | None = None
    prefer: Preference = "simple"
    """Among plans that cannot be told apart: the cheaper and simpler, or the best by estimate."""
    allow: tuple[Allowed, ...] = ()
    """What plans may have beyond the searched space."""


@dataclass(frozen=True, slots=True)
class Data:
    """The source of the training samples."""

    kind: DataKind = "synthetic"
    seed: int = 0
    tokens: str | None = None
    images: str | None = None
    """An array of images, or a folder with one folder of images per class."""
    labels: str | None = None
    """The class of each image in an array."""
    samples: tuple[int, ...] | None = None
    """How many samples a script's data sets had when it was submitted."""
    num_workers: int = 0
    """Processes in which each rank loads samples; 0: it loads them in a thread."""


@dataclass(frozen=True, slots=True)
class Work:
    """The folder of a submitted script, packed, and what its workers need besides."""

    package: str
    """The packed folder: ``HASH-BYTES``, by which nodes fetch and check it; empty: no script."""
    arguments: tuple[str, ...] = ()
    """Arguments of the script."""
    setup: tuple[str, ...] = ()
    """Shell commands that prepare a node, once for each package."""
    secrets: tuple[str, ...] = ()
    """Names of environment variables, whose values only the nodes know."""
    mounts: tuple[tuple[str, str], ...] = ()
    """Names in the work folder, and the folders of the nodes or buckets that they lead to."""

    def has_mounted(self, name: str) -> bool:
        """Return whether a name in the work folder is of a mount, or below one."""
        return any(PurePosixPath(name).is_relative_to(place) for place, _ in self.mounts)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Where checkpoints are stored, and how often snapshots and checkpoints are taken."""

    uri: str | None = None
    memory_every: int | Literal["auto"] = "auto"
    persist_every: int | Literal["auto"] = "auto"
    keep: int = 3
    survive: Literal["node", "zone"] = "node"
    compare_every: int = 20
    """Steps between comparisons of replicas; 0: only when a generation begins or stops, and at
    checkpoints."""
    start_over: bool = False
    """Restart from step 0 without an order if every copy of the state is lost."""


@dataclass(frozen=True, slots=True)
class UpdateSettings:
    """The optimizer's constants."""

    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float | None = None
    """``None``: 0.01 for AdamW, 0 for Adam and SGD."""
    momentum: float = 0.9
    """For SGD."""
    nesterov: bool = False
    """For SGD."""

    def decay(self, optimizer: Optimizer) -> float:
        """Return the weight decay: of the weights for AdamW, else added to the gradients."""
        if self.weight_decay is None:
            return 0.01 if optimizer == "adamw" else 0.0
        return self.weight_decay


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """The settings of some parameters that differ from the job's."""

    learning_rate_factor: float = 1.0
    weight_decay: float | None = None
    schedule: int = 0
    """Which of a script's schedules its learning rate follows, by number."""


@dataclass(frozen=True, slots=True)
class Job:
    """What to train and how, without any reference to machines."""

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
    learning_rate_min: float = 0.0
    """The rate at which a decaying schedule ends."""
    schedule: RateSchedule = "constant"
    warmup_steps: int = 0
    update: UpdateSettings = field(default_factory=UpdateSettings)
    clip_norm: float | None = None
    skip_nonfinite: int = 3
    """Most steps in a row that may be skipped because the loss or a gradient is not finite."""
    dropout: float = 0.0
    objective: Objective = field(default_factory=Objective)
    data: Data = field(default_factory=Data)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    script: str | None = None
    """A user's Python script, which only workers run. Its model has a description as well."""
    work: Work | None = None
    """Where the script comes from; ``None``: every node has it at the same path."""
    hf: str | None = None
    """A local folder of a model of transformers, or its name in the cache, which only workers open.
    Such a model has a description as well."""
    weights: str | None = None
    """A Hugging Face checkpoint to start from instead of random weights."""
    engine: Engine = "sailor"
    """Which engine computes the steps, where it can; results do not depend on it."""
    runtime: str = "sailor"
    """Selects the constants of ``simulator.hardware.runtime_constants``."""
    gradient_bytes: int | None = None
    """Bytes per gradient on the wire in 16-bit precision, if not the runtime's usual number."""

    @property
    def uses_flash(self) -> bool:
        """Whether flash attention runs: it writes no scores, and Sailor's dropout needs them."""
        return self.flash_attention and (self.dropout == 0 or self.runtime != "sailor")
