"""The paper's formula on plans in short form, for searches that evaluate it very often.

A plan whose pipelines share their boundaries is a table of stages by replicas, and equal adjacent
replicas form runs. The formula depends on the runs alone, so a plan for thousands of GPUs is as
cheap to judge as one for ten.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from planner.pipelines.plan_shape import PlanShape, Run, paired
from planner.problem.inventory import Lot
from simulator.arrays import Floats, Ints, prefix_sums
from simulator.documents.problems import InputError
from simulator.estimate.dollars import UsdPerHour
from simulator.estimate.paper_formula import (
    BUCKET_BYTES,
    FP32_BYTES,
    MOST_TP_SHARING_GRADIENTS,
    STATE_BYTES_PER_PARAMETER,
    all_reduce_s,
    overhead_bytes,
    sent_s,
)
from simulator.layer_costs.profile import Profile
from simulator.network.network import Network
from simulator.spec.plan import Pipeline, Plan, Stage

LinkNumbers = tuple[float, float, float]
"""Polynomial of a fitted bandwidth curve."""
LAYER_ROUNDING = 1e-12
"""Relative tolerance for sums of layer times, so that rounding never costs a layer."""


@dataclass(frozen=True, slots=True)
class FormulaEstimate:
    """The formula's result for a shape."""

    seconds: float
    usd: float | None
    egress_usd: float
    levels: tuple[float, ...]
    """Seconds per micro batch of each stage, its messages included."""
    sync_s: float
    usd_per_hour: float | None


