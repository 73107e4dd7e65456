"""Checks before training whether a node has room for snapshots, and a device for the plan.

Each rank reserves exactly its own files later. This check counts the node as a whole: the files of
all its ranks, replicas of other nodes' pieces, and the files that remain while the next generation
makes its own. It needs no torch, so that `plan` and `submit` can say the same beforehand.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from simulator.documents.problems import InputError, Problem
from simulator.spec.job import Job
from simulator.spec.plan import Plan
from worker.checkpoint.free_space import free_bytes, in_mib
from worker.checkpoint.placement import SnapshotPlacement, placement_of, state_bytes
from worker.checkpoint.snapshot_file import NoRoomError
from worker.layout.tensor_table import holdings_for

LEFT_BEHIND = 2
"""A rank's last 2 snapshots stay until those of the next generation are safe."""
COPIES = 3
"""Replicas of other nodes: 2 snapshots, and one in transfer."""


@dataclass(frozen=True, slots=True)
class NodeNeed:
    """Bytes of snapshots that a node must have room for."""

    own: int
    """One snapshot of all its ranks."""
    copies: int
    """One snapshot's replicas of other nodes' pieces."""
    files: int
    """How many files of snapshots each rank has."""

    @property
    def now(self) -> int:
        """Return the bytes needed from the start."""
        return self.files * self.own + COPIES * self.copies

    @property
    def during_change(self) -> int:
        """Return the bytes needed while the next generation makes its own files."""
        return self.now + LEFT_BEHIND * self.own


def node_need(placement: SnapshotPlacement, node: str) -> NodeNeed:
    """Return what one node must have room for."""
    own = sum(
        placement.sizes[key]
        for key, ranks in placement.holders.items()
        for rank in ranks
        if placement.nodes[rank] == node
    )
    copies = sum(placement.sizes[key] for key, buddy in placement.buddies.items() if buddy == node)
    return NodeNeed(own, copies, placement.files)


def host_memory(job: Job, plan: Plan, zones: Mapping[str, str]) -> dict[str, NodeNeed]:
    """Return what each node of a placed plan must have room for."""
    placement = placement_of(job, plan, holdings_for(plan, job), zones)
    return {node: node_need(placement, node) for node in sorted(set(placement.nodes.values()))}


def usual_room(job: Job) -> int:
    """Return the bytes that the nodes of a plan in one zone need together, for most plans.

    If two ranks on two nodes keep each piece, each has two files and two that are left behind. If
    only one does, it has three and two, and another node has three copies. Plans with both kinds of
    pieces need up to a quarter more; a plan on the only node needs half.
    """
    return 8 * state_bytes(job)


def check_room(need: NodeNeed, memory: Path, job: str, generation: int) -> None:
    """Raise ``NoRoomError`` with the missing bytes if the node is too small."""
    # Read the free space first: files made meanwhile are then counted twice rather than never.
    free = free_bytes(memory)
    held = _held(memory / job)
    own = held.pop(generation, 0)
    left = sum(held.values())
    if need.now > free + own:
        missing, available = need.now, free + own
    elif need.during_change > free + own + left:
        missing, available = need.during_change - left, free + own
    else:
        return
    text = (
        f"no room for snapshots: {in_mib(missing)} are needed on this node "
        f"({need.files} for each rank, {LEFT_BEHIND} more during a reconfiguration, and "
        f"{in_mib(COPIES * need.copies)} for replicas of other nodes), "
        f"{in_mib(available)} are free; enlarge that file system or the machine's memory, or name "
        "another folder under memory in the agent's configuration"
    )
    raise NoRoomError.of(errno.ENOSPC, text, memory, missing)


@dataclass(frozen=True, slots=True)
class DevicePeak:
    """The predicted peak memory of a rank on its device."""

    tensors: int
    context: int
    """Held by the driver and the framework before the first tensor."""


def check_device(number: int, needed: int, available: int) -> None:
    """Refuse a device that is too small for the plan, before the first step fails on it."""
    if needed <= available:
        return
    what = f"the predicted peak is {in_mib(needed)}, and the device has {in_mib(available)}"
    cure = (
        "stop other processes on the device; if there are none, "
        "correct usable_memory_gib in the cluster's catalogue"
    )
    raise InputError(Problem(f"device {number}: memory", what, cure))


def _held(folder: Path) -> Counter[int]:
    """Return the bytes of a job's files by generation, including those being written."""
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
