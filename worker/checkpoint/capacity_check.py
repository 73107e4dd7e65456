"""Has a node room for the snapshots of its ranks? Asked before training, with the number needed.

What a rank reserves later is exact, and only its own. Here the node as a whole is counted: the
files of all its ranks, the copies that others bring, and what stays of this generation while the
next one makes its own.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from simulator.documents.problems import InputError, Problem
from simulator.spec.plan import Plan
from worker.checkpoint.placement import (
    PieceKey,
    StateShape,
    buddies_of,
    piece_holders,
    sizes_of,
    waits_for_replicas,
    writers_of,
)
from worker.checkpoint.snapshot_file import NoRoomError, free_bytes, in_mib
from worker.layout.rank_layout import Holdings, rank_places

LEFT_BEHIND = 2
"""So many of a rank's last points stay until the next generation's are safe."""
COPIES = 3
"""Of what others bring: two points, and one that is on its way."""


@dataclass(frozen=True, slots=True)
class SnapshotPlacement:
    """Who keeps what under a plan, and where copies belong."""

    sizes: Mapping[PieceKey, int]
    holders: Mapping[PieceKey, tuple[int, ...]]
    writers: Mapping[PieceKey, int]
    nodes: Mapping[int, str]
    """Of each rank."""
    buddies: Mapping[PieceKey, str]
    waits: bool
    """Training waits for copies."""

    @classmethod
    def of(
        cls,
        plan: Plan,
        holdings: Holdings,
        shape: StateShape,
        *,
        zero: int,
        survive: Literal["node", "zone"],
        zones: Mapping[str, str],
    ) -> SnapshotPlacement:
        """Work it out, as all ranks do alike."""
        sizes = sizes_of(holdings, shape)
        holders = piece_holders(holdings, zero=zero)
        writers = writers_of(holders, sizes)
        nodes = {
            each.rank: plan.pipelines[each.pipeline].stages[each.stage].places[0].node or ""
            for each in rank_places(plan)
        }
        buddies = buddies_of(holders, writers, sizes, nodes, zones, survive)
        return cls(
            sizes, holders, writers, nodes, buddies, waits_for_replicas(buddies, nodes, zones)
        )

    @property
    def files(self) -> int:
        """So many files a rank has at once."""
        return 3 if self.waits else 2


@dataclass(frozen=True, slots=True)
class NodeNeed:
    """Bytes of snapshots that a node must be able to hold."""

    own: int
    """One point of all its ranks."""
    copies: int
    """One point of what others bring."""
    files: int

    @property
    def now(self) -> int:
        """From the beginning."""
        return self.files * self.own + COPIES * self.copies

    @property
    def during_change(self) -> int:
        """With what stays while the next generation makes its own."""
        return self.now + LEFT_BEHIND * self.own


def node_need(sharing: SnapshotPlacement, node: str) -> NodeNeed:
    """What one node must have room for."""
    own = sum(
        sharing.sizes[key]
        for key, ranks in sharing.holders.items()
        for rank in ranks
        if sharing.nodes[rank] == node
    )
    copies = sum(sharing.sizes[key] for key, buddy in sharing.buddies.items() if buddy == node)
    return NodeNeed(own, copies, sharing.files)


def check_room(need: NodeNeed, memory: Path, job: str, generation: int) -> None:
    """Refuse a node that is too small before anything is done; ``NoRoomError`` has the numbers."""
    # First what is free: what others make meanwhile then counts twice rather than not at all.
    free = free_bytes(memory)
    held = _held(memory / job)
    ours = held.pop(generation, 0)
    left = sum(held.values())
    if need.now > free + ours:
        missing, there = need.now, free + ours
    elif need.during_change > free + ours + left:
        missing, there = need.during_change - left, free + ours
    else:
        return
    text = (
        f"no room for snapshots: {in_mib(missing)} are needed here "
        f"({need.files} for each rank, {LEFT_BEHIND} more during a change of plan, "
        f"and {in_mib(COPIES * need.copies)} for copies of others'), {in_mib(there)} are free; "
        "enlarge that file system or the machine's memory, or name another folder under memory "
        "in the agent's configuration"
    )
    raise NoRoomError.of(errno.ENOSPC, text, memory, missing)


@dataclass(frozen=True, slots=True)
class DevicePeak:
    """The memory of its device that a rank is predicted to take when it takes most."""

    tensors: int
    context: int
    """What driver and framework hold before the first tensor."""


def check_device(number: int, needed: int, there: int) -> None:
    """Refuse a device whose memory the plan would not fit, before the first step runs into it."""
    if needed <= there:
        return
    what = f"{in_mib(needed)} are needed at the peak, as predicted, and {in_mib(there)} are there"
    cure = (
        "end what else uses it; if nothing does, the cluster's catalogue says that it has more: "
        "correct usable_memory_gib there"
    )
    raise InputError(Problem(f"device {number}: memory", what, cure))


def _held(folder: Path) -> Counter[int]:
    """The bytes of a job's files by generation, those that are being written too."""
    found: Counter[int] = Counter()
    for path in (*folder.glob(".*.part"), *folder.glob("*-*/*")):
        name = path.name.split(".")[1] if path.name.startswith(".") else path.parent.name
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            continue
        if (number := name.partition("-")[0]).isdecimal():
            found[int(number)] += size
    return found
