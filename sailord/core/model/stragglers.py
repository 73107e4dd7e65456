"""Stragglers: what is measured of each node, and which are slow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from agents.protocol.records import NodeId
from sailord.core.model.options import Options

WorkKey = tuple[str, str]
"""A kind of GPU, and the predicted compute time of a rank."""


@dataclass(frozen=True, slots=True)
class StepSample:
    """The compute time of a node's slowest rank in a step."""

    gpu: str
    step: int
    predicted_s: float
    measured_s: float

    @property
    def factor(self) -> float:
        return self.measured_s / self.predicted_s

    @property
    def work(self) -> WorkKey:
        """Equal for ranks of the same kind with the same layers, TP degree and micro batches."""
        return self.gpu, f"{self.predicted_s:.3g}"


@dataclass(frozen=True, slots=True)
class Straggler:
    """A node that is slower than its peers or its own past, without a break since ``since``."""

    times: float
    against: str
    """What it was compared with, in words."""
    since: float
    since_step: int
    step: int

    def __str__(self) -> str:
        return f"it computes {self.times:.1f} times as long as {self.against}"


@dataclass(frozen=True, slots=True)
class NodeSpeeds:
    """The compute speeds of one generation's nodes."""

    generation: int = 0
    begun_step: int = 0
    """The step of the first comparison."""
    looked_at: float = 0.0
    factors: Mapping[str, float] = field(default_factory=dict)
    """By kind of GPU: the median over its nodes of measured over predicted time."""
    at_first: Mapping[NodeId, float] = field(default_factory=dict)
    """Each node's own factor when it was judged first."""
    slow: Mapping[NodeId, Straggler] = field(default_factory=dict)

    def found(self, now: float, options: Options) -> dict[NodeId, Straggler]:
        """Return those that have been slow for long enough, the slowest first."""
        long = {
            id_: slow
            for id_, slow in self.slow.items()
            if now - slow.since >= options.slow_s
            and slow.step - slow.since_step >= options.slow_steps
        }
        return dict(sorted(long.items(), key=lambda pair: (-pair[1].times, pair[0])))
