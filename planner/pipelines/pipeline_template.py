"""Pipeline templates: boundaries balanced for given GPU kinds, within their memory."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from planner.pipelines.stage_memory import StageMemory, TemplateStage, room_of
from planner.problem.inventory import Lot
from simulator.arrays import Floats, Ints, prefix_sums
from simulator.cluster.place_facts import PlaceFacts
from simulator.estimate.memory import OUTER_BYTES, MemoryModel
from simulator.hardware.runtime_constants import platform_of
from simulator.layer_costs.layer_costs import LayerCosts
from simulator.models.layers import Recompute
from simulator.network.network import Network
from simulator.spec.job import RecomputePolicy
from simulator.spec.plan import Pipeline, Plan, Stage

BACKWARD_SHARE = 2 / 3
"""Rough share of the backward pass in a micro batch's time on a stage."""
MANY = 1 << 30
"""A number of pipelines larger than that of any plan."""
MANY_LOTS_MAX = 200
"""Most sequences that are listed for one set of three lots or more."""
NEVER_S = 1e30
"""Longer than anything takes: a time that counts as infinite and may be multiplied by zero."""
HALVINGS = 10
"""Bisection steps for the slowest stage; boundaries hardly change after these."""


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
    facts: PlaceFacts
    lots: tuple[Lot, ...]
    pipelines: int = MANY
    """Number of pipelines that sum their gradients, for which memory is reserved."""
    takes_outer_steps: bool = False
    """Whether memory is reserved for outer steps, and pipelines of other zones sum apart."""
    offloads: bool = False
    """Whether stages that can hold one micro batch count as holding any number."""
    memory: StageMemory = field(init=False)
    _seconds: dict[tuple[str, int, int, Recompute], list[float]] = field(default_factory=dict)
    _again: dict[tuple[str, int, int], Floats] = field(default_factory=dict)
    _parameters: dict[int, list[float]] = field(default_factory=dict)
    _reached: dict[tuple[TemplateStage, int, int], list[list[float]]] = field(default_factory=dict)
    _made: dict[object, Template | None] = field(default_factory=dict)
    _balanced: dict[object, tuple[int, ...] | None] = field(default_factory=dict)
    """Boundaries by GPU kinds, independent of zones."""

    def __post_init__(self) -> None:
        outer = OUTER_BYTES if self.takes_outer_steps else 0
        self.memory = StageMemory(self.costs, self.facts, self.lots, outer, self.offloads)

    def alone(self) -> TemplateMaker:
        """Return a maker of templates that fit as the only pipeline of a plan."""
        maker = TemplateMaker(self.costs, self.network, self.facts, self.lots, pipelines=1)
        if not self.takes_outer_steps:
            maker.memory = self.memory
        return maker

    def for_bound(self, *, offloads: bool) -> TemplateMaker:
        """Return a maker whose templates reserve no memory for outer steps, and perhaps offload."""
        if not self.takes_outer_steps and not offloads:
            return self
        return TemplateMaker(self.costs, self.network, self.facts, self.lots, offloads=offloads)

    def pipeline(self, template: Template, micro_batches: int, pipelines: int) -> Pipeline:
        """The pipeline that runs ``micro_batches`` in a plan of ``pipelines``."""
        size, stages = template.micro_batch, []
        for s, stage in enumerate(template.stages):
            layers = template.cuts[s], template.cuts[s + 1]
            recompute: Recompute | int = stage.least
            if stage.recompute == "auto":
                recompute = self.memory.recomputed(
                    stage,
                    size,
                    layers,
                    in_flight=min(micro_batches, len(template.stages) - s),
                    room=float(self.memory.room(stage, size, pipelines)[layers]),
                )
            stages.append(Stage(layers, stage.tp, (self.lots[stage.lot].place,), recompute))
        return Pipeline(micro_batches, tuple(stages))

    def fitted(self, plan: Plan) -> Plan:
        """The plan in which stages recompute as few layers as fit.

        It differs where a device's memory depends on the other pipelines, which templates do not
        know: under ZeRO-1 by buckets, and with several TP degrees, since parts of gradients are
        then copied.
        """
        costs = self.costs
        degrees = {stage.tp for pipeline in plan.pipelines for stage in pipeline.stages}
        if costs.job.recompute != "auto" or not (costs.has_owners or len(degrees) > 1):
            return plan
        devices = MemoryModel(plan, costs, self.facts.capacity_bytes).pipelines()
        lot_of = {lot.place: k for k, lot in enumerate(self.lots)}
        pipelines = []
        for pipeline, row in zip(plan.pipelines, devices, strict=True):
            stages, count = [], pipeline.micro_batches
            for s, (stage, device) in enumerate(zip(pipeline.stages, row, strict=True)):
                recompute = self.memory.recomputed(
                    self.stage_of(stage, lot_of[stage.place.without_node]),
                    plan.size_of(pipeline),
                    stage.layers,
                    in_flight=min(count, len(row) - s),
                    room=room_of(device),
                )
                stages.append(replace(stage, recompute=recompute))
            pipelines.append(replace(pipeline, stages=tuple(stages)))
        return replace(plan, pipelines=tuple(pipelines))

    def stage_of(self, stage: Stage, lot: int) -> TemplateStage:
        """A plan's stage as one of a template, which recomputes what it must if it may choose."""
        policy: RecomputePolicy = "auto"
        if self.costs.job.recompute != "auto" and not isinstance(stage.recompute, int):
            policy = stage.recompute
        return TemplateStage(lot, stage.tp, policy)

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

    def again_s(self, stage: TemplateStage, micro_batch: int, first: Ints, count: Ints) -> Floats:
        """Seconds to recompute ``count`` layers from ``first`` on."""
        key = (self.lots[stage.lot].gpu, stage.tp, micro_batch)
        sums = self._again.get(key)
        if sums is None:
            sums = self._again[key] = prefix_sums(self.costs.again_by_layer(*key))
        again: Floats = sums[np.minimum(first + count, self.costs.layer_count)] - sums[first]
        return again

    def end_of(
        self, stage: TemplateStage, micro_batch: int, *, first: int, in_flight: int, level_s: float
    ) -> int:
        """The furthest end of a stage from ``first`` within a time and its devices' memory."""
        row = self._reach(stage, micro_batch, in_flight)[first]
        return bisect_right(row, min(row[first] + level_s * (1 + 1e-12), NEVER_S)) - 1

    def _reach(self, stage: TemplateStage, micro_batch: int, in_flight: int) -> list[list[float]]:
        """By [first layer, end], rising: seconds up to the end; infinite where it does not fit."""
        key = (stage, micro_batch, in_flight)
        found = self._reached.get(key)
        if found is None:
            gpu, memory = self.lots[stage.lot].gpu, self.memory
            row = np.array(self.seconds(gpu, stage.tp, micro_batch, stage.least))
            layers = self.costs.layer_count
            first, end = np.arange(layers)[:, None], np.arange(layers + 1)[None, :]
            if stage.recompute == "auto":
                count = memory.fewest_recomputed(stage, micro_batch, self.pipelines, in_flight)
                count = np.where(first < end, count[:layers], 0)
                reach = row + self.again_s(stage, micro_batch, first, count)
                reach[count > layers] = math.inf
                reach = np.minimum.accumulate(reach[:, ::-1], axis=1)[:, ::-1]
            else:
                fits = memory.most_in_flight(stage, micro_batch, self.pipelines) >= in_flight
                fitting = (fits[:layers] & (first < end)).sum(axis=1)[:, None]
                reach = np.where(end <= first + fitting, row, math.inf)
            found = self._reached[key] = reach.tolist()
        return found

    def template(
        self, stages: tuple[TemplateStage, ...], micro_batch: int, most: int
    ) -> Template | None:
        """The template with the best balanced boundaries, and of these the first ones.

        ``None`` if the stages cannot fit.
        """
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
        low, high = math.inf, 0.0
        for x in stages:
            total = partial(self.seconds, self.lots[x.lot].gpu, x.tp, micro_batch)
            low = min(low, total(x.least)[-1] / len(stages) / 2)
            high = max(high, total("none" if x.recompute == "none" else "full")[-1])
        for _ in range(HALVINGS):
            middle = math.sqrt(low * high)
            if self._cuts(stages, micro_batch, most, middle) is None:
                low = middle
            else:
                high = middle
        cuts = self._cuts(stages, micro_batch, most, high)
        return None if cuts is None else self._filled_from_end(stages, micro_batch, most, cuts)

    def _filled_from_end(
        self,
        stages: tuple[TemplateStage, ...],
        micro_batch: int,
        most: int,
        cuts: tuple[int, ...],
    ) -> tuple[int, ...]:
        """Boundaries with as few layers in the first stages as the slowest stage allows.

        The first stage sums its gradients last, so few layers there shorten the iteration.
        """
        reach = [
            self._reach(stage, micro_batch, min(most, len(stages) - s))
            for s, stage in enumerate(stages)
        ]
        level_s = (1 + 1e-12) * max(
            row[first][end] - row[first][first]
            for row, (first, end) in zip(reach, itertools.pairwise(cuts), strict=True)
        )

        def is_slow(s: int, first: int, end: int) -> bool:
            return reach[s][first][end] - reach[s][first][first] > level_s

        moved = [cuts[-1]]
        for s in range(len(stages) - 1, 0, -1):
            first, end = moved[-1] - 1, moved[-1]
            if is_slow(s, first, end):
                return cuts  # Later stages took what this one may hold.
            while first > s and not is_slow(s, first - 1, end):
                first -= 1
            moved.append(first)
        return (0, *reversed(moved))

    def timed(
        self, stages: tuple[TemplateStage, ...], micro_batch: int, cuts: tuple[int, ...]
    ) -> Template:
        """The template with given boundaries."""
        levels, hops, beside, synced, home = [], [], [], [], 0.0
        for s, stage in enumerate(stages):
            gpu = self.lots[stage.lot].gpu
            row = self.seconds(gpu, stage.tp, micro_batch, stage.least)
            platform = platform_of(gpu)
            level = row[cuts[s + 1]] - row[cuts[s]] + (platform.load_s if s == 0 else 0.0)
            if stage.recompute == "auto":
                level += self._again_s(stage, micro_batch, cuts[s], cuts[s + 1], len(stages) - s)
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
            synced.append((4 * self._parameters_of(stage.tp, cuts[s], cuts[s + 1]), home))
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

    def _again_s(
        self, stage: TemplateStage, micro_batch: int, first: int, end: int, in_flight: int
    ) -> float:
        """Seconds of the fewest layers to recompute, of all of them if the stage does not fit."""
        fewest = self.memory.fewest_recomputed(stage, micro_batch, self.pipelines, in_flight)
        count = min(int(fewest[first, end]), end - first)
        return float(self.again_s(stage, micro_batch, np.array(first), np.array(count)))

    def _parameters_of(self, tp: int, first: int, end: int) -> float:
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
    recompute: RecomputePolicy,
) -> list[TemplateStage]:
    """All ways to run a stage on some of the lots."""
    return [
        TemplateStage(lot, tp, recompute) for lot in chosen for tp in degrees if lots[lot].room(tp)
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
        yield from _list_over_many_lots(lots, options, stages_max)


def _list_over_many_lots(
    lots: Sequence[int], options: Sequence[TemplateStage], stages_max: int
) -> Iterator[tuple[TemplateStage, ...]]:
    """Some stages on each lot, in any order, all with the same TP degree."""
    ways: dict[int, dict[int, TemplateStage]] = {}
    for option in options:
        ways.setdefault(option.tp, {})[option.lot] = option
    alike = [way for way in ways.values() if all(lot in way for lot in lots)]
    orders = len(alike) * math.factorial(len(lots))
    runs_max = next((n for n in (3, 2, 1) if orders * n ** len(lots) <= MANY_LOTS_MAX), 0)
    for way, order in itertools.product(alike, itertools.permutations(lots)):
        for runs in itertools.product(range(1, runs_max + 1), repeat=len(order)):
            if sum(runs) <= stages_max:
                pairs = zip(order, runs, strict=True)
                yield tuple(way[lot] for lot, count in pairs for _ in range(count))
