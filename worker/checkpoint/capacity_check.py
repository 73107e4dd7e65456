"""Checks before training whether a node has room for snapshots, and a device for the plan.

Each rank reserves exactly its own files later. This check counts the node as a whole: the files of
all its ranks, replicas of other nodes' pieces, and the files that remain while the next generation
makes its own. It needs no torch, so that `plan` and `submit` can say the same beforehand.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from simulator.documents.problems import InputError, Problem
from simulator.spec.job import Job
from simulator.spec.plan import Plan
from worker.checkpoint.free_space import free_bytes, in_mib
from worker.checkpoint.placement import SnapshotPlacement, placement_of, state_bytes
from worker.checkpoint.snapshot_file import LINKS, NoRoomError, point_of
from worker.layout.tensor_table import holdings_for

LEFT_BEHIND = 2
"""Two snapshots of past generations stay until the first of the next one is complete: the one that
it began from, and an older one if a loss can take that. Later their room is for a snapshot that is
uploaded."""
PointKey = tuple[int, int]
"""The generation and the step of a point."""
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
    first_files: int
    """How many of them each rank needs to begin."""

    @property
    def first(self) -> int:
        """Return the bytes needed to begin."""
        return self.first_files * self.own + COPIES * self.copies

    @property
    def all_files(self) -> int:
        """Return the bytes needed beside what is left, so that all files can be made at once."""
        return self.files * self.own + COPIES * self.copies

    @property
    def during_change(self) -> int:
        """Return the most bytes held: while the next generation makes its first files."""
        return self.first + LEFT_BEHIND * self.own


def node_need(placement: SnapshotPlacement, node: str) -> NodeNeed:
    """Return what one node must have room for."""
    own = sum(
        placement.sizes[key]
        for key, ranks in placement.holders.items()
        for rank in ranks
        if placement.nodes[rank] == node
    )
    copies = sum(placement.sizes[key] for key, buddy in placement.buddies.items() if buddy == node)
    return NodeNeed(own, copies, placement.files, placement.first_files)


def host_memory(job: Job, plan: Plan, zones: Mapping[str, str]) -> dict[str, NodeNeed]:
    """Return what each node of a placed plan must have room for."""
    placement = placement_of(job, plan, holdings_for(plan, job), zones)
    return {node: node_need(placement, node) for node in sorted(set(placement.nodes.values()))}


def usual_room(job: Job) -> int:
    """Return the bytes that the nodes of a plan in one zone need together, for most plans.

    If two ranks on two nodes keep each piece, each has one file and two that are left behind, or
    two and two if the job must survive the loss of a zone. If only one does, as under ZeRO, it has
    three and two, and another node has three copies. Plans with one pipeline need up to two thirds
    more; a plan on the only node needs half.
    """
    return (8 if job.zero or job.checkpoint.survive == "zone" else 6) * state_bytes(job)


def check_room(
    need: NodeNeed, memory: Path, job: str, generation: int, needed: Collection[PointKey] | None
) -> bool:
    """Return whether the node has room for all files of its ranks at once, beside what is left.

    Raises ``NoRoomError`` with the missing bytes if the node is too small. ``needed`` are the
    points of past generations that this one may need: when room is short, the agent deletes the
    others (``SnapshotMemory.release_spare``). ``None``: it deletes none.
    """
    # Read the free space first: files made meanwhile are then counted twice rather than never.
    free = free_bytes(memory)
    held = _held(memory, job)
    own = sum(size for (made_by, _), size in held.items() if made_by == generation)
    left = held.total() - own
    spare = sum(
        size
        for point, size in held.items()
        if needed is not None and point[0] != generation and point not in needed
    )
    # Where the agent deletes nothing, no room comes for further files.
    first = need.all_files if needed is None else need.first
    missing, available = max(first - spare, first + LEFT_BEHIND * need.own - left), free + own
    if missing <= available:
        return need.all_files <= available
    files = need.files if needed is None else need.first_files
    text = (
        f"no room for snapshots: {in_mib(missing)} are needed on this node "
        f"({files} for each rank, {LEFT_BEHIND} more during a reconfiguration, and "
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


def _held(memory: Path, job: str) -> Counter[PointKey]:
    """Return the bytes of a job's files by point.

    Those being written count as step 0, and so do those that only wait for their upload: both are
    deleted when their generation has ended.
    """
    found: Counter[PointKey] = Counter()
    for path in memory.glob(f"{job}/*-*/*"):
        if (point := point_of(path.parent.name)) is not None:
            found[point] += _size(path)
    for path in memory.glob(f"{job}/.*.part"):
        if (number := path.name.split(".")[1]).isdecimal():
            found[int(number), 0] += _size(path)
    for path in memory.glob(f"{LINKS}/{job}.*"):
        of, *numbers = path.name.rsplit(".", 3)
        if of == job and len(numbers) == 3 and numbers[0].isdecimal():
            found[int(numbers[0]), 0] += _size(path, links=1)
    return found


def _size(path: Path, links: int | None = None) -> int:
    """Return the bytes of a file; 0 if it cannot be seen, or has another number of names."""
    try:
        about = path.stat()
    except OSError:
        return 0
    return about.st_size if links in {None, about.st_nlink} else 0
