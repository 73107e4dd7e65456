"""The paper's formula written a second time, as plainly as possible, for every plan of a case."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from simulator.cluster.cluster import Pool
from tests.planner.small_cases import SmallCase

Cell = tuple[Pool, int]
"""A replica of a stage: its pool and TP degree."""
Grid = tuple[tuple[Cell, ...], ...]
"""[stage][pipeline]."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one plan takes, at the cheapest division of the micro batches."""

    seconds: float
    usd: float


def outcomes(case: SmallCase) -> list[Outcome]:
    """Every plan that is valid, fits its memory and finds its GPUs."""
    found = []
    for micro_batch in (1, 2, 4):
        if case.job.global_batch % micro_batch:
            continue
        layers = len(case.job.model.layers)
        gpus = sum(pool.gpus for pool in case.cluster.pools)
        for pipelines in range(1, min(gpus, case.job.global_batch // micro_batch) + 1):
            for stages in range(1, min(layers, gpus // pipelines) + 1):
                for grid in _grids(case, stages, pipelines):
                    for inner in itertools.combinations(range(1, layers), stages - 1):
                        one = _judge(case, micro_batch, (0, *inner, layers), grid)
                        if one is not None:
                            found.append(one)
    return found


def _grids(case: SmallCase, stages: int, pipelines: int) -> Iterator[Grid]:
    cells = [(pool, tp) for pool in case.cluster.pools for tp in (1, 2, 4) if tp <= pool.gpus]
    chosen: list[Cell] = []

    def fill() -> Iterator[Grid]:
        if len(chosen) == stages * pipelines:
            yield tuple(tuple(chosen[s * pipelines : (s + 1) * pipelines]) for s in range(stages))
            return
        for cell in cells:
            chosen.append(cell)
            if _packs([tp for pool, tp in chosen if pool is cell[0]], cell[0]):
                yield from fill()
            chosen.pop()

    return fill()


def _packs(groups: list[int], pool: Pool) -> bool:
    """Whether groups find machines that hold each of them whole."""
    whole, rest = divmod(pool.gpus, pool.gpus_per_machine)
    room = [pool.gpus_per_machine] * whole + [rest]
    for group in sorted(groups, reverse=True):
        at = next((n for n, left in enumerate(room) if left >= group), None)
        if at is None:
            return False
        room[at] -= group
    return True


def _judge(case: SmallCase, b: int, cuts: tuple[int, ...], grid: Grid) -> Outcome | None:
    profile, stages, count = case.profile, len(grid), len(grid[0])
    last = stages - 1
    levels, syncs, update = [], [], 0.0
    egress_once, egress_each = 0.0, [0.0] * count
    for s, column in enumerate(grid):
        layers = range(cuts[s], cuts[s + 1])
        compute = 0.0
        for pool, tp in column:
            timing, sizes = profile.timings[pool.gpu, tp, b], profile.sizes[tp]
            seconds = sum(timing.forward_s[n] + timing.backward_s[n] for n in layers)
            compute = max(compute, float(seconds))
            update = max(update, timing.optimizer_s or 0.0)
            held = sum(24 * sizes.parameters[n] for n in layers)
            held += sum(4 * b * sizes.kept_elements[n] * (stages - s) for n in layers)
            most = float(case.cluster.catalogue.gpu(pool.gpu).memory_bytes)
            if held + (2e9 if tp == 1 else 3e9) > most:
                return None
        ahead = back = 0.0
        if s < last:
            size = 4.0 * profile.sizes[1].output_elements[cuts[s + 1] - 1] * b
            pairs = list(zip(column, grid[s + 1], strict=True))
            ahead = max(_send_s(case, one, other, size) for one, other in pairs)
            for j, (one, other) in enumerate(pairs):
                egress_each[j] += size * (_usd(case, one, other) + _usd(case, other, one))
        if s > 0:
            size = 4.0 * profile.sizes[1].output_elements[cuts[s] - 1] * b
            pairs = list(zip(column, grid[s - 1], strict=True))
            back = max(_send_s(case, one, other, size) for one, other in pairs)
        if stages == 1:
            sent = 0.0
        elif s == 0:
            sent = ahead if stages <= 3 else 2 * ahead
        else:
            sent = 2 * back if s == last else ahead + back
        levels.append(compute + sent)
        whole = sum(4.0 * profile.sizes[1].parameters[n] for n in layers)
        syncs.append(_sync_s(case, column, whole))
        if count > 1:
            around = zip(column, column[1:] + column[:1], strict=True)
            egress_once += sum(
                2 * (count - 1) * whole / count * _usd(case, one, other) for one, other in around
            )
    total = case.job.global_batch // b
    most_batches = -(-total // count)
    seconds = (most_batches - 1) * max(levels) + sum(levels) + max(syncs) + update
    if not math.isfinite(seconds):
        return None
    # Pipelines that cost most to feed run as few micro batches as the time allows.
    left = total - count
    for each in sorted(egress_each):
        more = min(left, most_batches - 1)
        egress_once += each * (1 + more)
        left -= more
    hourly = sum(tp * (pool.price_usd_per_gpu_hour or 0.0) for row in grid for pool, tp in row)
    return Outcome(seconds, seconds * hourly / 3600 + egress_once)


def _sync_s(case: SmallCase, column: tuple[Cell, ...], whole: float) -> float:
    count = len(column)
    size = whole / min(4, *(tp for _, tp in column), 4)
    slowest = 0.0
    for (one, _), (other, _) in itertools.pairwise(column):
        step = _send_s(case, (one, 1), (other, 1), size % 5e8 / count)
        if size >= 5e8:
            step += size // 5e8 * _send_s(case, (one, 1), (other, 1), 5e8 / count)
        slowest = max(slowest, 2 * (count - 1) * step)
    return slowest


def _send_s(case: SmallCase, one: Cell, other: Cell, size: float) -> float:
    if size <= 0:
        return 0.0
    ends = tuple((pool.zone, pool.gpu) for pool, _ in (one, other))
    curve = case.measurements.network.raw_between[ends[0], ends[1]][one[1], other[1]]
    assert curve.polynomial is not None
    a, b, c = curve.polynomial
    scaled = math.log2(size / 1e6)
    speed = (a * scaled**2 + b * scaled + c) * 1e9
    return size / speed if speed > 0 else math.inf


def _usd(case: SmallCase, one: Cell, other: Cell) -> float:
    return case.measurements.network.egress_usd_per_byte[one[0].zone, other[0].zone]
