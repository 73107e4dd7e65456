"""Layouts of a chain's stages: lots that serve as one resource, site by site."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.paper_search.formula_tables import PaperModel
from planner.paper_search.selection import TYPICAL_BYTES, zone_chain

LINKS_ALIKE = 1.5
"""Zones whose links differ by less than this factor count as one place."""
SPREAD_LOTS_MAX = 6
"""Pipelines across zones are tried over at most this many lots."""


Lots = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """Lots that serve as one resource, site by site; a pipeline stays within its site."""

    sites: tuple[tuple[Lots, ...], ...]
    """[site][resource]: lots with the same machine type; empty where a site has none."""

    @property
    def resources(self) -> range:
        """Indices of the resources."""
        return range(len(self.sites[0]))

    def lots(self, resource: int) -> list[int]:
        """The lots of a resource at all sites."""
        return [lot for site in self.sites for lot in site[resource]]


def layouts(model: PaperModel, *, counts_money: bool) -> list[Layout]:
    """Each zone alone, then growing sets of zones: pipelines within zones, or across them."""
    zones = zone_chain(model)
    found = []
    seen: set[object] = set()
    for zone in zones:
        site = _by_machine(model, [zone])
        face = _face(model, [lot for lots in site for lot in lots])
        if face not in seen:
            seen.add(face)
            found.append(Layout((site,)))
    for size in range(2, len(zones) + 1):
        near = zones[:size]
        pooled = _by_machine(model, near)
        found.append(Layout(tuple(_only(model, pooled, zone) for zone in near)))
        alike = _has_alike_links(model, pooled)
        if alike:
            found.append(Layout((pooled,)))
        each = tuple((lot,) for lots in pooled for lot in lots)
        if len(each) <= SPREAD_LOTS_MAX and (counts_money or not alike):
            found.append(Layout((each,)))
    return found


def _by_machine(model: PaperModel, zones: list[str]) -> tuple[Lots, ...]:
    """The lots of each machine type, in the order of the zones."""
    kinds = sorted({(lot.gpu, lot.machine) for lot in model.lots if lot.zone in zones})
    at = {lot.key: k for k, lot in enumerate(model.lots)}
    return tuple(tuple(at[*kind, zone] for zone in zones if (*kind, zone) in at) for kind in kinds)


def _only(model: PaperModel, lots: tuple[Lots, ...], zone: str) -> tuple[Lots, ...]:
    return tuple(tuple(k for k in each if model.lots[k].zone == zone) for each in lots)


def _face(model: PaperModel, lots: Sequence[int]) -> object:
    """Equal for zones with equal offers and equal links."""
    offer = tuple(
        (lot.gpu, lot.machines, lot.price_usd_per_gpu_hour, lot.spot_gpus)
        for lot in (model.lots[k] for k in lots)
    )
    pace = tuple(f"{model.ring_s(a, b, TYPICAL_BYTES, 8):.2g}" for a in lots for b in lots)
    return offer, pace


def _has_alike_links(model: PaperModel, pooled: tuple[Lots, ...]) -> bool:
    """Whether the zone of a replica hardly affects the time."""
    for lots in pooled:
        times = [model.ring_s(a, b, TYPICAL_BYTES, 8) for a in lots for b in lots]
        if max(times) > LINKS_ALIKE * min(times):
            return False
    return True
