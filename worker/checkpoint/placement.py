"""Which ranks keep which pieces, which of them uploads a piece, and which nodes keep replicas.

This is arithmetic on the plan; every rank gets the same result. It needs no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from simulator.spec.job import OPTIMIZER_MOMENTS, Job
from simulator.spec.plan import Plan
from worker.checkpoint.compatibility import dtype_of
from worker.checkpoint.snapshot_file import ANY_NODE, layer_number
from worker.layout.rank_layout import Holdings, all_buckets, piece_layout, rank_places
from worker.layout.tensor_table import tensors_of

PieceKey = tuple[int, int]
"""A layer's number in files, and the number of a piece."""


@dataclass(frozen=True, slots=True)
class StateShape:
    """The dimensions of a job's state, the same under any plan."""

    layers: int
    """Without the extra one for shared tensors."""
    atoms: int
    item_bytes: int
    """Bytes of one element."""
    moments: int

    @property
    def keys(self) -> frozenset[PieceKey]:
        """All pieces."""
        return frozenset((n, p) for n in range(self.layers + 1) for p in range(self.atoms + 1))


@dataclass(frozen=True, slots=True)
class SnapshotPlacement:
    """Which ranks keep which pieces under a plan, and which nodes keep replicas."""

    sizes: Mapping[PieceKey, int]
    holders: Mapping[PieceKey, tuple[int, ...]]
    """The ranks that keep each piece."""
    writers: Mapping[PieceKey, int]
    nodes: Mapping[int, str]
    """The node of each rank."""
    buddies: Mapping[PieceKey, str]
    waits: bool
    """Whether training waits for replicas."""
    keeps_all: bool = False
    """Whether what past generations left stays until a point of this one is safe."""

    @property
    def files(self) -> int:
        """Return how many snapshot files a rank has at once."""
        return 3 if self.waits else 2

    @property
    def first_files(self) -> int:
        """Return how many of them it needs to begin.

        Mostly one: when its second snapshot is due, its first is complete on all ranks, so what
        past generations left can make room for another file.
        """
        return self.files if self.waits or self.keeps_all else 1


def state_shape(job: Job) -> StateShape:
    """Return the dimensions of the job's state."""
    return StateShape(
        layers=len(job.model.layers),
        atoms=job.max_tp,
        item_bytes=8 if dtype_of(job) == "float64" else 4,
        moments=OPTIMIZER_MOMENTS[job.optimizer],
    )


def state_bytes(job: Job) -> int:
    """Return the bytes of one snapshot of the whole state: master weights and moments."""
    shape = state_shape(job)
    elements = sum(
        piece_layout(table, piece, atoms=job.max_tp).elements
        for table in tensors_of(job).values()
        for piece in range(job.max_tp + 1)
    )
    return shape.item_bytes * (1 + shape.moments) * elements


def nodes_of(plan: Plan) -> dict[int, str]:
    """Return the node of each rank; an empty name if the plan names none."""
    return {
        each.rank: plan.pipelines[each.pipeline].stages[each.stage].places[0].node or ""
        for each in rank_places(plan)
    }


def placement_of(
    job: Job, plan: Plan, holdings: Holdings, zones: Mapping[str, str]
) -> SnapshotPlacement:
    """Return which ranks and nodes keep what under the plan; every rank gets the same answer.

    ``zones`` has the zone of every known node.
    """
    sizes = sizes_of(holdings, state_shape(job))
    nodes = nodes_of(plan)
    holders = keepers_of(piece_holders(holdings, zero=job.zero), sizes, nodes, zones)
    writers = writers_of(holders, sizes)
    buddies = buddies_of(holders, writers, sizes, nodes, zones, job.checkpoint.survive)
    waits = waits_for_replicas(buddies, nodes, zones)
    keeps_all = job.checkpoint.survive == "zone"
    return SnapshotPlacement(sizes, holders, writers, nodes, buddies, waits, keeps_all)


def elements_of(holdings: Holdings, layer: int, piece: int) -> int:
    """Return how many elements of one kind a piece has."""
    return piece_layout(holdings.tables[layer], piece, atoms=holdings.atoms).elements


def sizes_of(holdings: Holdings, shape: StateShape) -> dict[PieceKey, int]:
    """Return how many bytes each piece has in a file."""
    each = shape.item_bytes * (1 + shape.moments)
    return {
        (layer_number(layer, layers=shape.layers), piece): each
        * elements_of(holdings, layer, piece)
        for layer in holdings.tables
        for piece in range(holdings.atoms + 1)
    }


def pieces_needed(holdings: Holdings, rank: int, *, zero: int) -> dict[PieceKey, bool]:
    """Return the pieces that a rank must load, and whether with their moments; no empty ones."""
    layers = len(holdings.tables) - 1
    keepers = piece_holders(holdings, zero=zero)
    needed = [
        (layer_number(layer, layers=layers), piece)
        for layer, holders in holdings.holders.items()
        for holder in holders
        if holder.rank == rank
        for piece in (*holder.atoms, holdings.atoms)
        if elements_of(holdings, layer, piece)
    ]
    return {key: rank in keepers[key] for key in needed}


