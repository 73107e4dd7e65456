"""Families of plans (micro batch, replicas, stages), and a lower bound for each of them.

A family's bound spreads the work as if layers could be cut anywhere: every GPU works without a
pause, each layer of each replica on the option that serves it best at given prices of GPU
kinds. Any prices give a valid bound, so a few are tried and the best is taken. With prices
``rho`` on kinds of ``G`` GPUs, and a stage's level ``a`` on TP ``t``::

    (M - 1) max a  >=  (M - 1) / D * sum over replicas and stages of  rho D t / G * a
    sum a          >=        1 / D * sum over replicas and stages of              a
    sync           >=        1 / (D S) * sum of  (least seconds per byte) * bytes / min(4, t)
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.paper_model import PaperModel
from simulator.paper import BUCKET_BYTES, MOST_TP_SHARING_GRADIENTS

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Option:
    """One way to run a stage's replica: a GPU kind at a TP degree."""

    kind: int
    gpu: str
    tp: int


@dataclass(frozen=True, slots=True, eq=False)
class Menu:
    """All that a search needs to know of one micro batch size, as arrays over options."""

    micro_batch: int
    options: tuple[Option, ...]
    kinds: tuple[str, ...]
    gpus: Array
    """GPUs per kind, over all zones."""
    seconds: Array
    """[option, layers + 1]: forward and backward up to each layer."""
    send_s: Array
    """[option]: the least time of a message to any neighbour."""
    capacity_bytes: Array
    """[option]: the largest among the kind's lots, less the overhead."""
    update_s: float
    """The least optimizer step."""
    usd_per_s: Array
    """[option]: at the least price among the kind's lots; 0 where none is known."""

    @property
    def tp(self) -> Array:
        return np.array([float(option.tp) for option in self.options])

    @property
    def kind(self) -> NDArray[np.int64]:
        return np.array([option.kind for option in self.options])


