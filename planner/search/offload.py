"""Variants of judged plans that offload: stages that recompute layers recompute fewer instead.

What these layers keep waits in the host's memory (ADR 124). That pays where passes are long enough
to hide the copies. The best variant is then changed in small steps: micro batches that needed
much recomputation may be better now.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from planner.pipelines.stage_memory import room_of
from planner.search.chunks import best_families
from planner.search.local_search import EventSearch, JudgedPlan
from planner.search.variants import best_variant
from simulator.estimate.memory import MemoryModel
from simulator.estimate.offload import copy_ends, host_room
from simulator.estimate.result import DeviceMemory
from simulator.layer_costs.layer_costs import LayerCosts
from simulator.spec.plan import Pipeline, Plan, Stage


def best_with_offload(search: EventSearch) -> JudgedPlan | None:
    """Judge variants of good plans that offload, and return the best that keeps all limits.

    Only plans that recompute because memory is tight have some. Where no plan keeps the limits,
    variants of those that break them least are judged.
    """
    if search.job.recompute != "auto":
        return None
    starts = best_families(search, lambda plan: plan.schedule == "1f1b" and _recomputes(plan))
    return best_variant(search, starts, partial(offloaded, search))


def offloaded(search: EventSearch, plan: Plan) -> Plan | None:
    """The plan in which stages offload if that makes them quicker; ``None`` if it helps none."""
    if not _recomputes(plan):
        return None
    if search.outer_every is not None:
        plan = plan.with_outer_steps(search.outer_every)
    judge = search.judge
    costs = judge.costs_of(plan)
    devices = MemoryModel(plan, costs, judge.facts.capacity_bytes).pipelines()
    # Equal pipelines stay one object: the estimator computes it once.
    known: dict[tuple[int, int], Pipeline] = {}
    pipelines = []
    for pipeline, row in zip(plan.pipelines, devices, strict=True):
        key = id(pipeline), id(row)
        if key not in known:
            chosen = (
                _StageChoice(search, costs, plan, pipeline, s).quickest(device)
                for s, device in enumerate(row)
            )
            known[key] = replace(pipeline, stages=tuple(chosen))
        pipelines.append(known[key])
    found = replace(plan, pipelines=tuple(pipelines))
    return found if found.offloads else None


def _recomputes(plan: Plan) -> bool:
    return any(stage.recomputed for pipeline in plan.pipelines for stage in pipeline.stages)


@dataclass(frozen=True, slots=True)
class _StageChoice:
    """How much a stage of a plan may recompute and offload."""

    search: EventSearch
    costs: LayerCosts
    plan: Plan
    pipeline: Pipeline
    number: int

    @property
    def stage(self) -> Stage:
        return self.pipeline.stages[self.number]

    def quickest(self, device: DeviceMemory) -> Stage:
        """The stage with some layers offloaded if it takes less time then, else as it is."""
        stage = self.stage
        if not stage.recomputed or self.costs.host_bytes_per_s(stage.place.gpu) is None:
            return stage
        ways = [(self._seconds(stage), stage)]
        ways += [(self._seconds(way), way) for way in self._ways(device)]
        return min(ways, key=lambda pair: pair[0])[1]

    def _ways(self, device: DeviceMemory) -> Iterator[Stage]:
        """The stage with each smaller number of recomputed layers, and as few offloaded as fit."""
        stage, search, size = self.stage, self.search, self.plan.size_of(self.pipeline)
        lot_of = {lot.place: k for k, lot in enumerate(search.lots)}
        template = search.maker.stage_of(stage, lot_of[stage.place.without_node])
        held = min(self.pipeline.micro_batches, len(self.pipeline.stages) - self.number)
        kept = self.costs.kept_bytes(
            tp=stage.tp, samples=size, recompute="none", gpu=stage.place.gpu
        )
        facts, devices = search.judge.facts, self.plan.device_count
        on_host = host_room(search.job, facts, stage.place, devices)
        for again in range(stage.recomputed):
            count = search.maker.memory.fewest_offloaded(
                template, size, stage.layers, again, in_flight=held, room=room_of(device)
            )
            first = stage.layers[0] + again
            if count and held * kept[first : first + count].sum() <= on_host:
                yield replace(stage, recompute=again or "none", offload=count)

    def _seconds(self, stage: Stage) -> float:
        """Forward plus backward of a micro batch."""
        first, end = stage.layers
        gpu, tp, samples = stage.place.gpu, stage.tp, self.plan.size_of(self.pipeline)
        forward, backward = self.costs.range_seconds(
            gpu, tp=tp, samples=samples, first=np.array([first]), end=np.array([end]),
            recompute=np.array([stage.recomputed]),
        )  # fmt: skip
        both = float(forward[0]), float(backward[0])
        if not stage.offload:
            return sum(both)
        kept_from = first + stage.recomputed
        ahead, back = copy_ends(
            self.costs, gpu, tp=tp, samples=samples, first=first, kept_from=kept_from,
            end=kept_from + stage.offload,
        )  # fmt: skip
        return max(both[0], float(ahead[-1])) + max(both[1], float(back[-1]))
