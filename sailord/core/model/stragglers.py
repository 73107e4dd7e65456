"""Stragglers: what is measured of each node, and which are slow; or the whole job is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from agents.protocol.records import NodeId
from sailord.core.model.options import Options

TOLD_SHARE = 0.25
"""A node is told to be slow after this share of the time and steps after which it is left out."""
SEEN_MAX = 8
"""A step's seconds are the second least of the last 8 measured: many of these may contain an
evaluation or a snapshot, and what slows steps slows all."""

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
class Past:
    """The best that something took in this generation for a whole window of steps."""

    best: float
    """The least that it did not exceed for ``slow_steps`` steps; at first, the first value."""
    since_step: int
    """The step at which the present window began."""
    worst: float
    """The most since the window began: a few quick steps make no better past."""

    @classmethod
    def begun(cls, value: float, step: int) -> Past:
        """Return the past of what is measured first."""
        return cls(value, step, value)

    def and_now(self, value: float, step: int, window: int) -> Past:
        """Return the past after one more measurement."""
        worst = max(self.worst, value)
        if step < self.since_step + window:
            return replace(self, worst=worst)
        return Past(min(self.best, worst), step, value)


@dataclass(frozen=True, slots=True)
class StepPace:
    """How long the job's steps take from one look to the next."""

    at: float = 0.0
    step: int = 0
    """When the last step ended that was looked at, and which it was."""
    seen: tuple[float, ...] = ()
    past: Past | None = None

    def and_now(self, at: float, step: int, window: int) -> StepPace:
        """Return the pace once this step has ended."""
        if step <= self.step:
            return self
        if self.at <= 0:
            return replace(self, at=at, step=step)
        seen = (*self.seen, (at - self.at) / (step - self.step))[-SEEN_MAX:]
        if len(seen) < SEEN_MAX:
            return StepPace(at, step, seen)
        now = sorted(seen)[1]
        past = Past.begun(now, step) if self.past is None else self.past.and_now(now, step, window)
        return StepPace(at, step, seen, past)

    @property
    def grown(self) -> float:
        """Return how many times as long steps take as they once did."""
        return 1.0 if self.past is None else sorted(self.seen)[1] / self.past.best


@dataclass(frozen=True, slots=True)
class Straggler:
    """What became much slower than its peers or its own past at ``since``, and still is."""

    times: float
    against: str
    """What it was compared with, in words."""
    since: float
    since_step: int
    step: int
    verb: str = "computes"
    delay_s: float = 0.0
    """By how much steps took longer while it was the slowest: others waited for it then."""

    def __str__(self) -> str:
        since = f"since step {self.since_step:,}"
        return f"it {self.verb} {self.times:.1f} times as long as {self.against}, {since}"

    def has_lasted(self, now: float, options: Options, share: float = 1.0) -> bool:
        """Return whether it has been slow for this share of ``slow_s`` and ``slow_steps``."""
        steps = self.step - self.since_step
        return now - self.since >= share * options.slow_s and steps >= share * options.slow_steps


@dataclass(frozen=True, slots=True)
class NodeSpeeds:
    """The compute speeds of one generation's nodes."""

    generation: int = 0
    begun_step: int = 0
    """The step of the first comparison."""
    looked_at: float = 0.0
    factors: Mapping[str, float] = field(default_factory=dict)
    """By kind of GPU: the median over its nodes of measured over predicted time."""
    past: Mapping[NodeId, Past] = field(default_factory=dict)
    """Each node's own factor earlier."""
    slow: Mapping[NodeId, Straggler] = field(default_factory=dict)
    recovered: frozenset[NodeId] = frozenset()
    """Those that were slow until the last look, and measured not to be in it."""
    pace: StepPace = field(default_factory=StepPace)
    job: Straggler | None = None
    """All nodes alike, or the steps, are slower than before; told if no node is to blame."""

    def found(self, now: float, options: Options) -> dict[NodeId, Straggler]:
        """Return those that have been slow for long enough, the slowest first."""
        return self._find_lasting(now, options, 1.0)

    def told(self, now: float, options: Options) -> dict[NodeId, Straggler]:
        """Return those that have been slow for long enough to say so, the slowest first."""
        return self._find_lasting(now, options, TOLD_SHARE)

    def _find_lasting(self, now: float, options: Options, share: float) -> dict[NodeId, Straggler]:
        long = {id_: s for id_, s in self.slow.items() if s.has_lasted(now, options, share)}
        return dict(sorted(long.items(), key=lambda pair: (-pair[1].times, pair[0])))
