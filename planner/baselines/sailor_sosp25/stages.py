"""Stages in the SOSP'25 paper's planner: equal layer counts, and TP degrees by rule."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from planner.baselines.sailor_sosp25.cost import MeasuredGpu, Sosp25Inputs
from planner.compare.interface import Mode
from simulator.estimate.paper_formula import STATE_BYTES_PER_PARAMETER, overhead_bytes
from simulator.spec.plan import equal_cuts

SPEEDUP_LEAST = 1.5
"""A TP degree must be faster than the one before by this factor to be worth its GPUs."""


def stage_fits(
    inputs: Sosp25Inputs, kind: MeasuredGpu, tp: int, b: int, cut: tuple[int, int], following: int
) -> bool:
    """The memory check: one micro batch in flight for the stage and for each that follows."""
    first, end = cut
    states = STATE_BYTES_PER_PARAMETER * (inputs.parameters[tp][end] - inputs.parameters[tp][first])
    kept = inputs.float_bytes * b * (inputs.kept[tp][end] - inputs.kept[tp][first])
    needed = states + kept * following + overhead_bytes(tp)
    return bool(needed <= kind.capacity_bytes)


def tp_by_rule(
    inputs: Sosp25Inputs, kind: int, b: int, cut: tuple[int, int], following: int, mode: Mode
) -> int | None:
    """The TP degree of a stage on a GPU kind: the least that fits, or a larger one that still pays.

    On a mixed cluster the first kind takes the least that fits.
    """
    one = inputs.kinds[kind]
    degrees = one.degrees()
    if mode == "fixed":
        degrees = [tp for tp in degrees if (tp, b) in one.seconds]
    least = next((tp for tp in degrees if stage_fits(inputs, one, tp, b, cut, following)), None)
    if least is None or (kind == 0 and len(inputs.kinds) > 1):
        return least
    worthwhile, before = 0, 1000.0
    for tp in degrees:
        # Kept: unmeasured times count as 0 s, and so as the greatest gain.
        row = one.seconds.get((tp, b))
        now = 0.0 if row is None else float(row[cut[1]] - row[cut[0]])
        if now > 0 and before / now < SPEEDUP_LEAST:
            break
        worthwhile, before = tp, now
    return max(worthwhile, least)


@dataclass(frozen=True, slots=True)
class Sosp25Shape:
    """Stages of one micro batch size: boundaries, TP by kind, and least times."""

    b: int
    cuts: tuple[int, ...]
    tps: tuple[tuple[int, ...], ...]
    """Per stage and kind; 0 for a kind that cannot hold every stage or lacks times for such a b."""
    tps_least: tuple[tuple[int, ...], ...]
    """Least TP degree of each stage and those after it, by kind."""
    compute_least: tuple[float, ...]
    straggler_least: tuple[float, ...]
    usd_per_s_least: tuple[float, ...]

    @property
    def stages(self) -> int:
        return len(self.tps)

    def least_s(self, inputs: Sosp25Inputs, replicas: int) -> float:
        """Lower bound of the time of plans with this many replicas."""
        most = math.ceil(inputs.global_batch / (self.b * replicas))
        return (most - 1) * self.straggler_least[0] + self.compute_least[0]

    @classmethod
    def of(cls, inputs: Sosp25Inputs, stages: int, b: int, mode: Mode) -> Sosp25Shape:
        cuts = equal_cuts(inputs.layers, stages)
        ranges = list(itertools.pairwise(cuts))
        kinds = range(len(inputs.kinds))
        by_kind = []
        for kind in kinds:
            row = [
                tp_by_rule(inputs, kind, b, cut, stages - s, mode) for s, cut in enumerate(ranges)
            ]
            known = b <= max(size for _, size in inputs.kinds[kind].seconds)
            by_kind.append([tp or 0 for tp in row] if all(row) and known else [0] * stages)
        tps = tuple(zip(*by_kind, strict=True))
        compute, straggler, usd = [0.0], [0.0], [0.0]
        for (first, end), row in zip(reversed(ranges), reversed(tps), strict=True):
            times = [
                float(seconds[end] - seconds[first])
                for kind, tp in zip(inputs.kinds, row, strict=True)
                if tp and (seconds := kind.seconds.get((tp, b))) is not None
            ]
            least = min(times, default=0.0)
            compute.insert(0, compute[0] + least)
            straggler.insert(0, max(straggler[0], least))
            prices = [k.usd_per_s * tp for k, tp in zip(inputs.kinds, row, strict=True) if tp]
            usd.insert(0, usd[0] + min(prices, default=0.0))
        tps_least = tuple(tuple(map(min, zip(*tps[s:], strict=True))) for s in range(stages))
        return cls(b, cuts, tps, tps_least, tuple(compute), tuple(straggler), tuple(usd))