def piece_holders(holdings: Holdings, *, zero: int) -> dict[PieceKey, tuple[int, ...]]:
    """Return, for each piece, the ranks that keep all of its state; empty pieces are included."""
    layers = len(holdings.tables) - 1
    found: dict[PieceKey, set[int]] = {}

    def keep(layer: int, piece: int, rank: int) -> None:
        found.setdefault((layer_number(layer, layers=layers), piece), set()).add(rank)

    for layer in holdings.tables:
        # Empty pieces are assigned too, so that coverage checks pass.
        empty = {p for p in range(holdings.atoms + 1) if not elements_of(holdings, layer, p)}
        for holder in holdings.holders[layer] or holdings.holders[0]:
            for piece in (*holder.atoms, holdings.atoms):
                if piece in empty or not zero:
                    keep(layer, piece, holder.rank)
    for part in all_buckets(holdings) if zero else ():
        for piece in (*part.atoms, *((holdings.atoms,) if part.with_unsplit else ())):
            keep(part.layer, piece, part.owner)
    return {key: tuple(sorted(found[key])) for key in sorted(found)}


def keepers_of(
    holders: Mapping[PieceKey, tuple[int, ...]],
    sizes: Mapping[PieceKey, int],
    nodes: Mapping[int, str],
    zones: Mapping[str, str],
) -> dict[PieceKey, tuple[int, ...]]:
    """Return, for each piece, which of its holders keep it in their snapshots.

    These are one rank in each zone, since restoring from another zone costs money, and at least two
    ranks on two nodes, if two nodes hold the piece. The bytes are balanced over ranks.
    """
    load: Counter[int] = Counter()
    found: dict[PieceKey, tuple[int, ...]] = {}

    def least(ranks: list[int]) -> int:
        return min(ranks, key=lambda rank: (load[rank], rank))

    # Pieces with the fewest holders first, then the largest.
    for key in sorted(holders, key=lambda key: (len(holders[key]), -sizes[key], key)):
        by_zone: dict[str | None, list[int]] = {}
        for rank in holders[key]:
            by_zone.setdefault(zones.get(nodes[rank]), []).append(rank)
        chosen = [least(ranks) for ranks in by_zone.values()]
        if len(chosen) == 1:
            elsewhere = [rank for rank in holders[key] if nodes[rank] != nodes[chosen[0]]]
            chosen += [least(elsewhere)] if elsewhere else []
        load.update(dict.fromkeys(chosen, sizes[key]))
        found[key] = tuple(sorted(chosen))
    return found


def writers_of(
    holders: Mapping[PieceKey, tuple[int, ...]], sizes: Mapping[PieceKey, int]
) -> dict[PieceKey, int]:
    """Return, for each piece, the one rank whose copy is uploaded; balances the bytes."""
    load: Counter[int] = Counter()
    chosen: dict[PieceKey, int] = {}
    # Pieces with the fewest holders first, then the largest.
    for key in sorted(holders, key=lambda key: (len(holders[key]), -sizes[key], key)):
        chosen[key] = min(holders[key], key=lambda rank: (load[rank], rank))
        load[chosen[key]] += sizes[key]
    _level(chosen, load, holders, sizes)
    return chosen


def _level(
    chosen: dict[PieceKey, int],
    load: Counter[int],
    holders: Mapping[PieceKey, tuple[int, ...]],
    sizes: Mapping[PieceKey, int],
) -> None:
    """Move pieces away from the most loaded rank while that lowers the maximum."""
    moved = True
    while moved:
        moved = False
        busiest = max(load, key=lambda rank: (load[rank], -rank), default=0)
        for key in [key for key, rank in chosen.items() if rank == busiest and sizes[key]]:
            other = min(holders[key], key=lambda rank: (load[rank], rank))
            if load[other] + sizes[key] < load[busiest]:
                load[busiest] -= sizes[key]
                load[other] += sizes[key]
                chosen[key] = other
                moved = True
                break


def buddies_of(
    holders: Mapping[PieceKey, tuple[int, ...]],
    writers: Mapping[PieceKey, int],
    sizes: Mapping[PieceKey, int],
    nodes: Mapping[int, str],
    zones: Mapping[str, str],
    survive: Literal["node", "zone"] = "node",
) -> dict[PieceKey, str]:
    """Return the buddy node of each piece whose only copies one loss would destroy.

    A replica that must survive the loss of a node stays in the same zone if possible, since traffic
    between zones costs money; one that must survive the loss of a zone goes to another zone. If the
    plan has no such node, the next best is named, or ``ANY_NODE``. Replicas go to the node with the
    fewest bytes of them.
    """
    load: Counter[str] = Counter()
    members = sorted(set(nodes.values()))
    found: dict[PieceKey, str] = {}
    for key in sorted(writers, key=lambda key: (-sizes[key], key)):
        home = nodes[writers[key]]
        homes = {nodes[rank] for rank in holders[key]}
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
            default=ANY_NODE,
        )
        load[found[key]] += sizes[key]
    return found


def waits_for_replicas(
    buddies: Mapping[PieceKey, str], nodes: Mapping[int, str], zones: Mapping[str, str]
) -> bool:
    """Return whether training waits for replicas; not if no node could take any.

    All ranks must agree, but agents may have read the list of nodes at different times. So nodes
    outside of the plan count only if all ranks are on one node and got the same list.
    """
    members = set(nodes.values())
    is_named = any(buddy != ANY_NODE for buddy in buddies.values())
    return is_named or (bool(buddies) and (len(members) > 1 or not zones.keys() <= members))