def menu_of(
    model: PaperModel,
    micro_batch: int,
    *,
    max_tp: int,
    sites: Sequence[Sequence[int]],
    hopeful: bool,
) -> Menu | None:
    """The options of one micro batch size, or none where nothing was measured.

    Messages stay within a site. They take the time of the best link if ``hopeful``, as a bound
    needs it, and of the worst between groups of equal TP if not, as a plan may get it.
    """
    chosen = sorted({lot for site in sites for lot in site})
    kinds = tuple(sorted({model.lots[lot].gpu for lot in chosen}))
    options, sends, capacity, updates = [], [], [], []
    ends = []
    for index, gpu in enumerate(kinds):
        lots = [k for k in chosen if model.lots[k].gpu == gpu]
        for tp in model.profile.degrees(gpu):
            usable = [k for k in lots if model.lots[k].room(tp)]
            if (
                not usable
                or tp > max_tp
                or tp & (tp - 1)
                or (gpu, tp, micro_batch) not in model.profile.timings
                or tp not in model.profile.sizes
            ):
                continue
            options.append(Option(index, gpu, tp))
            ends.append([(lot, tp) for lot in usable])
            capacity.append(max(model.capacity_bytes[k] for k in usable) - model.overhead_bytes(tp))
            updates.append(model.update_s(gpu, tp, micro_batch))
    if not options:
        return None
    sizes = {model.output_bytes(cut, micro_batch) for cut in range(1, model.layers)}
    size = min(sizes, default=0.0)
    site_of = {lot: {n for n, site in enumerate(sites) if lot in site} for lot in chosen}
    every = [end for group in ends for end in group]
    for group in ends:
        times = [
            time
            for one in group
            for other in every
            if site_of[one[0]] & site_of[other[0]] and (hopeful or one[1] == other[1])
            for time in (model.send_s(*one, *other, size), model.send_s(*other, *one, size))
        ]
        sends.append(min(times) if hopeful else max(times))
    gpus = [sum(model.lots[k].gpus for k in chosen if model.lots[k].gpu == gpu) for gpu in kinds]
    prices = [
        min(model.lots[k].price_usd_per_gpu_hour or 0.0 for k in chosen if model.lots[k].gpu == gpu)
        for gpu in kinds
    ]
    return Menu(
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
    """Least seconds of a gradient all-reduce, by bytes and number of replicas."""

    sizes: Array
    """All the byte counts that a stage can have, ascending."""
    seconds: Array
    """[replicas index, size]."""
    per_byte: Array
    """[replicas index]."""

    def table(self, sizes: Array) -> Array:
        """[replicas index, size]: seconds for the smallest known size that is no smaller."""
        positions = np.searchsorted(self.sizes, sizes * (1 - 1e-12))
        found: Array = self.seconds[:, np.minimum(positions, len(self.sizes) - 1)]
        return found


def rings_of(
    model: PaperModel, replicas: Sequence[int], *, lots: Sequence[int], hopeful: bool
) -> Rings:
    """The rings for every possible stage, over the best link of some lots, or over the worst."""
    whole = model.gradient_bytes()
    layers = model.layers
    first, end = np.triu_indices(layers + 1, 1)
    sizes = np.unique(np.round(whole[end] - whole[first], 3))
    ways = [tp for tp in (1, 2, 4) if tp <= MOST_TP_SHARING_GRADIENTS]
    sizes = np.unique(np.concatenate([sizes / way for way in ways]))
    sizes = sizes[sizes > 0]
    curves = {}
    ends = sorted({(model.lots[lot].zone, model.lots[lot].gpu) for lot in lots})
    for one, other in itertools.product(ends, repeat=2):
        curve = model.network.measured.raw_between.get((one, other), {}).get((1, 1))
        if curve is not None and curve.polynomial is not None:
            curves[curve.polynomial] = curve
    count = np.array(replicas, dtype=float)[:, None]
    full, rest = np.divmod(sizes, BUCKET_BYTES)

    def step_s(size: Array) -> Array:
        best = np.full(size.shape, np.inf if hopeful else 0.0)
        scaled = np.log2(np.maximum(size, 1e-3) / 1e6)
        for square, linear, constant in curves:
            speed = (square * scaled * scaled + linear * scaled + constant) * 1e9
            usable = speed > 0
            time = np.where(usable, size / np.where(usable, speed, 1.0), np.inf)
            best = np.minimum(best, time) if hopeful else np.maximum(best, time)
        return np.where(size > 0, best, 0.0)

    with np.errstate(invalid="ignore"):
        bucket_s = np.where(full > 0, full * step_s(BUCKET_BYTES / count), 0.0)
    with np.errstate(invalid="ignore"):
        seconds = 2 * (count - 1) * (step_s(rest / count) + bucket_s)
    seconds = np.where(count > 1, seconds, 0.0)
    # Larger stages never count as quicker: the table serves as a bound.
    if hopeful:
        seconds = np.minimum.accumulate(seconds[:, ::-1], axis=1)[:, ::-1]
    with np.errstate(invalid="ignore"):
        per_byte = (seconds / sizes).min(axis=1)
    return Rings(sizes, seconds, np.where(np.isfinite(per_byte), per_byte, 0.0))


def price_directions(kinds: int) -> Array:
    """Weights on GPU kinds that sum to one; a bound may try any of them."""
    if kinds == 1:
        return np.ones((1, 1))
    steps = {2: 8, 3: 5}.get(kinds, 2)
    grid = [
        point for point in itertools.product(range(steps + 1), repeat=kinds) if sum(point) == steps
    ]
    return np.array(grid, dtype=float) / steps


def bounds_of(
    menu: Menu,
    *,
    micro_batches: Array,
    replicas: Array,
    stages: Array,
    gradient_bytes: Array,
    rings: Rings,
    directions: Array,
) -> Array:
    """Lower bounds of the iteration, [replicas index, stages index]."""
    rows = np.concatenate(
        [np.diff(menu.seconds, axis=1), np.diff(gradient_bytes)[None, :]], axis=0
    ).T
    # Equal layers are computed once.
    distinct, times = np.unique(rows, axis=0, return_counts=True)
    work, gradients = distinct[:, :-1].T, distinct[:, -1]
    sharing = np.minimum(menu.tp, MOST_TP_SHARING_GRADIENTS)
    sync = gradients[None, :] / sharing[:, None]
    sends = np.where(stages >= 4, 2 * stages, np.where(stages >= 2, 2 * stages - 1, 0))
    best = np.zeros((len(replicas), len(stages)))
    share = (rings.per_byte[:, None] / stages[None, :])[:, :, None, None] * sync[None, None]
    for direction, evenly in itertools.product(directions, (0.0, 0.5, 1.0)):
        # [replicas, stages, option]: seconds of the iteration per second of a stage's level.
        # The largest level is no less than the stages' mean, which counts for ``evenly``.
        weight = direction[menu.kind] * menu.tp / menu.gpus[menu.kind]
        work_rate = (1 - evenly) * replicas[:, None, None] * weight[None, None, :]
        rate = 1 + (micro_batches - 1)[:, None, None] * (work_rate + evenly / stages[None, :, None])
        layers = (rate[..., None] * work[None, None] + share).min(axis=2) @ times
        best = np.maximum(best, layers + sends[None, :] * (rate * menu.send_s).min(axis=2))
    return best + menu.update_s


def cost_bounds_of(
    menu: Menu,
    *,
    global_batch: int,
    replicas: Array,
    stages: Array,
    gradient_bytes: float,
    rings: Rings,
) -> Array:
    """Lower bounds of an iteration's dollars, [replicas index, stages index].

    A group is paid for as long as the iteration lasts, which is no shorter than its own work on
    all micro batches, one micro batch on the other stages, the sync and the optimizer step.
    """
    work = (np.diff(menu.seconds, axis=1) * menu.usd_per_s[:, None]).min(axis=0).sum()
    cheapest = float(menu.usd_per_s.min())
    others = (stages - 1) * float(menu.seconds[:, -1].min())
    sync = rings.table(gradient_bytes / MOST_TP_SHARING_GRADIENTS / stages)
    # The table rounds sizes up; what lies just below bounds from below.
    sync = np.minimum(sync, rings.per_byte[:, None] * gradient_bytes / 4 / stages[None, :])
    waiting = replicas[:, None] * cheapest * (others + stages * (sync + menu.update_s))
    found: Array = global_batch // menu.micro_batch * work + waiting
    return found
