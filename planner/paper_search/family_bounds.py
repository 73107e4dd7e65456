"""Families of plans (micro batch, replicas, stages), with a lower bound for each.

A family's bound treats layers as divisible: every GPU works without a pause, and each layer of each
replica takes the best option at given prices of GPU kinds. Any prices give a valid bound, so the
best of a few is taken. With prices ``rho`` on kinds of ``G`` GPUs, and a stage's level ``a`` on TP
``t``::

    (M - 1) max a  >=  (M - 1) / D * sum over replicas and stages of  rho D t / G * a
    sum a          >=        1 / D * sum over replicas and stages of              a
    sync           >=        1 / (D S) * sum of  (least seconds per byte) * bytes / min(4, t)
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.paper_search.formula_tables import LinkNumbers, PaperModel, ring_seconds
from simulator.arrays import Floats, Ints
from simulator.estimate.paper_formula import BUCKET_BYTES, MOST_TP_SHARING_GRADIENTS, overhead_bytes


@dataclass(frozen=True, slots=True)
class Option:
    """One way to run a stage's replica: a GPU kind at a TP degree."""

    kind: int
    gpu: str
    tp: int


@dataclass(frozen=True, slots=True, eq=False)
class OptionArrays:
    """The options of one micro batch size, as arrays."""

    micro_batch: int
    options: tuple[Option, ...]
    kinds: tuple[str, ...]
    gpus: Floats
    """GPUs per kind, over all zones."""
    seconds: Floats
    """[option, layers + 1]: forward plus backward, up to each layer."""
    send_s: Floats
    """[option]: least seconds of a message to any neighbour."""
    capacity_bytes: Floats
    """[option]: the largest among the kind's lots, less the overhead."""
    update_s: float
    """Least seconds of an optimizer step."""
    usd_per_s: Floats
    """[option]: at the lowest price among the kind's lots; 0 where unknown."""

    @property
    def tp(self) -> Floats:
        """TP degree per option."""
        return np.array([float(option.tp) for option in self.options])

    @property
    def kind(self) -> Ints:
        """Index of the GPU kind per option."""
        return np.array([option.kind for option in self.options])


