"""Which lots to use together, and the sites within which pipelines stay."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from planner.paper_search.formula_tables import PaperModel
from planner.paper_search.mixing import Site

TYPICAL_BYTES = 4e8
"""A message size for comparing links."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Lots to use, and the sites within which pipelines stay."""

    sites: tuple[Site, ...]

    @property
    def lots(self) -> tuple[int, ...]:
        """All lots of the selection."""
        return tuple(sorted({lot for site in self.sites for lot in site.lots}))


def selections(model: PaperModel) -> Iterator[Selection]:
    """Combinations of kinds and zones, small ones first."""
    kinds = sorted({lot.gpu for lot in model.lots})
    zones = zone_chain(model)
    kind_sets = [
        chosen
        for size in range(1, len(kinds) + 1)
        for chosen in itertools.combinations(kinds, size)
    ]
    zone_sets: list[tuple[str, ...]] = [(zone,) for zone in zones]
    zone_sets += [tuple(zones[:size]) for size in range(2, len(zones) + 1)]
    seen: set[object] = set()
    for chosen in kind_sets:
        for where in zone_sets:
            sites = [
                tuple(
                    k for k, lot in enumerate(model.lots) if lot.zone == zone and lot.gpu in chosen
                )
                for zone in where
            ]
            sites = [site for site in sites if site]
            if len(sites) == 1:
                # Zones with equal offers and equal links are searched once.
                offer = tuple(
                    (lot.gpu, lot.machines, lot.price_usd_per_gpu_hour, lot.spot_gpus)
                    for lot in (model.lots[k] for k in sites[0])
                )
                pace = tuple(
                    f"{model.ring_s(a, b, TYPICAL_BYTES, 8):.2g}"
                    for a in sites[0]
                    for b in sites[0]
                )
                if (offer, pace) in seen:
                    continue
                seen.add((offer, pace))
            if not sites or {model.lots[k].gpu for site in sites for k in site} != set(chosen):
                continue
            splits = [tuple(Site(site) for site in sites)]
            if len(sites) > 1:
                splits.append((Site(tuple(k for site in sites for k in site)),))
            for split in splits:
                if split not in seen:
                    seen.add(split)
                    yield Selection(split)


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
