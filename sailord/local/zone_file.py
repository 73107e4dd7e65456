"""The zones of a shaped cluster: their nodes, and the links within and between them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from simulator.documents.fields import InvalidValue, Table, open_table, quote
from simulator.documents.files import load_document
from simulator.documents.problems import Problems, nearest

KINDS = ("large", "small")
NODES_MAX = 64
"""Nodes of one zone; each has about ten processes."""
_NAME = re.compile(r"zone-[a-z]\Z")


@dataclass(frozen=True, slots=True)
class EmulatedLink:
    """One direction between two zones, or between the nodes of one zone."""

    delay_ms: float = 0.0
    """One way."""
    mbit_per_s: float | None = None
    """Shared by all that the zones send each other this way; ``None``: unlimited."""


@dataclass(frozen=True, slots=True)
class Zone:
    """A zone and its nodes."""

    name: str
    nodes: int
    kind: str
    delay_ms: float
    """One way, between two nodes of the zone."""
    nic_mbit_per_s: float | None
    """Of each node, each way; ``None``: unlimited."""
    times_slower: float
    """Computation takes this many times as long as on this computer."""


@dataclass(frozen=True, slots=True)
class Zones:
    """The contents of a zone file."""

    zones: Mapping[str, Zone]
    links: Mapping[tuple[str, str], EmulatedLink]
    """By sending and receiving zone."""

    @property
    def machines(self) -> tuple[tuple[str, str], ...]:
        """Return kind and zone of each node."""
        return tuple((z.kind, z.name) for z in self.zones.values() for _ in range(z.nodes))


def load_zones(path: Path) -> Zones:
    """Read a zone file; ``InputError`` lists all mistakes in it."""
    problems = Problems()
    top = open_table(load_document(path, flaws_raise=False), problems)
    zones: dict[str, Zone] = {}
    for table in top.tables("zone", required=True):
        zone = _zone(table)
        if zone is not None and zone.name in zones:
            table.report("name", f"is {quote(zone.name)} again", "give each zone its own name")
        elif zone is not None:
            zones[zone.name] = zone
    links: dict[tuple[str, str], EmulatedLink] = {}
    for table in top.tables("link") if "link" in top else ():
        _add_link(table, zones, links)
    top.finish()
    problems.raise_if_any()
    return Zones(zones, links)


def _zone(table: Table) -> Zone | None:
    name = table.value("name", _zone_name, required=True)
    nodes = table.integer("nodes", default=1, most=NODES_MAX)
    kind = table.choice("gpu", KINDS, default="large")
    delay_ms = table.number("delay_ms", default=0.0, least=0.0, most=10_000.0)
    nic = table.number("nic_mbit_per_s", above=0.0, most=1e6)
    slower = table.number("times_slower", default=1.0, least=1.0, most=1000.0)
    table.finish()
    return None if name is None else Zone(name, nodes, kind, delay_ms, nic, slower)


def _add_link(
    table: Table, zones: Mapping[str, Zone], links: dict[tuple[str, str], EmulatedLink]
) -> None:
    ends = [table.value(key, _zone_name, required=True) for key in ("from", "to")]
    delay_ms = table.number("delay_ms", default=0.0, least=0.0, most=10_000.0)
    rate = table.number("mbit_per_s", above=0.0, most=1e6)
    is_one_way = table.flag("one_way", default=False)
    table.finish()
    for key, name in zip(("from", "to"), ends, strict=True):
        if name is not None and name not in zones:
            table.report(key, f"is {quote(name)}, which is not a zone here", nearest(name, zones))
    begin, end = ends
    if begin is None or end is None:
        return
    if begin == end:
        table.report("to", "is the zone that it comes from", "set delay_ms of the zone itself")
    ways = [(begin, end)] if is_one_way else [(begin, end), (end, begin)]
    if any(way in links for way in ways):
        table.report("to", "is linked a second time", "give one link, or one for each way")
    links.update({way: EmulatedLink(delay_ms, rate) for way in ways})


def _zone_name(value: object) -> str:
    if not isinstance(value, str) or not _NAME.match(value):
        raise InvalidValue(f"is {quote(value)}", "name zones zone-a to zone-z")
    return value
