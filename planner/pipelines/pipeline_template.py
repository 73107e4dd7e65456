"""Pipeline templates: boundaries balanced for given GPU kinds, within their memory."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from planner.problem.inventory import Lot
from simulator.arrays import Floats, prefix_sums
from simulator.cluster.place_facts import PlaceFacts
from simulator.estimate.memory import RESERVED_OVER_LIVE, bytes_per_parameter
from simulator.estimate.zero1_owners import least_kept
from simulator.hardware.runtime_constants import platform_of, uses_gloo
from simulator.layer_costs.layer_costs import LayerCosts
from simulator.network.network import Network
from simulator.spec.plan import Pipeline, Recompute, Stage

BACKWARD_SHARE = 2 / 3
"""Rough share of the backward pass in a micro batch's time on a stage."""
MANY = 1 << 30
"""A number of pipelines larger than that of any plan."""
MANY_LOTS_MAX = 200
"""Most sequences that are listed for one set of three lots or more."""


HALVINGS = 10
"""Bisection steps for the slowest stage; boundaries hardly change after these."""


@dataclass(frozen=True, slots=True)
class TemplateStage:
    """How one stage of a template runs."""

    lot: int
    tp: int
    recompute: Recompute


def template_stage(stage: Stage, lot: int) -> TemplateStage:
    """A stage of a plan; one that recomputes some of its layers becomes one that recomputes all."""
    return TemplateStage(lot, stage.tp, "full" if stage.recomputed else "none")


@dataclass(frozen=True, slots=True)
class Template:
    """A pipeline of some micro batch size, with rough times."""

    micro_batch: int
    # Times differ for nearly all templates, so hashing them is enough.
    cuts: tuple[int, ...] = field(hash=False)
    stages: tuple[TemplateStage, ...] = field(hash=False)
    level_s: float
    """Seconds between two micro batches in the steady state."""
    fill_s: float
    """Seconds of one micro batch forward and backward through the whole pipeline."""
    synced: tuple[tuple[float, float], ...] = field(hash=False)
    """By stage: gradient bytes that a GPU sums, and seconds from the stage's last backward to the
    end of the pipeline's."""
    gpus: Mapping[tuple[int, int], int] = field(compare=False)
    """Device groups by (lot, TP degree)."""
    beside: tuple[float, float] = field(compare=False)
    """``level_s`` and ``fill_s`` where neighbouring stages of one lot share a machine."""

    def pipeline(self, micro_batches: int, lots: Sequence[Lot]) -> Pipeline:
        """The pipeline that runs this many micro batches."""
        return Pipeline(
            micro_batches,
            tuple(
                Stage(
                    (self.cuts[s], self.cuts[s + 1]),
                    stage.tp,
                    (lots[stage.lot].place,),
                    stage.recompute,
                )
                for s, stage in enumerate(self.stages)
            ),
        )

    def micro_batches_within(self, seconds: float) -> int:
        """Rough number of micro batches that it runs within a time."""
        if seconds < self.fill_s:
            return 0
        return 1 + int((seconds - self.fill_s) / self.level_s * (1 + 1e-12))


