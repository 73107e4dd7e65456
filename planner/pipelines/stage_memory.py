"""The memory of stages: micro batches that fit, and the fewest layers to recompute so that more do.

Tables are by [first layer, end]: the sums of the memory model for all ranges at once, which a test
compares with it on random plans. Under the policy ``auto`` a stage recomputes as few of its first
layers as fit; more only take longer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from planner.problem.inventory import Lot
from simulator.arrays import Floats, Ints, prefix_sums
from simulator.cluster.place_facts import PlaceFacts
from simulator.estimate.memory import (
    RESERVED_OVER_LIVE,
    bytes_per_parameter,
    gradient_buffer_bytes,
    state_bytes,
)
from simulator.estimate.result import DeviceMemory
from simulator.estimate.zero1_owners import least_kept
from simulator.hardware.runtime_constants import platform_of, uses_gloo
from simulator.layer_costs.layer_costs import LayerCosts
from simulator.models.layers import Recompute
from simulator.spec.job import RecomputePolicy

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class TemplateStage:
    """How one stage of a template runs."""

    lot: int
    tp: int
    recompute: RecomputePolicy

    @property
    def least(self) -> Recompute:
        """What is recomputed at least."""
        return "full" if self.recompute == "full" else "none"


@dataclass(frozen=True, slots=True, eq=False)
class _Activations:
    """Bytes that layers keep for each micro batch, and need while they run, by layer."""

    kept: Floats
    saved: Floats
    """Bytes that a recomputed layer keeps less."""
    work: Floats
    work_again: Floats
    """The transients of a recomputed layer."""

    def transient(self, first: int, kept_from: int, end: int) -> float:
        """The largest transient of a range of layers, of which the first are recomputed."""
        layers = len(self.work)
        last = min(end, layers - 1)
        most = max(
            self.work_again[first : min(kept_from, last)].max(initial=0.0),
            self.work[kept_from:last].max(initial=0.0),
        )
        return float(most) + (float(self.work[-1]) if end == layers else 0.0)


@dataclass(frozen=True, eq=False)
class StageMemory:
    """What stages may hold on the devices of each lot, computed once."""

    costs: LayerCosts
    facts: PlaceFacts
    lots: tuple[Lot, ...]
    more_bytes: int = 0
    """Bytes per parameter besides weights, gradients and the optimizer's."""
    offloads: bool = False
    """Whether stages that can hold one micro batch count as holding any number, as if the others
    were in their host's memory."""
    _known: dict[object, Any] = field(default_factory=dict)

    def most_in_flight(self, stage: TemplateStage, micro_batch: int, pipelines: int) -> Floats:
        """Micro batches whose activations a device of the stage can hold.

        It uses the same sums as the memory model, and the least moments where holders share them.
        """
        key = ("most", *self._kind(stage, micro_batch, pipelines), stage.recompute)

        def most() -> Floats:
            found = self._most_in_flight(stage, micro_batch, pipelines)
            if self.offloads and stage.recompute != "full":
                found = np.where(found >= 1, np.inf, 0.0)
            return found

        return self._compute_once(key, most)

    def fewest_recomputed(
        self, stage: TemplateStage, micro_batch: int, pipelines: int, in_flight: int
    ) -> Ints:
        """The fewest first layers that a stage recomputes to hold ``in_flight`` micro batches.

        Where even all do not suffice, it is more layers than the model has.
        """
        in_flight = 1 if self.offloads else in_flight
        key = ("fewest", *self._kind(stage, micro_batch, pipelines), in_flight)
        return self._compute_once(
            key, lambda: self._find_fewest(stage, micro_batch, pipelines, in_flight)
        )

    def recomputed(
        self,
        stage: TemplateStage,
        micro_batch: int,
        layers: tuple[int, int],
        *,
        in_flight: int,
        room: float,
    ) -> Recompute | int:
        """What a stage recomputes under ``auto`` with ``room`` bytes for its activations."""
        first, end = layers
        held, extra = self._activations(stage, micro_batch), self._output(micro_batch, end)
        share = 1 + platform_of(self.lots[stage.lot].gpu).fragmentation
        kept = float(held.kept[first:end].sum()) + extra
        for kept_from in range(first, end):
            work = RESERVED_OVER_LIVE * held.transient(first, kept_from, end)
            if in_flight * kept * share + work <= room:
                # If the rest would save nothing, "full" is the same and simpler.
                in_vain = not held.saved[kept_from:end].any() and kept_from > first
                return "full" if in_vain else kept_from - first or "none"
            kept -= float(held.saved[kept_from])
        return "full"

    def fewest_offloaded(
        self,
        stage: TemplateStage,
        micro_batch: int,
        layers: tuple[int, int],
        recomputed: int,
        *,
        in_flight: int,
        room: float,
    ) -> int | None:
        """The fewest layers after the recomputed ones that a stage has to offload with ``room``
        bytes for its activations; ``None`` if even all do not suffice.
        """
        first, end = layers
        kept_from = first + recomputed
        held, extra = self._activations(stage, micro_batch), self._output(micro_batch, end)
        share = 1 + platform_of(self.lots[stage.lot].gpu).fragmentation
        work = RESERVED_OVER_LIVE * held.transient(first, kept_from, end)
        kept = held.kept[first:end].sum() - held.saved[first:kept_from].sum() + extra
        # One micro batch of the offloaded layers is on its way, and so on the device.
        on_host = (in_flight - 1) * prefix_sums(held.kept[kept_from:end])
        fits = np.flatnonzero((in_flight * kept - on_host) * share + work <= room)
        return int(fits[0]) if len(fits) else None

    def room(self, stage: TemplateStage, micro_batch: int, pipelines: int) -> Floats:
        """Bytes of a device that are left for activations and transients; negative if none are."""
        key = ("room", *self._kind(stage, micro_batch, pipelines))
        return self._compute_once(key, lambda: self._room(stage, micro_batch, pipelines))

    # -- tables ---------------------------------------------------------------------------------

    def _compute_once(self, key: object, make: Callable[[], _T]) -> _T:
        if key not in self._known:
            self._known[key] = make()
        found: _T = self._known[key]
        return found

    def _kind(self, stage: TemplateStage, micro_batch: int, pipelines: int) -> tuple[object, ...]:
        """What memory depends on, of the number of pipelines only where states are shared."""
        sharing = pipelines if self.costs.job.zero else min(pipelines, 2)
        return self.lots[stage.lot].gpu, stage.tp, micro_batch, sharing

    def _sizes(self, micro_batch: int) -> Floats:
        """Bytes of a micro batch's activations over each boundary inside the model."""
        costs = self.costs
        inner = (costs.output_bytes(n) for n in range(costs.layer_count - 1))
        return np.array([0.0, *inner, 0.0]) * micro_batch

    def _output(self, micro_batch: int, end: int) -> float:
        """Bytes that a stage keeps for each micro batch besides its layers' activations."""
        keeps = self.costs.runtime.keeps_stage_outputs
        return float(self._sizes(micro_batch)[end]) if keeps else 0.0

    def _room(self, stage: TemplateStage, micro_batch: int, pipelines: int) -> Floats:
        costs, job, lot = self.costs, self.costs.job, self.lots[stage.lot]
        platform, runtime, layers = platform_of(lot.gpu), costs.runtime, self.costs.layer_count
        first, end = np.arange(layers + 1)[:, None], np.arange(layers + 1)[None, :]
        held = all_range_sums(costs.parameters(stage.tp))
        held[0, -1] -= costs.tied_parameters(stage.tp)
        copied = with_moments = held
        if costs.has_owners:
            # Which parts a device owns depends on the other pipelines; it may be none.
            kept = least_kept(costs, stage.tp) if pipelines == 1 else np.zeros(layers)
            with_moments = all_range_sums(kept)
        elif job.zero:
            copied = with_moments = held / pipelines
        each = bytes_per_parameter(job, costs.precision_on(lot.gpu))
        weights, gradients, optimizer = state_bytes(each, held, copied, with_moments)
        states = weights + gradients + optimizer + self.more_bytes * held
        states += all_range_sums(costs.frozen_bytes(stage.tp, gpu=lot.gpu))
        sizes = self._sizes(micro_batch)
        messages = np.maximum(sizes[first], sizes[end])
        is_copied = np.full_like(held, pipelines > 1 and not uses_gloo(lot.gpu), dtype=bool)
        messages = messages + gradient_buffer_bytes(runtime, held, is_copied)
        room: Floats = self.facts.capacity_bytes(lot.place) - platform.context_bytes - states
        return room - messages

    def _activations(self, stage: TemplateStage, micro_batch: int) -> _Activations:
        gpu = self.lots[stage.lot].gpu
        return self._compute_once(
            ("activations", gpu, stage.tp, micro_batch),
            lambda: self._activations_of(gpu, stage.tp, micro_batch),
        )

    def _activations_of(self, gpu: str, tp: int, samples: int) -> _Activations:
        asked: dict[str, Any] = {"tp": tp, "samples": samples, "gpu": gpu}
        kept, again = (self.costs.kept_bytes(recompute=how, **asked) for how in ("none", "full"))
        work, work_again = (
            self.costs.workspace_bytes(recompute=how, **asked) for how in ("none", "full")
        )
        return _Activations(kept, np.maximum(kept - again, 0.0), work, work_again)

    def _kept_bytes(self, stage: TemplateStage, micro_batch: int) -> Floats:
        """Bytes that a stage keeps for each micro batch if it recomputes what it must."""
        lot = self.lots[stage.lot]
        kept = all_range_sums(
            self.costs.kept_bytes(
                tp=stage.tp, samples=micro_batch, recompute=stage.least, gpu=lot.gpu
            )
        )
        if self.costs.runtime.keeps_stage_outputs:
            kept = kept + self._sizes(micro_batch)
        return kept * (1 + platform_of(lot.gpu).fragmentation)

    def _most_in_flight(self, stage: TemplateStage, micro_batch: int, pipelines: int) -> Floats:
        gpu = self.lots[stage.lot].gpu
        work = self.costs.workspace_bytes(
            tp=stage.tp, samples=micro_batch, recompute=stage.least, gpu=gpu
        )
        room, kept = self.room(stage, micro_batch, pipelines), self._kept_bytes(stage, micro_batch)
        most = _count(room - RESERVED_OVER_LIVE * _largest_transients(work), kept)
        if stage.recompute != "auto":
            return most
        saved, transient = self._saved_bytes(stage, micro_batch)
        return np.maximum(most, _count(room - transient, kept - all_range_sums(saved)))

    def _saved_bytes(self, stage: TemplateStage, micro_batch: int) -> tuple[Floats, Floats]:
        """Bytes that each recomputed layer saves for each micro batch, and the least transients of
        a stage that recomputes some.
        """
        held = self._activations(stage, micro_batch)
        share = 1 + platform_of(self.lots[stage.lot].gpu).fragmentation
        layers = len(held.work)
        # At least the first layer that saves anything is recomputed.
        behind = np.append(np.where(held.saved > 0, np.arange(layers), layers), layers)
        first = np.minimum.accumulate(behind[::-1])[::-1]
        again = np.append(held.work_again, 0.0)[first]
        transient, head = _largest_transients(held.work), float(held.work[-1])
        transient[:, layers] -= head
        transient = np.maximum(transient, again[:, None])
        transient[:, layers] += head
        return held.saved * share, RESERVED_OVER_LIVE * transient

    def _find_fewest(
        self, stage: TemplateStage, micro_batch: int, pipelines: int, in_flight: int
    ) -> Ints:
        layers = self.costs.layer_count
        none = TemplateStage(stage.lot, stage.tp, "none")
        fits = self.most_in_flight(none, micro_batch, pipelines) >= in_flight
        first, end = np.arange(layers + 1)[:, None], np.arange(layers + 1)[None, :]
        if fits[first < end].all():
            return np.zeros((layers + 1, layers + 1), dtype=np.int64)
        saved, transient = self._saved_bytes(stage, micro_batch)
        kept = self._kept_bytes(none, micro_batch)
        left = self.room(stage, micro_batch, pipelines) - transient
        sums = prefix_sums(saved)
        missing = kept * (1 - 1e-12) - left / in_flight
        count = np.searchsorted(sums, sums[:, None] + missing) - first
        possible = (left >= 0) & (count <= end - first)
        some = np.where(possible, np.maximum(count, 1), layers + 1)
        return np.where(fits | (first >= end), 0, some)