def micro_batch_counts(total: int, pipelines: int) -> tuple[int, int]:
    """Least possible maximum of micro batches per pipeline, and the pipelines that run it."""
    most = -(-total // pipelines)
    return most, total - (most - 1) * pipelines


@dataclass(eq=False)
class PaperModel:
    """The formula's tables for one case."""

    profile: Profile
    network: Network
    lots: tuple[Lot, ...]
    capacity_bytes: tuple[float, ...]
    """Usable memory of a device, per lot."""
    global_batch: int
    usd_per_hour_of: UsdPerHour
    _sums: dict[tuple[str, int, int], Floats] = field(default_factory=dict)
    _sends: dict[tuple[int, int, int, int, float], float] = field(default_factory=dict)
    _rents: dict[tuple[int, int], float | None] = field(default_factory=dict)
    """Dollars per hour by lot and number of GPUs."""

    def __post_init__(self) -> None:
        whole = self.profile.sizes[1]
        self._output = tuple(float(FP32_BYTES * n) for n in whole.output_elements)
        self._gradient = FP32_BYTES * prefix_sums(whole.parameters)
        sizes = self.profile.sizes.items()
        self._parameters = {tp: prefix_sums(one.parameters) for tp, one in sizes}
        self._kept = {tp: prefix_sums(one.kept_elements) for tp, one in sizes}

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.profile.layer_names)

    def measured(self, lot: int, tp: int, micro_batch: int) -> bool:
        """Whether the profile covers this GPU kind, TP degree and micro batch."""
        known = (self.lots[lot].gpu, tp, micro_batch) in self.profile.timings
        return known and tp in self.profile.sizes

    # -- tables ---------------------------------------------------------------------------------

    def seconds(self, gpu: str, tp: int, micro_batch: int) -> Floats:
        """Forward plus backward seconds, summed up to each layer."""
        key = (gpu, tp, micro_batch)
        found = self._sums.get(key)
        if found is None:
            timing = self.profile.timings[key]
            found = self._sums[key] = prefix_sums(timing.forward_s + timing.backward_s)
        return found

    def update_s(self, gpu: str, tp: int, micro_batch: int) -> float:
        """Seconds of the optimizer step."""
        return self.profile.timings[gpu, tp, micro_batch].optimizer_s or 0.0

    def output_bytes(self, cut: int, micro_batch: int) -> float:
        """Bytes sent over the boundary in front of layer ``cut``."""
        return self._output[cut - 1] * micro_batch

    def gradient_bytes(self) -> Floats:
        """Gradient bytes up to each layer on one device at TP 1."""
        return self._gradient

    def memory(self, tp: int, micro_batch: int, following: int) -> Floats:
        """Bytes that grow with layers, up to each layer; ``following`` counts the stage too."""
        states = STATE_BYTES_PER_PARAMETER * self._parameters[tp]
        row: Floats = states + FP32_BYTES * micro_batch * following * self._kept[tp]
        return row

    def send_s(self, one: int, tp: int, other: int, tp_other: int, size: float) -> float:
        """Seconds of a message between groups on two lots; infinite without a fitted speed."""
        if size <= 0:
            return 0.0
        key = (one, tp, other, tp_other, size)
        found = self._sends.get(key)
        if found is None:
            a, b = self.lots[one], self.lots[other]
            curves = self.network.measured.raw_between.get(((a.zone, a.gpu), (b.zone, b.gpu)), {})
            counts = (min(tp, a.gpus_per_machine), min(tp_other, b.gpus_per_machine))
            curve = curves.get(counts)
            if curve is None or curve.polynomial is None:
                found = math.inf
            else:
                speed = curve.polynomial_bytes_per_s(size)
                found = size / speed if speed > 0 else math.inf
            self._sends[key] = found
        return found

    def ring_s(self, one: int, other: int, size: float, replicas: int) -> float:
        """Seconds of a gradient all-reduce whose slowest link is between two lots."""
        return all_reduce_s(size, replicas, lambda each: self.send_s(one, 1, other, 1, each))

    def egress_usd_per_byte(self, one: int, other: int) -> float:
        """Dollars per byte between two lots; infinite where unknown."""
        zones = self.lots[one].zone, self.lots[other].zone
        try:
            return self.network.egress_usd_per_byte(*zones)
        except InputError:
            return math.inf

    # -- the formula ----------------------------------------------------------------------------

    def judge(self, shape: PlanShape) -> FormulaEstimate:
        """Time and cost; infinite time where the formula rejects the plan."""
        b, replicas = shape.micro_batch, shape.replicas
        most, _ = micro_batch_counts(self.global_batch // b, replicas)
        compute = []
        update = 0.0
        for s, column in enumerate(shape.columns):
            slowest = 0.0
            for gpu, tp in {(self.lots[lot].gpu, tp) for lot, tp, _ in column}:
                row = self.seconds(gpu, tp, b)
                slowest = max(slowest, float(row[shape.cuts[s + 1]] - row[shape.cuts[s]]))
                update = max(update, self.update_s(gpu, tp, b))
            compute.append(slowest)
        ahead, back = [], [0.0]
        for s in range(shape.stages - 1):
            size = self.output_bytes(shape.cuts[s + 1], b)
            pairs = {(one, other) for one, other, _, _ in paired(*shape.columns[s : s + 2])}
            ahead.append(max(self.send_s(*one, *other, size) for one, other in pairs))
            back.append(max(self.send_s(*other, *one, size) for one, other in pairs))
        rates = self._egress_rates(shape)
        egress = float(rates @ self._counts(shape, rates)) if rates.any() else 0.0
        ahead.append(0.0)
        levels = [
            seconds + sent_s(s, shape.stages, ahead[s], back[s])
            for s, seconds in enumerate(compute)
        ]
        sync = 0.0
        for s, column in enumerate(shape.columns):
            whole = float(self._gradient[shape.cuts[s + 1]] - self._gradient[shape.cuts[s]])
            ways = min(MOST_TP_SHARING_GRADIENTS, *(tp for _, tp, _ in column))
            for sender, receiver in _ring(column):
                sync = max(sync, self.ring_s(sender, receiver, whole / ways, replicas))
            if replicas > 1:
                each = 2 * (replicas - 1) * whole / replicas
                closing = (column[-1][0], column[0][0])
                for (sender, _, _), (receiver, _, _) in pairwise(column):
                    egress += each * self.egress_usd_per_byte(sender, receiver)
                egress += each * self.egress_usd_per_byte(*closing)
        total = (most - 1) * max(levels) + sum(levels) + update + sync
        hourly = self.usd_per_hour(shape)
        if not math.isfinite(egress):
            total = math.inf  # The egress price is unknown.
        usd = None if hourly is None else hourly / 3600 * total + egress
        return FormulaEstimate(total, usd, egress, tuple(levels), sync, hourly)

    def _egress_rates(self, shape: PlanShape) -> Floats:
        """Dollars of each pipeline's messages per micro batch."""
        rates = np.zeros(shape.replicas)
        for s in range(shape.stages - 1):
            size = self.output_bytes(shape.cuts[s + 1], shape.micro_batch)
            for one, other, first, count in paired(*shape.columns[s : s + 2]):
                usd = self.egress_usd_per_byte(one[0], other[0])
                usd += self.egress_usd_per_byte(other[0], one[0])
                if usd:
                    rates[first : first + count] += usd * size
        return rates

    def _counts(self, shape: PlanShape, rates: Floats) -> Ints:
        """Micro batches per pipeline; only the largest count affects the time.

        Where egress costs, the pipelines with the dearest messages run as few as possible.
        """
        total = self.global_batch // shape.micro_batch
        most, with_most = micro_batch_counts(total, shape.replicas)
        if (rates == rates[0]).all():
            return np.where(np.arange(shape.replicas) < with_most, most, most - 1)
        counts = np.ones(shape.replicas, dtype=np.int64)
        left = total - shape.replicas
        for index in np.argsort(rates, kind="stable"):
            counts[index] += min(most - 1, left)
            left -= min(most - 1, left)
        return counts

    def usd_per_hour(self, shape: PlanShape) -> float | None:
        """Hourly rent of a shape's GPUs; ``None`` where a price is unknown."""
        gpus: dict[int, int] = {}
        for column in shape.columns:
            for lot, tp, count in column:
                gpus[lot] = gpus.get(lot, 0) + tp * count
        total = 0.0
        for lot, count in gpus.items():
            key = (lot, count)
            if key not in self._rents:
                self._rents[key] = self.usd_per_hour_of(self.lots[lot].place, count, None)
            usd = self._rents[key]
            if usd is None:
                return None
            total += usd
        return total

    def fits(self, shape: PlanShape) -> bool:
        """The formula's own memory check."""
        for s, column in enumerate(shape.columns):
            first, end = shape.cuts[s], shape.cuts[s + 1]
            for lot, tp, _ in column:
                row = self.memory(tp, shape.micro_batch, shape.stages - s)
                if row[end] - row[first] + overhead_bytes(tp) > self.capacity_bytes[lot]:
                    return False
        return True

    def allows(
        self, _cuts: tuple[int, ...], _s: int, _gpu: str, _tp: int, _micro_batch: int, /
    ) -> bool:
        """Whether a kind may run a stage at a TP degree; here always."""
        return True

    def to_plan(self, shape: PlanShape) -> Plan:
        """The plan written out pipeline by pipeline."""
        counts = self._counts(shape, self._egress_rates(shape))
        columns = []
        for s, column in enumerate(shape.columns):
            layers = (shape.cuts[s], shape.cuts[s + 1])
            replicas: list[Stage] = []
            for lot, tp, count in column:
                replicas += [Stage(layers, tp, (self.lots[lot].place,))] * count
            columns.append(replicas)
        return Plan(
            shape.micro_batch,
            tuple(
                Pipeline(int(count), stages)
                for count, stages in zip(counts, zip(*columns, strict=True), strict=True)
            ),
        )


def message_s(link: LinkNumbers, size: Floats) -> Floats:
    """Seconds of a message over a link; infinite where the fitted bandwidth is not positive."""
    scaled = np.log2(np.maximum(size, 1e-3) / 1e6)
    speed = (link[0] * scaled * scaled + link[1] * scaled + link[2]) * 1e9
    time = np.where(speed > 0, size / np.where(speed > 0, speed, 1.0), np.inf)
    found: Floats = np.where(size > 0, time, 0.0)
    return found


def ring_seconds(link: LinkNumbers, size: Floats, replicas: Floats) -> Floats:
    """``all_reduce_s`` over one link for arrays; that of two replicas where there is one."""
    full, rest = np.divmod(size, BUCKET_BYTES)
    bucket_s = message_s(link, BUCKET_BYTES / replicas)
    step_s = message_s(link, rest / replicas)
    step_s = step_s + np.where(full > 0, np.maximum(full, 1) * bucket_s, 0.0)
    found: Floats = 2 * np.maximum(replicas - 1, 1) * step_s
    return found


def _ring(column: tuple[Run, ...]) -> set[tuple[int, int]]:
    """Lots of consecutive replicas; the pair that closes the ring does not affect the time."""
    found = {(lot, lot) for lot, _, count in column if count > 1}
    found.update((one[0], other[0]) for one, other in pairwise(column))
    return found
