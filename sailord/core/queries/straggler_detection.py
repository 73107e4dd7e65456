"""Detection of stragglers: nodes that compute slower than predicted for their work.

A prediction may be off for a whole kind of GPU or for some layers, so a node is never compared with
it alone. It is compared with nodes that do the same work on the same kind of GPU; else with all
others of its kind, with room for the error of the prediction; and with its own past at the same
work, less what has become slower for all. No node is judged before ``slow_steps`` steps, and none
is a straggler before it has been slow for ``slow_s``.

What slows all nodes alike, or the steps but no node, is a slowdown of the job: no node is blamed.
"""

from __future__ import annotations

import bisect
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from agents.protocol.records import NodeId
from sailord.core.model.options import Options
from sailord.core.model.stragglers import NodeSpeeds, Past, StepSample, Straggler, WorkKey

PEERS_MIN = 2
"""A node is compared with others of its work or kind only if there are at least this many."""


def look(
    watch: NodeSpeeds,
    samples: Mapping[NodeId, StepSample],
    *,
    now: float,
    relative_error: float,
    options: Options,
    stepped: tuple[float, int] = (0.0, 0),
) -> NodeSpeeds:
    """Compare the present measurements.

    ``relative_error`` is the prediction's; ``stepped``: when the job's last step ended, and which.
    """
    window, settled_at = options.slow_steps, watch.begun_step + options.slow_steps
    settled = {id_: s for id_, s in sorted(samples.items()) if s.step >= settled_at}
    now_of = {id_: Past.begun(s.factor, s.step) for id_, s in settled.items()}
    past = now_of | {
        id_: known.and_now(settled[id_].factor, settled[id_].step, window)
        if id_ in settled
        else known
        for id_, known in watch.past.items()
    }
    by_work, by_gpu = _group_factors(settled)
    grown = sorted(settled[id_].factor / past[id_].best for id_ in settled)
    slow: dict[NodeId, Straggler] = {}
    for id_, sample in settled.items():
        own = sample.factor / past[id_].best
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
        fresh = Straggler(times, against, now, sample.step, sample.step)
        if (one := _keep_slow(fresh, watch.slow.get(id_), options.slow_times)) is not None:
            slow[id_] = one
    late_s = {id_: _late_s(settled[id_], one, watch.slow.get(id_)) for id_, one in slow.items()}
    if late_s:
        worst = max(late_s, key=late_s.__getitem__)
        slow[worst] = replace(slow[worst], delay_s=slow[worst].delay_s + late_s[worst])
    at, step = stepped
    pace = watch.pace.and_now(at, step, window) if step >= settled_at else watch.pace
    of_job = _judge_job(grown, pace.grown, now, step, options.slow_times)
    job = _keep_slow(of_job, watch.job, options.slow_times)
    no_longer = {id_ for id_ in watch.slow if id_ in settled and id_ not in slow}
    return replace(
        watch,
        looked_at=now,
        factors={gpu: statistics.median(factors) for gpu, factors in sorted(by_gpu.items())},
        past=past,
        slow=slow,
        # If all became slow, none is quicker.
        recovered=frozenset() if job is not None else frozenset(no_longer),
        pace=pace,
        job=job,
    )


def _keep_slow(found: Straggler, before: Straggler | None, slow_times: float) -> Straggler | None:
    """Return the straggler if it is slow now; it stays one above (1 + 2 * ``slow_times``) / 3."""
    if before is None:
        return found if found.times > slow_times else None
    if found.times <= (1 + 2 * slow_times) / 3:
        return None
    return replace(found, since=before.since, since_step=before.since_step, delay_s=before.delay_s)


def _late_s(sample: StepSample, slow: Straggler, before: Straggler | None) -> float:
    """Return by how much a slow node delayed the steps since the last look."""
    steps = 0 if before is None else slow.step - before.step
    return sample.measured_s * (1 - 1 / slow.times) * steps


def _judge_job(
    grown: Sequence[float], steps: float, now: float, step: int, slow_times: float
) -> Straggler:
    """Return how slow the job is against its past: its nodes, most of them, or else its steps."""
    most = grown[len(grown) // 4] if grown else 1.0
    if most >= steps or most > max(steps / 2, slow_times):
        return Straggler(most, "before on all nodes alike", now, step, step)
    against = "before for a step, and no node computes as much longer"
    return Straggler(steps, against, now, step, step, verb="takes")


def _group_factors(
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
