"""Who keeps which pieces of a job's state, who brings them to safety, and where copies belong.

All of it is arithmetic on the plan that every rank makes alike: no tensor, no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from worker.checkpoint.snapshot_file import ANYBODY, number_of
from worker.layout.rank_layout import Holdings, all_parts, image_of_atoms, image_of_whole

Key = tuple[int, int]
"""A layer's number in files, and the number of a piece."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Of what a job's pieces consist, under any plan."""

    layers: int
    """Without the one for what layers share."""
    atoms: int
    item_bytes: int
    """Of one kept number."""
    moments: int

    @property
    def keys(self) -> frozenset[Key]:
        """All pieces that there are."""
        return frozenset((n, p) for n in range(self.layers + 1) for p in range(self.atoms + 1))


def elements_of(holdings: Holdings, layer: int, piece: int) -> int:
    """How many numbers of one kind a piece has."""
    specs = holdings.tables[layer]
    if piece == holdings.atoms:
        return image_of_whole(specs).elements
    return image_of_atoms(specs, range(piece, piece + 1), atoms=holdings.atoms).elements


def sizes_of(holdings: Holdings, shape: Shape) -> dict[Key, int]:
    """How many bytes each piece has in a file."""
    each = shape.item_bytes * (1 + shape.moments)
    return {
        (number_of(layer, layers=shape.layers), piece): each * elements_of(holdings, layer, piece)
        for layer in holdings.tables
        for piece in range(holdings.atoms + 1)
    }


def keys_needed(holdings: Holdings, rank: int) -> tuple[Key, ...]:
    """The pieces that a rank must have to go on; those without anything in them are not."""
    layers = len(holdings.tables) - 1
    return tuple(
        sorted(
            (number_of(layer, layers=layers), piece)
            for layer, holders in holdings.holders.items()
            for holder in holders
            if holder.rank == rank
            for piece in (*holder.atoms, holdings.atoms)
            if elements_of(holdings, layer, piece)
        )
    )


def keepers_of(holdings: Holdings, *, zero: int) -> dict[Key, tuple[int, ...]]:
    """For each piece the ranks that keep all of its state; those with nothing in them too."""
    layers = len(holdings.tables) - 1
    found: dict[Key, set[int]] = {}

    def keep(layer: int, piece: int, rank: int) -> None:
        found.setdefault((number_of(layer, layers=layers), piece), set()).add(rank)

    for layer in holdings.tables:
        # What nothing is of is kept by those that would hold it, so that nothing is missing.
        empty = {p for p in range(holdings.atoms + 1) if not elements_of(holdings, layer, p)}
        for holder in holdings.holders[layer] or holdings.holders[0]:
            for piece in (*holder.atoms, holdings.atoms):
                if piece in empty or not zero:
                    keep(layer, piece, holder.rank)
    for part in all_parts(holdings) if zero else ():
        for piece in (*part.atoms, *((holdings.atoms,) if part.with_whole else ())):
            keep(part.layer, piece, part.owner)
    return {key: tuple(sorted(found[key])) for key in sorted(found)}


def writers_of(keepers: Mapping[Key, tuple[int, ...]], sizes: Mapping[Key, int]) -> dict[Key, int]:
    """For each piece the one rank that makes it durable, so that all have about as much to do."""
    load: Counter[int] = Counter()
    chosen: dict[Key, int] = {}
    # Those with the least choice choose first, and of these the largest.
    for key in sorted(keepers, key=lambda key: (len(keepers[key]), -sizes[key], key)):
        chosen[key] = min(keepers[key], key=lambda rank: (load[rank], rank))
        load[chosen[key]] += sizes[key]
    _level(chosen, load, keepers, sizes)
    return chosen


def _level(
    chosen: dict[Key, int],
    load: Counter[int],
    keepers: Mapping[Key, tuple[int, ...]],
    sizes: Mapping[Key, int],
) -> None:
    """Take pieces from who has most, as long as that makes the most less."""
    moved = True
    while moved:
        moved = False
        busiest = max(load, key=lambda rank: (load[rank], -rank), default=0)
        for key in [key for key, rank in chosen.items() if rank == busiest and sizes[key]]:
            other = min(keepers[key], key=lambda rank: (load[rank], rank))
            if load[other] + sizes[key] < load[busiest]:
                load[busiest] -= sizes[key]
                load[other] += sizes[key]
                chosen[key] = other
                moved = True
                break


def buddies_of(
    keepers: Mapping[Key, tuple[int, ...]],
    writers: Mapping[Key, int],
    sizes: Mapping[Key, int],
    nodes: Mapping[int, str],
    zones: Mapping[str, str],
    survive: Literal["node", "zone"] = "node",
) -> dict[Key, str]:
    """For each piece that one loss would take, the node that is to have a copy.

    What is to survive a node has its copy in the same zone where it can, since what leaves it
    costs money; what is to survive a zone has it in another. Where the plan has no node there,
    the second best is named, or ``ANYBODY``. Copies go to whoever has the fewest bytes of them.
    """
    load: Counter[str] = Counter()
    members = sorted(set(nodes.values()))
    found: dict[Key, str] = {}
    for key in sorted(writers, key=lambda key: (-sizes[key], key)):
        home = nodes[writers[key]]
        homes = {nodes[rank] for rank in keepers[key]}
        others = fit = [node for node in members if node != home]
        if survive == "zone":
            fit = [node for node in others if zones.get(node) != zones.get(home)]
        if homes & set(fit):
            continue
        if not fit and not homes & set(others):
            fit = others
        found[key] = min(
            fit,
            key=lambda node: (zones.get(node) != zones.get(home), load[node], node),
            default=ANYBODY,
        )
        load[found[key]] += sizes[key]
    return found


def waits_for_copies(
    buddies: Mapping[Key, str], nodes: Mapping[int, str], zones: Mapping[str, str]
) -> bool:
    """Say whether training is to wait for copies: not where there is nobody to take any.

    All ranks must say the same, and agents may have read the list of nodes at different moments.
    So who is no member counts only where all ranks are on one node, and were told the same.
    """
    members = set(nodes.values())
    is_named = any(buddy != ANYBODY for buddy in buddies.values())
    return is_named or (bool(buddies) and (len(members) > 1 or not zones.keys() <= members))
