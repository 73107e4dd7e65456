"""An estimate of one iteration: time, memory and money, with their provenance."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from simulator.spec.provenance import Provenance


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Peak bytes on each device of one stage, by purpose."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    workspace: float
    """Transients of the largest layer's forward or backward, logits included."""
    communication: float
    context: float
    """Memory in use by framework and driver before the first tensor."""
    fragmentation: float
    capacity: float

    @property
    def total(self) -> float:
        parts = self.parameters + self.gradients + self.optimizer + self.activations
        return parts + self.workspace + self.communication + self.context + self.fragmentation

    @property
    def fits(self) -> bool:
        return self.total <= self.capacity


@dataclass(frozen=True, slots=True)
class Money:
    """Dollars of one iteration; ``None`` if a price is unknown."""

    compute_usd: float | None
    egress_usd: float
    by_pool_usd: tuple[tuple[str, float], ...] = ()
    """Compute by pool, ``"<gpu>@<zone>"``."""
    by_egress_usd: tuple[tuple[str, float], ...] = ()
    """Egress by direction, ``"<from> -> <to>"``."""
    unpriced: tuple[str, ...] = ()

    @property
    def total_usd(self) -> float | None:
        return None if self.compute_usd is None else self.compute_usd + self.egress_usd


@dataclass(frozen=True, slots=True)
class StageTime:
    """How one device group spends an iteration; the four parts add up to its length."""

    compute_s: float
    """Forward, backward and recomputation of all its micro batches."""
    communication_s: float
    """Sends, receives and gathers that block the devices, and gradient sync not overlapped."""
    optimizer_s: float
    idle_s: float
    """Waiting for other devices: pipeline bubble and stragglers."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the simulator predicts for one iteration of a plan."""

    estimator: str
    iteration_s: float
    samples_per_iteration: int
    memory: tuple[tuple[DeviceMemory, ...], ...]
    """Per pipeline and stage."""
    money: Money
    stages: tuple[tuple[StageTime, ...], ...]
    """Per pipeline and stage; empty for the closed formula, which has no schedule."""
    bottleneck: str
    provenance: Provenance
    notes: tuple[str, ...] = ()
    compute_error: float | None = None
    """Relative error of the compute times of stages, without links; ``None``: unknown."""
    host_shortage: str = ""
    """Which machines lack memory for what their devices offload."""

    @property
    def throughput_samples_per_s(self) -> float:
        return self.samples_per_iteration / self.iteration_s

    @property
    def rent_usd_per_hour(self) -> float | None:
        """Price of the devices, without egress; ``None`` if it is unknown."""
        usd = self.money.compute_usd
        return None if usd is None else usd / self.iteration_s * 3600

    @property
    def fits(self) -> bool:
        is_short = bool(self.host_shortage)
        return not is_short and all(device.fits for row in self.memory for device in row)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON of ``sailorctl simulate --json`` (docs/formats.md, estimates)."""
        usd = self.money.total_usd
        return {
            "estimator": self.estimator,
            "iteration_s": self.iteration_s,
            "iteration_error": self.provenance.relative_error,
            "throughput_samples_per_s": self.throughput_samples_per_s,
            "samples_per_iteration": self.samples_per_iteration,
            "cost_usd_per_iteration": usd,
            "egress_usd_per_iteration": self.money.egress_usd,
            "cost_usd_per_hour": usd and usd / self.iteration_s * 3600,
            "compute_usd_by_pool": dict(self.money.by_pool_usd),
            "egress_usd_by_direction": dict(self.money.by_egress_usd),
            "unpriced": list(self.money.unpriced),
            "peak_memory_bytes": [[round(d.total) for d in p] for p in self.memory],
            "capacity_bytes": [[round(d.capacity) for d in p] for p in self.memory],
            "memory": [
                [{item.name: round(getattr(d, item.name)) for item in fields(d)} for d in pipeline]
                for pipeline in self.memory
            ],
            "fits": self.fits,
            "stages": [
                [{item.name: getattr(s, item.name) for item in fields(s)} for s in pipeline]
                for pipeline in self.stages
            ],
            "bottleneck": self.bottleneck,
            "source": self.provenance.source,
            "notes": [
                *self.notes,
                *self.provenance.notes,
                *([f"does not fit: {self.host_shortage}"] if self.host_shortage else []),
            ],
        }