@dataclass(eq=False)
class TemplateMaker:
    """Builds templates from rough times and the memory of stages."""

    costs: LayerCosts
    network: Network
    sites: PlaceFacts
    lots: tuple[Lot, ...]
    pipelines: int = MANY
    """Number of pipelines that sum their gradients, for which memory is reserved."""
    _seconds: dict[tuple[str, int, int, Recompute], list[float]] = field(default_factory=dict)
    _rooms: dict[tuple[str, int, int, Recompute, int], Floats] = field(default_factory=dict)
    _parameters: dict[int, list[float]] = field(default_factory=dict)
    _furthest: dict[tuple[TemplateStage, int, int], list[int]] = field(default_factory=dict)
    _made: dict[object, Template | None] = field(default_factory=dict)
    _balanced: dict[object, tuple[int, ...] | None] = field(default_factory=dict)
    """Boundaries by GPU kinds, independent of zones."""

    def alone(self) -> TemplateMaker:
        """Return a maker of templates that fit as the only pipeline of a plan."""
        return TemplateMaker(self.costs, self.network, self.sites, self.lots, pipelines=1)

    def seconds(self, gpu: str, tp: int, micro_batch: int, recompute: Recompute) -> list[float]:
        """Forward plus backward seconds, summed up to each layer."""
        key = (gpu, tp, micro_batch, recompute)
        found = self._seconds.get(key)
        if found is None:
            times = self.costs.times(gpu, tp=tp, samples=micro_batch)
            back = self.costs.backward_by_layer(
                gpu, tp=tp, samples=micro_batch, recompute=recompute
            )
            found = self._seconds[key] = prefix_sums(times.forward + back).tolist()
        return found

    def end_of(
        self, stage: TemplateStage, micro_batch: int, *, first: int, in_flight: int, level_s: float
    ) -> int:
        """The furthest end of a stage from ``first`` within a time and its devices' memory."""
        row = self.seconds(self.lots[stage.lot].gpu, stage.tp, micro_batch, stage.recompute)
        end = bisect_right(row, row[first] + level_s * (1 + 1e-12)) - 1
        return min(end, self._ends(stage, micro_batch, in_flight)[first])

    def _ends(self, stage: TemplateStage, micro_batch: int, in_flight: int) -> list[int]:
        """By first layer, the largest end that fits into the memory of the stage's devices."""
        key = (stage, micro_batch, in_flight)
        found = self._furthest.get(key)
        if found is None:
            fits = self.most_in_flight(stage, micro_batch, self.pipelines) >= in_flight
            firsts = np.arange(self.costs.layer_count)
            counts = np.array([int(fits[first, first + 1 :].sum()) for first in firsts])
            found = self._furthest[key] = (firsts + counts).tolist()
        return found

    def most_in_flight(self, stage: TemplateStage, micro_batch: int, pipelines: int) -> Floats:
        """Micro batches whose activations a device of the stage can hold, by [first layer, end].

        It uses the same sums as the memory model, and the least moments where holders share them.
        """
        gpu = self.lots[stage.lot].gpu
        key = (gpu, stage.tp, micro_batch, stage.recompute, self._sharing(pipelines))
        found = self._rooms.get(key)
        if found is None:
            found = self._rooms[key] = self._most_in_flight(stage, micro_batch, pipelines)
        return found

    def _sharing(self, pipelines: int) -> int:
        """The part of the number of pipelines that memory depends on."""
        return pipelines if self.costs.job.zero else min(pipelines, 2)

    def _most_in_flight(self, stage: TemplateStage, micro_batch: int, pipelines: int) -> Floats:
        costs, job, lot = self.costs, self.costs.job, self.lots[stage.lot]
        platform, runtime, layers = platform_of(lot.gpu), costs.runtime, self.costs.layer_count
        first, end = np.arange(layers + 1)[:, None], np.arange(layers + 1)[None, :]
        weight, gradient, copy, moments = bytes_per_parameter(job, costs.precision_on(lot.gpu))
        held = range_sums(costs.parameters(stage.tp))
        held[0, -1] -= costs.tied_parameters(stage.tp)
        states = (weight + gradient + copy + moments) * held
        if job.zero and runtime.zero1_by_bucket:
            # Which parts a device owns depends on the other pipelines; it may be none.
            kept = least_kept(costs, stage.tp) if pipelines == 1 else np.zeros(layers)
            states = (weight + gradient + copy) * held + moments * range_sums(kept)
        elif job.zero:
            states = (weight + gradient + (copy + moments) / pipelines) * held
        states += range_sums(costs.frozen_bytes(stage.tp, gpu=lot.gpu))
        sizes = np.array([0.0, *(costs.output_bytes(n) for n in range(layers - 1)), 0.0])
        sizes *= micro_batch
        messages = np.maximum(sizes[first], sizes[end])
        if runtime.flattens_gradients:
            messages = messages + np.minimum(runtime.sync_bucket_bytes, 4 * held)
        elif pipelines > 1 and not uses_gloo(lot.gpu):
            messages = messages + 2 * runtime.sync_bucket_bytes
        kind: dict[str, Any] = {
            "samples": micro_batch,
            "recompute": stage.recompute,
            "gpu": lot.gpu,
        }
        kept = range_sums(costs.kept_bytes(tp=stage.tp, **kind))
        if runtime.keeps_stage_outputs:
            kept = kept + sizes[end]
        kept = kept * (1 + platform.fragmentation)
        work = costs.workspace_bytes(tp=stage.tp, **kind)
        room = self.sites.capacity_bytes(lot.place) - platform.context_bytes - states - messages
        room = room - RESERVED_OVER_LIVE * _largest(work)
        with np.errstate(divide="ignore", invalid="ignore"):
            count = np.where(kept > 0, np.floor(room / kept * (1 + 1e-12)), np.inf)
        fits: Floats = np.where((room >= 0) & (first < end), count, 0.0)
        return fits

    def template(
        self, stages: tuple[TemplateStage, ...], micro_batch: int, most: int
    ) -> Template | None:
        """The template with the best balanced boundaries; ``None`` if the stages cannot fit."""
        key = (stages, micro_batch, min(most, len(stages)))
        if key not in self._made:
            self._made[key] = self._template(stages, micro_batch, most)
        return self._made[key]

    def _template(
        self, stages: tuple[TemplateStage, ...], micro_batch: int, most: int
    ) -> Template | None:
        kinds = tuple((self.lots[x.lot].gpu, x.tp, x.recompute) for x in stages)
        key = (kinds, micro_batch, min(most, len(stages)))
        if key not in self._balanced:
            self._balanced[key] = self._balance(stages, micro_batch, most)
        cuts = self._balanced[key]
        return None if cuts is None else self.timed(stages, micro_batch, cuts)

    def _balance(
        self, stages: tuple[TemplateStage, ...], micro_batch: int, most: int
    ) -> tuple[int, ...] | None:
        if len(stages) > self.costs.layer_count:
            return None
        if self._cuts(stages, micro_batch, most, math.inf) is None:
            return None
        totals = [
            self.seconds(self.lots[x.lot].gpu, x.tp, micro_batch, x.recompute)[-1] for x in stages
        ]
        low, high = min(totals) / len(stages) / 2, max(totals)
        for _ in range(HALVINGS):
            middle = math.sqrt(low * high)
            if self._cuts(stages, micro_batch, most, middle) is None:
                low = middle
            else:
                high = middle
        return self._cuts(stages, micro_batch, most, high)

    def timed(
        self, stages: tuple[TemplateStage, ...], micro_batch: int, cuts: tuple[int, ...]
    ) -> Template:
        """The template with given boundaries."""
        levels, hops, beside, synced, home = [], [], [], [], 0.0
        for s, stage in enumerate(stages):
            gpu = self.lots[stage.lot].gpu
            row = self.seconds(gpu, stage.tp, micro_batch, stage.recompute)
            platform = platform_of(gpu)
            level = row[cuts[s + 1]] - row[cuts[s]] + (platform.load_s if s == 0 else 0.0)
            level += platform.message_s * 2 * ((s > 0) + (s + 1 < len(stages)))
            levels.append(level)
            if s + 1 < len(stages):
                pair = (stage, stages[s + 1])
                hops.append(2 * self._message_s(*pair, micro_batch, cuts[s + 1]))
                is_near = stage.lot == stages[s + 1].lot
                beside.append(
                    2 * self._message_s(*pair, micro_batch, cuts[s + 1], is_inside=True)
                    if is_near
                    else hops[-1]
                )
            synced.append((4 * self._held(stage.tp, cuts[s], cuts[s + 1]), home))
            home += BACKWARD_SHARE * level + (hops[-1] / 2 if hops else 0.0)
        return Template(
            micro_batch,
            cuts,
            stages,
            *_pace(levels, hops),
            tuple(synced),
            Counter((stage.lot, stage.tp) for stage in stages),
            _pace(levels, beside),
        )

    def _held(self, tp: int, first: int, end: int) -> float:
        """Parameters of a range of layers on one rank."""
        sums = self._parameters.get(tp)
        if sums is None:
            sums = self._parameters[tp] = prefix_sums(self.costs.parameters(tp)).tolist()
        return sums[end] - sums[first]

    def _message_s(
        self,
        one: TemplateStage,
        other: TemplateStage,
        micro_batch: int,
        cut: int,
        *,
        is_inside: bool = False,
    ) -> float:
        pairs, most = sorted((one.tp, other.tp))
        places = (self.lots[one.lot].place, self.lots[other.lot].place)
        size = self.costs.output_bytes(cut - 1) * micro_batch
        # With whole tensors, the direction to the wider stage has more of them.
        whole = self.costs.runtime.sends_whole
        if is_inside:
            each = size * (most if whole else 1) / pairs
            return self.network.within_node(places[0], gpus=2 * pairs, bytes_each=each)
        flows = most if whole else pairs
        each = size if whole else size / pairs
        return self.network.between_nodes(*places, flows=flows, bytes_each=each)

    def _cuts(
        self, stages: tuple[TemplateStage, ...], micro_batch: int, most: int, level_s: float
    ) -> tuple[int, ...] | None:
        """Lay boundaries from the first layer on, each stage as far as it reaches."""
        layers, cuts = self.costs.layer_count, [0]
        for s, stage in enumerate(stages):
            left = len(stages) - s
            end = self.end_of(
                stage, micro_batch, first=cuts[-1], in_flight=min(most, left), level_s=level_s
            )
            end = min(end, layers - (left - 1))
            if end <= cuts[-1]:
                return None
            cuts.append(end)
        return tuple(cuts) if cuts[-1] == layers else None


