"""Detection of stragglers: nodes that compute slower than predicted for their work.

A prediction may be off for a whole kind of GPU or for some layers, so a node is never compared with
it alone. It is compared with nodes that do the same work on the same kind of GPU; else with all
others of its kind, with room for the error of the prediction; and with its own past at the same
work, less what has become slower for all. No node is judged before ``slow_steps`` steps, and none
is a straggler before it has been slow for ``slow_s``.
"""

from __future__ import annotations

import bisect
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

from agents.protocol.records import NodeId
from sailord.core.model.options import Options
from sailord.core.model.stragglers import NodeSpeeds, StepSample, Straggler, WorkKey

PEERS_MIN = 2
"""A node is compared with others of its work or kind only if there are at least this many."""


def look(
    watch: NodeSpeeds,
    samples: Mapping[NodeId, StepSample],
    *,
    now: float,
    relative_error: float,
    options: Options,
) -> NodeSpeeds:
    """Compare the present measurements; ``relative_error`` is the prediction's."""
    settled = {
        id_: sample
        for id_, sample in sorted(samples.items())
        if sample.step >= watch.begun_step + options.slow_steps
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
        if times > options.slow_times:
            before = watch.slow.get(id_)
            since, at = (now, sample.step) if before is None else (before.since, before.since_step)
            slow[id_] = Straggler(times, against, since, at, sample.step)
    return replace(
        watch,
        looked_at=now,
        factors={gpu: statistics.median(factors) for gpu, factors in sorted(by_gpu.items())},
        at_first=at_first,
        slow=slow,
    )


def _grouped(
    samples: Mapping[NodeId, StepSample],
) -> tuple[dict[WorkKey, list[float]], dict[str, list[float]]]:
    """Return the factors by equal work and by kind of GPU, each sorted."""
    by_work: defaultdict[WorkKey, list[float]] = defaultdict(list)
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
