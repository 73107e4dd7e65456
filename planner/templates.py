"""Pipelines to build a fleet of: boundaries balanced for given GPU kinds, within their memory."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from planner.supply import Lot
from simulator.costs import LayerCosts
from simulator.job import OPTIMIZER_MOMENTS
from simulator.memory import RESERVED_OVER_LIVE
from simulator.network import Network
from simulator.plan import Pipeline, Recompute, Stage
from simulator.platform import platform_of
from simulator.sites import Sites

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Step:
    """How one stage of a template runs."""

    lot: int
    tp: int
    recompute: Recompute


@dataclass(frozen=True, slots=True)
class Template:
    """A pipeline of some micro batch size, with its rough times."""

    micro_batch: int
    cuts: tuple[int, ...]
    steps: tuple[Step, ...]
    level_s: float
    """Seconds between two micro batches in the steady state."""
    fill_s: float
    """Seconds of one micro batch through the whole pipeline, there and back."""
    synced_bytes: float
    """The most that one GPU of it syncs."""

    @property
    def gpus(self) -> dict[tuple[int, int], int]:
        """Groups by (lot, TP)."""
        found: dict[tuple[int, int], int] = {}
        for step in self.steps:
            key = (step.lot, step.tp)
            found[key] = found.get(key, 0) + 1
        return found

    def pipeline(self, micro_batches: int, lots: Sequence[Lot]) -> Pipeline:
        return Pipeline(
            micro_batches,
            tuple(
                Stage(
                    (self.cuts[s], self.cuts[s + 1]),
                    step.tp,
                    (lots[step.lot].place,),
                    step.recompute,
                )
                for s, step in enumerate(self.steps)
            ),
        )

    def micro_batches_within(self, seconds: float) -> int:
        """How many micro batches it runs in so much time, roughly."""
        if seconds < self.fill_s:
            return 0
        return 1 + int((seconds - self.fill_s) / self.level_s * (1 + 1e-12))


@dataclass(eq=False)
class TemplateMaker:
    """Rough times and memory of stages, and the templates made by them."""

    costs: LayerCosts
    network: Network
    sites: Sites
    lots: tuple[Lot, ...]
    _seconds: dict[tuple[str, int, int, Recompute], list[float]] = field(default_factory=dict)
    _held: dict[tuple[int, int, int, Recompute], tuple[Array, Array, Array, float]] = field(
        default_factory=dict
    )
    _furthest: dict[tuple[Step, int, int], list[int]] = field(default_factory=dict)
    _made: dict[object, Template | None] = field(default_factory=dict)

    def seconds(self, gpu: str, tp: int, micro_batch: int, recompute: Recompute) -> list[float]:
        """Forward and backward up to each layer."""
        key = (gpu, tp, micro_batch, recompute)
        found = self._seconds.get(key)
        if found is None:
            layers = (0, self.costs.layer_count)
            times = self.costs.times(gpu, tp=tp, samples=micro_batch)
            back = self.costs.backward_by_layer(
                gpu, tp=tp, samples=micro_batch, layers=layers, recompute=recompute
            )
            found = [0.0, *np.cumsum(times.forward + back).tolist()]
            self._seconds[key] = found
        return found

    def end_of(
        self, step: Step, micro_batch: int, *, first: int, in_flight: int, level_s: float
    ) -> int:
        """The furthest end of a stage from ``first`` within a time and its devices' memory."""
        row = self.seconds(self.lots[step.lot].gpu, step.tp, micro_batch, step.recompute)
        end = bisect_right(row, row[first] + level_s * (1 + 1e-12)) - 1
        return min(end, self._ends(step, micro_batch, in_flight)[first])

    def _ends(self, step: Step, micro_batch: int, in_flight: int) -> list[int]:
        """By first layer, the furthest end that fits the step's devices."""
        key = (step, micro_batch, in_flight)
        found = self._furthest.get(key)
        if found is None:
            found, end = [], 0
            for first in range(self.costs.layer_count):
                end = max(end, first)
                while end < self.costs.layer_count and self.holds(
                    step, micro_batch, first=first, end=end + 1, in_flight=in_flight
                ):
                    end += 1
                found.append(end)
            self._furthest[key] = found
        return found

    def holds(self, step: Step, micro_batch: int, *, first: int, end: int, in_flight: int) -> bool:
        """Whether the layers fit a device of the step, by the same sums as the memory model."""
        key = (step.lot, step.tp, micro_batch, step.recompute)
        found = self._held.get(key)
        if found is None:
            found = self._held[key] = self._tables(step, micro_batch)
        states, kept, work, room = found
        count = self.costs.layer_count
        head = end == count
        largest = float(work[first : end - head].max(initial=0.0)) + (
            float(work[-1]) if head else 0
        )
        edges = max(
            micro_batch * self.costs.output_bytes(first - 1) if first else 0.0,
            micro_batch * self.costs.output_bytes(end - 1) if not head else 0.0,
        )
        if self.costs.runtime.keeps_stage_outputs and not head:
            edges += in_flight * micro_batch * self.costs.output_bytes(end - 1)
        needed = states[end] - states[first] + in_flight * (kept[end] - kept[first])
        return bool(needed + RESERVED_OVER_LIVE * largest + edges <= room)

    def _tables(self, step: Step, micro_batch: int) -> tuple[Array, Array, Array, float]:
        costs, job, lot = self.costs, self.costs.job, self.lots[step.lot]
        platform = platform_of(lot.gpu)
        full = job.precision == "fp32"
        moments = OPTIMIZER_MOMENTS[job.optimizer] * 4 + (0 if full else 4)
        # With ZeRO-1 the optimizer is shared between the holders, here taken as many.
        per_parameter = (4 if full else 2) + 4 + (0 if job.zero else moments)
        parameters = costs.parameters(step.tp)
        kept = costs.kept_bytes(tp=step.tp, samples=micro_batch, recompute=step.recompute)
        work = costs.workspace_bytes(tp=step.tp, samples=micro_batch, recompute=step.recompute)
        buffers = (
            2 if not costs.runtime.flattens_gradients else 1
        ) * costs.runtime.sync_bucket_bytes
        room = self.sites.capacity_bytes(lot.place) - platform.context_bytes - buffers
        states = np.concatenate([[0.0], np.cumsum(per_parameter * parameters)])
        activations = np.concatenate([[0.0], np.cumsum(kept * (1 + platform.fragmentation))])
        return states, activations, work, room

    def template(self, steps: tuple[Step, ...], micro_batch: int, most: int) -> Template | None:
        """The best balanced boundaries for a sequence of steps, or none if it cannot fit."""
        key = (steps, micro_batch, min(most, len(steps)))
        if key not in self._made:
            self._made[key] = self._template(steps, micro_batch, most)
        return self._made[key]

    def _template(self, steps: tuple[Step, ...], micro_batch: int, most: int) -> Template | None:
        layers = self.costs.layer_count
        if len(steps) > layers:
            return None
        if self._cuts(steps, micro_batch, most, math.inf) is None:
            return None
        totals = [
            self.seconds(self.lots[x.lot].gpu, x.tp, micro_batch, x.recompute)[-1] for x in steps
        ]
        low, high = min(totals) / len(steps) / 2, max(totals)
        for _ in range(14):
            middle = math.sqrt(low * high)
            if self._cuts(steps, micro_batch, most, middle) is None:
                low = middle
            else:
                high = middle
        cuts = self._cuts(steps, micro_batch, most, high)
        assert cuts is not None
        return self.timed(steps, micro_batch, cuts)

    def timed(self, steps: tuple[Step, ...], micro_batch: int, cuts: tuple[int, ...]) -> Template:
        """A template with given boundaries."""
        levels, messages, synced = [], 0.0, 0.0
        for s, step in enumerate(steps):
            gpu = self.lots[step.lot].gpu
            row = self.seconds(gpu, step.tp, micro_batch, step.recompute)
            platform = platform_of(gpu)
            level = row[cuts[s + 1]] - row[cuts[s]] + (platform.load_s if s == 0 else 0.0)
            level += platform.message_s * 2 * ((s > 0) + (s + 1 < len(steps)))
            levels.append(level)
            if s + 1 < len(steps):
                messages += 2 * self._message_s(step, steps[s + 1], micro_batch, cuts[s + 1])
            held = self.costs.parameters(step.tp)[cuts[s] : cuts[s + 1]]
            synced = max(synced, 4 * float(held.sum()))
        return Template(micro_batch, cuts, steps, max(levels), sum(levels) + messages, synced)

    def _message_s(self, one: Step, other: Step, micro_batch: int, cut: int) -> float:
        flows = min(one.tp, other.tp)
        return self.network.between_nodes(
            self.lots[one.lot].place,
            self.lots[other.lot].place,
            flows=flows,
            bytes_each=self.costs.output_bytes(cut - 1) * micro_batch / flows,
        )

    def _cuts(
        self, steps: tuple[Step, ...], micro_batch: int, most: int, level_s: float
    ) -> tuple[int, ...] | None:
        """Boundaries laid from the first layer on, each stage as far as it reaches."""
        layers, cuts = self.costs.layer_count, [0]
        for s, step in enumerate(steps):
            left = len(steps) - s
            end = self.end_of(
                step,
                micro_batch,
                first=cuts[-1],
                in_flight=min(most, left),
                level_s=level_s,
            )
            end = min(end, layers - (left - 1))
            if end <= cuts[-1]:
                return None
            cuts.append(end)
        return tuple(cuts) if cuts[-1] == layers else None


def step_sequences(
    lots: Sequence[int], options: Sequence[Step], stages_max: int
) -> Iterator[tuple[Step, ...]]:
    """Stages all alike, or first some of one lot and then some of another."""
    for option in options:
        if option.lot in lots:
            for stages in range(1, stages_max + 1):
                yield (option,) * stages
    for one in options:
        for other in options:
            if one.lot != other.lot and one.lot in lots and other.lot in lots:
                for ahead in range(1, min(4, stages_max)):
                    for behind in range(1, min(4, stages_max - ahead) + 1):
                        yield (one,) * ahead + (other,) * behind