def _pace(levels: Sequence[float], hops: Sequence[float]) -> tuple[float, float]:
    """Seconds between two micro batches, and of one through the whole pipeline."""
    # With n stages left, micro batch k must return before micro batch k + n starts.
    count = len(levels)
    rounds = [(sum(levels[s:]) + sum(hops[s:])) / (count - s) for s in range(count)]
    return max(*levels, *rounds), sum(levels) + sum(hops)


def stage_options(
    lots: Sequence[Lot],
    chosen: Iterable[int],
    degrees: Sequence[int],
    recomputes: Sequence[Recompute],
) -> list[TemplateStage]:
    """All ways to run a stage on some of the lots."""
    return [
        TemplateStage(lot, tp, recompute)
        for lot in chosen
        for tp in degrees
        if lots[lot].room(tp)
        for recompute in recomputes
    ]


def stage_sequences(
    lots: Sequence[int], options: Sequence[TemplateStage], stages_max: int
) -> Iterator[tuple[TemplateStage, ...]]:
    """Sequences of stages: all stages alike, or some stages on one lot, then some on another.

    Of three lots and more, also some stages on each, in any order.
    """
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
    if len(lots) > 2:
        yield from _over_many_lots(lots, options, stages_max)


def _over_many_lots(
    lots: Sequence[int], options: Sequence[TemplateStage], stages_max: int
) -> Iterator[tuple[TemplateStage, ...]]:
    """Some stages on each lot, in any order, all with the same TP degree and recomputation."""
    ways: dict[tuple[int, Recompute], dict[int, TemplateStage]] = {}
    for option in options:
        ways.setdefault((option.tp, option.recompute), {})[option.lot] = option
    alike = [way for way in ways.values() if all(lot in way for lot in lots)]
    orders = len(alike) * math.factorial(len(lots))
    runs_max = next((n for n in (3, 2, 1) if orders * n ** len(lots) <= MANY_LOTS_MAX), 0)
    for way, order in itertools.product(alike, itertools.permutations(lots)):
        for runs in itertools.product(range(1, runs_max + 1), repeat=len(order)):
            if sum(runs) <= stages_max:
                pairs = zip(order, runs, strict=True)
                yield tuple(way[lot] for lot, count in pairs for _ in range(count))


def range_sums(row: Floats) -> Floats:
    """Sums over all ranges, by [first, end]."""
    sums = prefix_sums(row)
    ranges: Floats = sums[None, :] - sums[:, None]
    return ranges


def _largest(work: Floats) -> Floats:
    """The largest transient of each range; the head's is added, as in the memory model."""
    layers = len(work)
    found = np.zeros((layers + 1, layers + 1))
    for first in range(layers):
        body = np.maximum.accumulate(work[first:-1]) if first < layers - 1 else work[:0]
        found[first, first + 1 : layers] = body
        found[first, layers] = (body[-1] if len(body) else 0.0) + work[-1]
    return found