def room_of(device: DeviceMemory) -> float:
    """Bytes of a device that are left for activations and transients, as estimated."""
    taken = device.parameters + device.gradients + device.optimizer
    return device.capacity - taken - device.communication - device.context


def all_range_sums(row: Floats) -> Floats:
    """Sums over all ranges, by [first, end]."""
    sums = prefix_sums(row)
    ranges: Floats = sums[None, :] - sums[:, None]
    return ranges


def _count(room: Floats, kept: Floats) -> Floats:
    """Micro batches that fit."""
    ends = np.arange(len(room))
    with np.errstate(divide="ignore", invalid="ignore"):
        count = np.where(kept > 0, np.floor(room / kept * (1 + 1e-12)), np.inf)
    fits: Floats = np.where((room >= 0) & (ends[:, None] < ends[None, :]), count, 0.0)
    return fits


def _largest_transients(work: Floats) -> Floats:
    """The largest transient of each range; the head's is added, as in the memory model."""
    layers = len(work)
    found = np.zeros((layers + 1, layers + 1))
    for first in range(layers):
        body = np.maximum.accumulate(work[first:-1]) if first < layers - 1 else work[:0]
        found[first, first + 1 : layers] = body
        found[first, layers] = (body[-1] if len(body) else 0.0) + work[-1]
    return found
