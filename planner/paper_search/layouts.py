"""Chooses which lots a search may use together, and which of them one pipeline may span.

A lot is interchangeable GPUs of one kind in one zone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from planner.paper_search.formula_tables import PaperModel
from planner.pipelines.plan_shape import Run
from planner.problem.inventory import Lot

TYPICAL_BYTES = 4e8
"""A message size for comparing links."""
LINKS_ALIKE = 1.5
"""Zones whose links differ by less than this factor count as one place."""
SPREAD_LOTS_MAX = 6
"""Pipelines across zones are tried over at most this many lots."""

Lots = tuple[int, ...]
LotGroups = tuple[Lots, ...]
"""Lots among which a pipeline may be spread freely, usually those of one zone."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Lots grouped into resources and lot groups; a pipeline stays within its lot group."""

    lot_groups: tuple[tuple[Lots, ...], ...]
    """[lot group][resource]: lots with the same machine type; empty where a lot group has none."""

    @property
    def resources(self) -> range:
        """Indices of the resources."""
        return range(len(self.lot_groups[0]))

    def lots(self, resource: int) -> list[int]:
        """The lots of a resource at all lot groups."""
        return [lot for lot_group in self.lot_groups for lot in lot_group[resource]]


def layouts(model: PaperModel, *, counts_money: bool) -> list[Layout]:
    """Return layouts to try: each zone alone, then growing sets of zones.

    Pipelines stay within a zone, or spread across zones.
    """
    zones = zone_chain(model)
    alone: dict[object, Layout] = {}
    for zone in zones:
        lot_group = _by_machine(model, [zone])
        alone.setdefault(
            _offers_and_links(model, [k for lots in lot_group for k in lots]), Layout((lot_group,))
        )
    found = list(alone.values())
    for size in range(2, len(zones) + 1):
        near = zones[:size]
        pooled = _by_machine(model, near)
        found.append(Layout(tuple(_keep_zone(model, pooled, zone) for zone in near)))
        alike = _has_alike_links(model, pooled)
        if alike:
            found.append(Layout((pooled,)))
        each = tuple((lot,) for lots in pooled for lot in lots)
        if len(each) <= SPREAD_LOTS_MAX and (counts_money or not alike):
            found.append(Layout((each,)))
    return found


def selections(model: PaperModel) -> Iterator[LotGroups]:
    """Yield the lot groups of every set of GPU kinds and zones, smallest sets first."""
    kinds = sorted({lot.gpu for lot in model.lots})
    zones = zone_chain(model)
    kind_sets = [
        set(chosen)
        for size in range(1, len(kinds) + 1)
        for chosen in itertools.combinations(kinds, size)
    ]
    zone_sets = [[zone] for zone in zones] + [zones[:size] for size in range(2, len(zones) + 1)]
    seen: set[object] = set()
    for chosen, where in itertools.product(kind_sets, zone_sets):
        each = (
            tuple(k for k, lot in enumerate(model.lots) if lot.zone == zone and lot.gpu in chosen)
            for zone in where
        )
        lot_groups = tuple(lot_group for lot_group in each if lot_group)
        if {model.lots[k].gpu for lot_group in lot_groups for k in lot_group} != chosen:
            continue
        if len(lot_groups) == 1:
            # Zones with equal offers and equal links are searched once.
            face = _offers_and_links(model, lot_groups[0])
            if face in seen:
                continue
            seen.add(face)
        for split in (lot_groups, (tuple(k for lot_group in lot_groups for k in lot_group),)):
            if split not in seen:
                seen.add(split)
                yield split


def dealt_runs(
    lots: Sequence[Lot], wanted: Iterable[tuple[int, int, int, Sequence[int]]], stages: int
) -> list[list[Run]] | None:
    """Fill lots in order with groups, and return the runs of each stage; ``None``: they do not fit.

    ``wanted`` has the stage, TP degree and number of groups, and the lots that may hold them.
    """
    taken: dict[int, dict[int, int]] = {}
    runs: list[list[Run]] = [[] for _ in range(stages)]
    for stage, tp, count, candidates in wanted:
        left = count
        for lot in candidates:
            held = taken.setdefault(lot, {})
            room = lots[lot].room(tp) - sum(n * (size // tp) for size, n in held.items())
            room = min(room, left)
            if room > 0:
                held[tp] = held.get(tp, 0) + room
                runs[stage].append((lot, tp, room))
                left -= room
        if left:
            return None
    return runs


def zone_chain(model: PaperModel) -> list[str]:
    """The zones, starting with the largest, each next one closest to those before."""
    gpus: dict[str, int] = {}
    for lot in model.lots:
        gpus[lot.zone] = gpus.get(lot.zone, 0) + lot.gpus
    left = sorted(gpus, key=lambda zone: (-gpus[zone], zone))
    chain = [left.pop(0)]
    while left:
        nearest = min(left, key=lambda zone: (max(_ring_s(model, zone, z) for z in chain), zone))
        left.remove(nearest)
        chain.append(nearest)
    return chain


def _ring_s(model: PaperModel, zone: str, other: str) -> float:
    """Seconds of a typical ring between two zones, over their best link."""
    return min(
        model.ring_s(a, b, TYPICAL_BYTES, 8)
        for a, one in enumerate(model.lots)
        for b, two in enumerate(model.lots)
        if (one.zone, two.zone) == (zone, other)
    )


def _by_machine(model: PaperModel, zones: list[str]) -> tuple[Lots, ...]:
    """The lots of each machine type, in the order of the zones."""
    kinds = sorted({(lot.gpu, lot.machine) for lot in model.lots if lot.zone in zones})
    at = {lot.key: k for k, lot in enumerate(model.lots)}
    return tuple(tuple(at[*kind, zone] for zone in zones if (*kind, zone) in at) for kind in kinds)


def _keep_zone(model: PaperModel, lots: tuple[Lots, ...], zone: str) -> tuple[Lots, ...]:
    return tuple(tuple(k for k in each if model.lots[k].zone == zone) for each in lots)


def _offers_and_links(model: PaperModel, lots: Sequence[int]) -> object:
    """Equal for zones with equal offers and equal links."""
    offer = tuple(
        (lot.gpu, lot.machines, lot.price_usd_per_gpu_hour, lot.spot_gpus)
        for lot in (model.lots[k] for k in lots)
    )
    return offer, tuple(f"{model.ring_s(a, b, TYPICAL_BYTES, 8):.2g}" for a in lots for b in lots)


def _has_alike_links(model: PaperModel, pooled: tuple[Lots, ...]) -> bool:
    """Whether the zone of a replica hardly affects the time."""
    for lots in pooled:
        times = [model.ring_s(a, b, TYPICAL_BYTES, 8) for a in lots for b in lots]
        if max(times) > LINKS_ALIKE * min(times):
            return False
    return True