def option_arrays(
    model: PaperModel, micro_batch: int, *, degrees: Sequence[int]
) -> OptionArrays | None:
    """The options of one micro batch size; ``None`` if none was measured.

    Messages take the time of the best link, so that the result bounds all plans.
    """
    kinds = tuple(sorted({lot.gpu for lot in model.lots}))
    options, sends, capacity, updates = [], [], [], []
    ends = []
    for index, gpu in enumerate(kinds):
        lots = [k for k, lot in enumerate(model.lots) if lot.gpu == gpu]
        for tp in model.profile.degrees(gpu):
            usable = [k for k in lots if model.lots[k].room(tp)]
            if not usable or tp not in degrees or not model.measured(lots[0], tp, micro_batch):
                continue
            options.append(Option(index, gpu, tp))
            ends.append([(lot, tp) for lot in usable])
            capacity.append(max(model.capacity_bytes[k] for k in usable) - overhead_bytes(tp))
            updates.append(model.update_s(gpu, tp, micro_batch))
    if not options:
        return None
    sizes = {model.output_bytes(cut, micro_batch) for cut in range(1, model.layers)}
    size = min(sizes, default=0.0)
    every = [end for group in ends for end in group]
    for group in ends:
        sends.append(
            min(
                time
                for one in group
                for other in every
                for time in (model.send_s(*one, *other, size), model.send_s(*other, *one, size))
            )
        )
    by_kind = [[lot for lot in model.lots if lot.gpu == gpu] for gpu in kinds]
    gpus = [sum(lot.gpus for lot in lots) for lots in by_kind]
    prices = [min(lot.price_usd_per_gpu_hour or 0.0 for lot in lots) for lots in by_kind]
    return OptionArrays(
        micro_batch,
        tuple(options),
        kinds,
        np.array(gpus, dtype=float),
        np.array([model.seconds(o.gpu, o.tp, micro_batch) for o in options]),
        np.array(sends),
        np.array(capacity),
        min(updates),
        np.array([option.tp * prices[option.kind] / 3600 for option in options]),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Rings:
    """Seconds of a gradient all-reduce, by GPU kind, bytes and number of replicas."""

    sizes: Floats
    """All byte counts that a stage can have, ascending."""
    seconds: Floats
    """[kind, replicas index, size]."""
    per_byte: Floats
    """[kind, replicas index]: least seconds per byte."""

    def within(self, kind: int, rows: Ints, seconds: Floats) -> Floats:
        """The most bytes that a kind can synchronise within a time, per row of replicas."""
        found = np.zeros(len(rows))
        for row in set(rows.tolist()):
            here = rows == row
            at = np.searchsorted(self.seconds[kind, row], seconds[here] * (1 + 1e-9), side="right")
            found[here] = np.where(at > 0, self.sizes[np.maximum(at - 1, 0)], 0.0)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """Plans of one micro batch size: lower bounds by [replicas, stages]."""

    arrays: OptionArrays
    rings: Rings
    replicas: Floats
    bounds: Floats
    """In seconds."""
    score: Floats
    """In units of the objective."""


def rings_of(
    model: PaperModel, replicas: Sequence[int], *, most: int, known: dict[LinkNumbers, Floats]
) -> Rings:
    """Least ring times of each kind, for every possible stage.

    A ring is at most as fast as the best link of one of its replicas to any other, and as the best
    number of replicas up to the next one in ``replicas``, up to ``most`` at the end: more replicas
    than needed may synchronise faster. ``known`` caches results by link.
    """
    whole = model.gradient_bytes()
    first, end = np.triu_indices(model.layers + 1, 1)
    bytes_of = {round(float(size), 3) for size in whole[end] - whole[first] if size > 0}
    ways = (1, 2, MOST_TP_SHARING_GRADIENTS)
    sizes = np.array(sorted({size / way for size in bytes_of for way in ways}))
    asked = np.array(replicas)
    count = np.arange(1, max(most, asked[-1]) + 1.0)[:, None]
    rows = []
    for kind in sorted({lot.gpu for lot in model.lots}):
        links = _drop_slower(_links(model, kind), float(sizes[0]) / len(count), BUCKET_BYTES)
        for link in links:
            if link not in known or len(known[link]) < len(count):
                known[link] = ring_seconds(link, sizes, count)
        every = [known[link][: len(count)] for link in links] or [
            np.full((len(count), len(sizes)), np.inf)
        ]
        row = np.minimum.reduce(every)
        # Make times monotonic in the size, so that the table is a bound.
        row = np.minimum.accumulate(row[:, ::-1], axis=1)[:, ::-1]
        row = np.minimum.reduceat(np.where(count > 1, row, 0.0), asked - 1, axis=0)
        rows.append(np.where(asked[:, None] > 1, row, 0.0))
    seconds = np.stack(rows)
    per_byte = (seconds / sizes).min(axis=2)
    per_byte = np.where(np.isfinite(per_byte), per_byte, 0.0)
    return Rings(sizes, seconds, per_byte)


def _links(model: PaperModel, kind: str) -> list[LinkNumbers]:
    """The fitted curves of links that a ring with replicas of a kind may use."""
    ends = sorted({(lot.zone, lot.gpu) for lot in model.lots})
    found: dict[LinkNumbers, None] = {}
    for one, other in itertools.product(ends, repeat=2):
        if kind in (one[1], other[1]):
            curve = model.network.measured.raw_between.get((one, other), {}).get((1, 1))
            if curve is not None and curve.polynomial is not None:
                found[curve.polynomial] = None
    return list(found)


def _drop_slower(links: list[LinkNumbers], least: float, most: float) -> list[LinkNumbers]:
    """The links that no other link beats at all message sizes in between."""
    low, high = (float(np.log2(size / 1e6)) for size in (least, most))

    def beats(one: LinkNumbers, other: LinkNumbers) -> bool:
        a, b, c = (x - y for x, y in zip(one, other, strict=True))
        points = [low, high]
        if a and low < -b / (2 * a) < high:
            points.append(-b / (2 * a))
        return all((a * x + b) * x + c >= 0 for x in points)

    kept: list[LinkNumbers] = []
    for link in sorted(links, reverse=True):
        if not any(beats(other, link) for other in kept):
            kept = [other for other in kept if not beats(link, other)] + [link]
    return kept


def price_directions(kinds: int) -> Floats:
    """Weights on GPU kinds that sum to one; each gives a valid bound."""
    if kinds == 1:
        return np.ones((1, 1))
    steps = {2: 8, 3: 5}.get(kinds, 2)
    grid = [
        point for point in itertools.product(range(steps + 1), repeat=kinds) if sum(point) == steps
    ]
    return np.array(grid, dtype=float) / steps


def bounds_of(
    arrays: OptionArrays,
    *,
    micro_batches: Floats,
    replicas: Floats,
    stages: Floats,
    gradient_bytes: Floats,
    rings: Rings,
    directions: Floats,
) -> Floats:
    """Lower bounds of the iteration time, [replicas index, stages index]."""
    rows = np.concatenate(
        [np.diff(arrays.seconds, axis=1), np.diff(gradient_bytes)[None, :]], axis=0
    ).T
    distinct, times = distinct_rows(rows)
    work, gradients = distinct[:, :-1].T, distinct[:, -1]
    sharing = np.minimum(arrays.tp, MOST_TP_SHARING_GRADIENTS)
    sync = gradients[None, :] / sharing[:, None]
    sends = np.where(stages >= 4, 2 * stages, np.where(stages >= 2, 2 * stages - 1, 0))
    best = np.zeros((len(replicas), len(stages)))
    per_byte = rings.per_byte[arrays.kind].T  # [replicas, option]
    share = (per_byte[:, None, :] / stages[None, :, None])[..., None] * sync[None, None]
    for direction, evenly in itertools.product(directions, (0.0, 0.5, 1.0)):
        # [replicas, stages, option]: seconds of the iteration per second of a stage's level. The
        # largest level is at least the stages' mean, which ``evenly`` weighs.
        weight = direction[arrays.kind] * arrays.tp / arrays.gpus[arrays.kind]
        work_rate = (1 - evenly) * replicas[:, None, None] * weight[None, None, :]
        rate = 1 + (micro_batches - 1)[:, None, None] * (work_rate + evenly / stages[None, :, None])
        layers = cheapest_layers(rate, work, times, share)
        best = np.maximum(best, layers + sends[None, :] * (rate * arrays.send_s).min(axis=2))
    return best + arrays.update_s


def distinct_rows(rows: Floats) -> tuple[Floats, Ints]:
    """Distinct rows with their multiplicity, so that equal layers are computed once."""
    found = Counter(map(tuple, rows.tolist()))
    return np.array(list(found)), np.array(list(found.values()))


def cheapest_layers(rate: Floats, work: Floats, times: Ints, more: Floats | None = None) -> Floats:
    """Sum over layers of the least ``rate[..., option] * work[option, layer] + more``.

    Equal layers occur once in ``work``; ``times`` has their multiplicity.
    """
    least: Floats | None = None
    for o in range(work.shape[0]):
        one: Floats = rate[..., o, None] * work[o]
        if more is not None:
            one += more[..., o, :]
        least = one if least is None else np.minimum(least, one, out=least)
    assert least is not None
    summed: Floats = least @ times
    return summed


def cost_bounds_of(
    arrays: OptionArrays,
    *,
    global_batch: int,
    replicas: Floats,
    stages: Floats,
    gradient_bytes: float,
    rings: Rings,
) -> Floats:
    """Lower bounds of an iteration's dollars, [replicas index, stages index].

    A group is paid for during the whole iteration, which lasts at least its own work on all micro
    batches, one micro batch on the other stages, the synchronisation and the optimizer step.
    """
    work = (np.diff(arrays.seconds, axis=1) * arrays.usd_per_s[:, None]).min(axis=0).sum()
    cheapest = float(arrays.usd_per_s.min())
    others = (stages - 1) * float(arrays.seconds[:, -1].min())
    per_byte = rings.per_byte.min(axis=0)
    sync = per_byte[:, None] * gradient_bytes / MOST_TP_SHARING_GRADIENTS / stages[None, :]
    waiting = replicas[:, None] * cheapest * (others + stages * (sync + arrays.update_s))
    found: Floats = global_batch // arrays.micro_batch * work + waiting
    return found
