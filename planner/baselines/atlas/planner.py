"""Atlas: whole stages go to regions, so that only pipeline traffic crosses between regions.

The planner enumerates stages, micro batch and replicas; TP is as wide as machine and job allow.
There are always fewer stages than layers. Regions take as many stages as they can hold, the one
with most GPUs first, and the common simulator scores each layout. It knows one GPU kind, so it runs
once per kind, and the lists are merged.

The publication also merges sends that cross regions in time; that is not modelled. ``published``
never tries the largest number of replicas, and counts the GPUs of a region as if they stood in one
zone; ``fixed`` mends both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from planner.baselines.shared.equal_nodes import (
    Degrees,
    EqualNodes,
    equal_nodes,
    even_plan,
    fits,
    gpu_kinds,
    whole_degrees,
)
from planner.baselines.shared.proposals import micro_batch_sizes, proposal, ranked
from planner.compare.interface import Case, Mode, ProposedPlan
from simulator.estimate.event_estimator import EventEstimator
from simulator.spec.plan import Place, Plan, equal_cuts


@dataclass(frozen=True, slots=True)
class AtlasRegion:
    """A region and how many GPUs each of its zones has."""

    name: str
    zone_gpus: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AtlasInputs:
    """The ranges that the enumeration covers."""

    regions: tuple[AtlasRegion, ...]
    tp: int
    layer_count: int
    global_batch: int
    micro_batches: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AtlasLayout(Degrees):
    """Atlas' own plan format: the region of every stage, with all its replicas."""

    stage_regions: tuple[str, ...]


def place_stages(
    regions: Sequence[AtlasRegion], *, pp: int, dp: int, tp: int, mode: Mode
) -> tuple[str, ...] | None:
    """Fill regions with stages, most GPUs first; ``None`` if stages remain."""
    placed: list[str] = []
    for region in sorted(regions, key=lambda region: -sum(region.zone_gpus)):
        if mode == "published":
            # Kept: a group must be in one zone, but the GPUs of all zones are added up.
            stages = sum(region.zone_gpus) // (tp * dp)
        else:
            stages = sum(gpus // tp for gpus in region.zone_gpus) // dp
        placed += [region.name] * min(pp - len(placed), stages)
    return tuple(placed) if len(placed) == pp else None


def layouts(
    inputs: AtlasInputs, mode: Mode, shape_fits: Callable[[int, int], bool]
) -> Iterator[AtlasLayout]:
    """All layouts; ``shape_fits`` says whether some stages can hold micro batches of a size."""
    for pp in range(1, inputs.layer_count):
        for size in sorted(inputs.micro_batches):
            if not shape_fits(pp, size):
                break
            dp_max = inputs.global_batch // size
            if mode == "published":
                dp_max -= 1  # Kept: the upper bound is exclusive.
            for dp in range(1, dp_max + 1):
                regions = place_stages(inputs.regions, pp=pp, dp=dp, tp=inputs.tp, mode=mode)
                if regions is None:
                    break  # More replicas need at least as much room.
                yield AtlasLayout(inputs.tp, dp, pp, size, regions)


def search(
    inputs: AtlasInputs,
    mode: Mode,
    shape_fits: Callable[[int, int], bool],
    seconds: Callable[[AtlasLayout], float],
) -> list[tuple[float, AtlasLayout]]:
    """Every layout with its time, the fastest first."""
    scored = [(seconds(layout), layout) for layout in layouts(inputs, mode, shape_fits)]
    return sorted(scored, key=lambda s: (s[0], s[1].gpus, s[1].pp, s[1].micro_batch_size))


# -- the case -------------------------------------------------------------------------------------


def inputs_from(case: Case, nodes: EqualNodes, mode: Mode) -> AtlasInputs | None:
    """The regions of one GPU kind, by name; ``None`` if no machine is usable."""
    degrees = whole_degrees(case, nodes)
    if not nodes.places or not degrees:
        return None
    zones: dict[str, int] = {}
    if mode == "published":
        # Kept with the sum over zones: partly used machines count too.
        for pool in case.cluster.pools:
            if pool.gpu == nodes.places[0].gpu and pool.gpus > 0:
                zones[pool.zone] = zones.get(pool.zone, 0) + pool.gpus
    else:
        for place in nodes.places:
            zones[place.zone] = zones.get(place.zone, 0) + nodes.gpus_per_node
    regions: dict[str, list[int]] = {}
    for zone, gpus in sorted(zones.items()):
        regions.setdefault(case.cluster.region_of(zone) or zone, []).append(gpus)
    return AtlasInputs(
        regions=tuple(AtlasRegion(name, tuple(counts)) for name, counts in sorted(regions.items())),
        tp=degrees[-1],
        layer_count=case.costs.layer_count,
        global_batch=case.job.global_batch,
        micro_batches=micro_batch_sizes(case.job),
    )


def to_plan(layout: AtlasLayout, case: Case, nodes: EqualNodes) -> Plan | str:
    """The layout as a plan: the zones of a region are filled one after the other."""
    free: dict[str, list[Place]] = {}
    for place in nodes.groups(layout.tp):
        free.setdefault(case.cluster.region_of(place.zone) or place.zone, []).append(place)
    groups: list[Place] = []
    for region in layout.stage_regions:
        here = free.get(region, [])
        if len(here) < layout.dp:
            return f"the zones of {region} run out of machines with {layout.tp} free GPUs"
        groups += here[: layout.dp]
        del here[: layout.dp]
    return even_plan(layout, groups, equal_cuts(case.costs.layer_count, layout.pp), case.job)


class AtlasPlanner:
    """Every layout of every GPU kind, by the time that the common simulator gives it."""

    name = "atlas"

    def proposals(self, case: Case, mode: Mode) -> Sequence[ProposedPlan]:
        """Layouts that cannot be expressed as a plan come last, with the reason."""
        simulator = EventEstimator(case.costs, case.network, case.facts)
        found: list[tuple[int, ProposedPlan]] = []
        for kind in gpu_kinds(case.cluster):
            nodes = equal_nodes(case.cluster, [kind])
            inputs = inputs_from(case, nodes, mode)
            if inputs is None:
                continue
            plans: dict[AtlasLayout, Plan | str] = {}

            def shape_fits(
                pp: int, size: int, nodes: EqualNodes = nodes, tp: int = inputs.tp
            ) -> bool:
                """Judge one pipeline in any place: it has the most in flight."""
                cuts = equal_cuts(case.costs.layer_count, pp)
                one = Degrees(tp, 1, pp, size)
                return fits(case, even_plan(one, nodes.places[:1] * pp, cuts, case.job))

            def seconds(
                layout: AtlasLayout,
                nodes: EqualNodes = nodes,
                plans: dict[AtlasLayout, Plan | str] = plans,
            ) -> float:
                plan = plans[layout] = to_plan(layout, case, nodes)
                return math.inf if isinstance(plan, str) else simulator.estimate(plan).iteration_s

            found += [
                (layout.gpus, proposal(time, plans[layout]))
                for time, layout in search(inputs, mode, shape_fits, seconds)
            ]
        return ranked(found)
