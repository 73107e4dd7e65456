"""Rough times of gradient sums, for mixes that are ranked before they are judged."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

from planner.pipelines.pipeline_mix import PipelineMix
from planner.pipelines.pipeline_template import TemplateMaker
from planner.problem.inventory import Lot
from simulator.estimate.sync_rings import ring_steps
from simulator.hardware.runtime_constants import uses_gloo
from simulator.spec.plan import linked_by_zones


@dataclass(slots=True, eq=False)
class RoughSums:
    """Gradient sums of pipeline mixes on some lots."""

    maker: TemplateMaker
    lots: tuple[Lot, ...]
    _syncs: dict[object, float] = field(init=False, default_factory=dict)
    _steps: dict[object, float] = field(init=False, default_factory=dict)

    def seconds(self, mix: PipelineMix) -> float:
        """Seconds by which the slowest sum outlasts the passes; holders of a layer sum it.

        With outer steps, those of one outer group: an outer step hardly counts in an iteration.
        """
        if mix.pipelines < 2:
            return 0.0
        if not self.maker.takes_outer_steps:
            return self._sum_s(mix)
        zones = [{self.lots[stage.lot].zone for stage in t.stages} for t in mix.templates]
        return max(
            self._sum_s(
                replace(
                    mix,
                    templates=tuple(mix.templates[n] for n in numbers),
                    counts=tuple(mix.counts[n] for n in numbers),
                )
            )
            for numbers in linked_by_zones(zones)
        )

    def _sum_s(self, mix: PipelineMix) -> float:
        if mix.pipelines < 2:
            return 0.0
        used = sorted({key for template in mix.templates for key in template.gpus})
        near = self._is_near(mix, used)
        if len(used) == 1:
            per_byte = self._per_byte_s(tuple(used), mix.pipelines, near=near)
            return max(
                0.0, *(per_byte * size - home for t in mix.templates for size, home in t.synced)
            )
        longest = 0.0
        for template in mix.templates:
            for s, (size, home) in enumerate(template.synced):
                ring = {
                    (other.lot, other.tp)
                    for each in mix.templates
                    for k, other in enumerate(each.stages)
                    if each.cuts[k] < template.cuts[s + 1] and template.cuts[s] < each.cuts[k + 1]
                }
                per_byte = self._per_byte_s(tuple(sorted(ring)), mix.pipelines, near=near)
                longest = max(longest, per_byte * size - home)
        return longest

    def _per_byte_s(self, ring: tuple[tuple[int, int], ...], members: int, *, near: bool) -> float:
        """Rough seconds a byte of gradients that these (lot, TP degree) sum together."""
        key = (ring, members, near)
        found = self._syncs.get(key)
        if found is None:
            costs, pairs = self.maker.costs, list(itertools.product(ring, ring))
            piece = costs.runtime.sync_bucket_bytes
            is_gloo = any(uses_gloo(self.lots[lot].gpu) for lot, _ in ring)
            steps = ring_steps(members, members, to_owner=costs.has_owners, is_gloo=is_gloo)
            found = sum(
                count * max(self._step_s(a, b, piece * share / shards, near=near) for a, b in pairs)
                for count, share, shards in steps
            )
            found /= piece
            self._syncs[key] = found
        return found

    def _is_near(self, mix: PipelineMix, used: list[tuple[int, int]]) -> bool:
        """Whether all replicas of a stage are on one machine, placed side by side."""
        if len({lot for lot, _ in used}) > 1:
            return False
        lot = self.lots[used[0][0]]
        side_by_side = mix.together is None and all(
            lot.gpus_per_machine % (mix.pipelines * tp) == 0 for _, tp in used
        )
        gpus = sum(tp * n for tp, n in mix.groups()[used[0][0]].items())
        return side_by_side or gpus <= lot.gpus_per_machine

    def _step_s(
        self, one: tuple[int, int], other: tuple[int, int], bytes_each: float, *, near: bool
    ) -> float:
        """Rough seconds of one ring step over this hop, within a machine or between two."""
        key = (one, other, bytes_each, near)
        if key not in self._steps:
            a, b = self.lots[one[0]].place, self.lots[other[0]].place
            flows, network = min(one[1], other[1]), self.maker.network
            self._steps[key] = (
                network.within_node(a, gpus=2 * flows, bytes_each=bytes_each)
                if near
                else network.ring_between_nodes(a, b, flows=flows, bytes_each=bytes_each)
            )
        return self._steps[key]
