"""Detection of stragglers: nodes that compute slower than predicted for their work.

A prediction may be off for a whole kind of GPU or for some layers, so a node is never compared with
it alone. It is compared with nodes that do the same work on the same kind of GPU; else with all
others of its kind, with room for the error of the prediction; and with its own past at the same
work, less what has become slower for all. No node is judged before ``Limits.steps`` steps, and none
is a straggler before it has been slow for ``Limits.seconds``.
"""

from __future__ import annotations

import bisect
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from agents.protocol.records import NodeId

PEERS_MIN = 2
"""A median needs more peers than this."""

Work = tuple[str, str]
"""A kind of GPU, and the predicted compute time of a rank."""


@dataclass(frozen=True, slots=True)
class Limits:
    """When a node counts as a straggler."""

    times: float
    """Measured over predicted time."""
    steps: int
    seconds: float
    """For so many steps and seconds without a break; nothing is judged before as many steps."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The compute time of a node's slowest rank in a step."""

    gpu: str
    step: int
    predicted_s: float
    measured_s: float

    @property
    def factor(self) -> float:
        return self.measured_s / self.predicted_s

    @property
    def work(self) -> Work:
        """Equal for ranks of the same kind with the same layers, TP degree and micro batches."""
        return self.gpu, f"{self.predicted_s:.3g}"


@dataclass(frozen=True, slots=True)
class Straggler:
    """A node that takes longer than predicted, without a break since ``since``."""

    times: float
    against: str
    """What it was compared with, in words."""
    since: float
    since_step: int
    step: int

    def __str__(self) -> str:
        return f"it computes {self.times:.1f} times as long as {self.against}"


@dataclass(frozen=True, slots=True)
class Speeds:
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

    def found(self, now: float, limits: Limits) -> dict[NodeId, Straggler]:
        """Return those that have been slow for long enough, the slowest first."""
        long = {
            id_: slow
            for id_, slow in self.slow.items()
            if now - slow.since >= limits.seconds and slow.step - slow.since_step >= limits.steps
        }
        return dict(sorted(long.items(), key=lambda pair: (-pair[1].times, pair[0])))


def look(
    watch: Speeds,
    samples: Mapping[NodeId, Sample],
    *,
    now: float,
    relative_error: float,
    limits: Limits,
) -> Speeds:
    """Compare the present measurements; ``relative_error`` is the prediction's."""
    settled = {
        id_: sample
        for id_, sample in sorted(samples.items())
        if sample.step >= watch.begun_step + limits.steps
    }
    at_first = {id_: sample.factor for id_, sample in settled.items()} | dict(watch.at_first)
    by_work, by_gpu = _grouped(settled)
    grown = sorted(settled[id_].factor / at_first[id_] for id_ in settled)
    slow: dict[NodeId, Straggler] = {}
    for id_, sample in settled.items():
        own = sample.factor / at_first[id_]
        others = _median_without(grown, own)
        found = [(own / max(others or 1.0, 1.0), "it did before")]
        like, kind = by_work[sample.work], by_gpu[sample.gpu]
        if len(like) > PEERS_MIN:
            with_them = _median_without(like, sample.factor)
            found.append((sample.factor / with_them, "others with the same work"))
        elif len(kind) > PEERS_MIN:
            with_them = _median_without(kind, sample.factor) * (1 + relative_error)
            found.append((sample.factor / with_them, f"other {sample.gpu} do for their work"))
        times, against = max(found)
        if times > limits.times:
            before = watch.slow.get(id_)
            since, at = (now, sample.step) if before is None else (before.since, before.since_step)
            slow[id_] = Straggler(times, against, since, at, sample.step)
    return Speeds(
        generation=watch.generation,
        begun_step=watch.begun_step,
        looked_at=now,
        factors={gpu: statistics.median(factors) for gpu, factors in sorted(by_gpu.items())},
        at_first=at_first,
        slow=slow,
    )


def _grouped(
    samples: Mapping[NodeId, Sample],
) -> tuple[dict[Work, list[float]], dict[str, list[float]]]:
    """Return the factors by equal work and by kind of GPU, each sorted."""
    by_work: defaultdict[Work, list[float]] = defaultdict(list)
    by_gpu: defaultdict[str, list[float]] = defaultdict(list)
    for sample in sorted(samples.values(), key=lambda each: each.factor):
        by_work[sample.work].append(sample.factor)
        by_gpu[sample.gpu].append(sample.factor)
    return by_work, by_gpu


def _median_without(ordered: list[float], one: float) -> float:
    """Return the median of all but one; 0 if there is no other."""
    others = len(ordered) - 1
    if others == 0:
        return 0.0
    place = bisect.bisect_left(ordered, one)

    def other(number: int) -> float:
        return ordered[number if number < place else number + 1]

    return (other((others - 1) // 2) + other(others // 2)) / 2


def worst(ranks: Iterable[tuple[float, float]]) -> tuple[float, float] | None:
    """Return the (measured, predicted) pair of the rank that is furthest behind."""
    known = [(measured, predicted) for measured, predicted in ranks if min(measured, predicted) > 0]
    return max(known, key=lambda pair: pair[0] / pair[1], default=None)
