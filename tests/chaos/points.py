"""Each named fail point once: somebody dies just there, while the job moves."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tests.chaos.soak import Soak

SAILORD = (
    "RequestPlan",
    "WriteGeneration.stopping",
    "after WriteGeneration.stopping",
    "WriteGeneration.open",
    "after WriteGeneration.open",
    "WakeAgents",
    "AbortGeneration",
    "WriteManifest",
    "CommitCheckpoint",
    "after CommitCheckpoint",
    "CollectGarbage",
    "SettleIntent",
)
AGENT = (
    "JoinGeneration",
    "TellStop",
    "AbortGang",
    "ReleaseSnapshots",
    "SendReport",
    "copied",
    "uploaded",
)
WORKER = (
    *("joined", "meeting", "met", "fetched", "filled", "reserved", "verified", "copying", "copied"),
    *("sealing", "sealed", "data", "forward", "backward", "sync", "vote", "step"),
    *("stopping", "stopped", "broken", "left"),
)
WITHIN_S = 20.0
"""A point that is not passed within so long is not on the way of this move."""
PLANNED = (
    *("WriteGeneration.stopping", "after WriteGeneration.stopping", "TellStop", "SettleIntent"),
    *("stopping", "stopped"),
)
"""Passed only by moves that are planned."""
QUIET = (
    *("WriteManifest", "CommitCheckpoint", "after CommitCheckpoint", "CollectGarbage"),
    *("ReleaseSnapshots", "SendReport", "copied", "uploaded"),
)
"""Passed without any move."""
SECOND = ("stopping", "stopped", "broken", "left")
"""Passed by a worker as it leaves the generation for which it was armed."""
OF_THE_OLD = ("TellStop", "AbortGang")
"""Passed while an agent is still at the generation that is left."""


@dataclass(frozen=True, slots=True)
class Point:
    """Who dies where."""

    actor: str
    name: str

    def __str__(self) -> str:
        return f"{self.actor} at {self.name}"


ALL: tuple[Point, ...] = (
    *(Point("sailord", name) for name in SAILORD),
    *(Point("agent", name) for name in AGENT),
    *(Point("worker", name) for name in WORKER),
)


@dataclass(eq=False)
class Passes:
    """Lets somebody die at one point after the other, on one cluster."""

    soak: Soak
    passed: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    """Points that the move did not come by."""

    def run(self, points: Iterable[tuple[Point, ...]], until: float = math.inf) -> None:
        """Try each, or each pair, until that moment; after each the job must train."""
        for each in points:
            if time.monotonic() < until:
                self._try(each)

    def _try(self, points: tuple[Point, ...]) -> None:
        soak, cluster = self.soak, self.soak.cluster
        soak.wait_running(2)
        while len(members := soak.members()) < 2:
            soak.live(0.1)  # It has just moved again, to one node.
        current = soak.generation()
        node, other = soak.chance.sample(members, 2)
        soak.say(" and ".join(map(str, points)))
        soak.note("point", [node, other])
        pids = set(cluster.workers(node))
        for point in points:
            self._arm(point, node, current)
        soak.wait_ready(node)
        soak.wait_running(1)
        if any(point.name in SECOND for point in points):
            cluster.kill_workers(other)
            soak.wait_generation(current + 1)
        if any(point.name in PLANNED for point in points):
            soak.warn(other, 60.0)
        elif not all(point.name in QUIET for point in points):
            cluster.kill_workers(other)
        waits_for = {point: self._has_passed(point, node, pids) for point in points}
        end = time.monotonic() + WITHIN_S
        while time.monotonic() < end and not all(has() for has in waits_for.values()):
            soak.live(0.1)
        for point, has in waits_for.items():
            (self.passed if has() else self.missed).append(str(point))
        if "sailord" in soak.armed:
            soak.arm_head("")
        soak.arm_agent(node, "")
        soak.withdraw(other)
        soak.wait_running(2)

    def _arm(self, point: Point, node: str, current: int) -> None:
        """Have the actor die there."""
        number = current if point.name in OF_THE_OLD or point.name in QUIET else current + 1
        if point.actor == "sailord":
            self.soak.arm_head(point.name)
        elif point.actor == "agent":
            self.soak.arm_agent(node, f"{point.name}@{number}")
        else:
            # A worker hears of it with its next seat.
            self.soak.arm_agent(node, f"*:{point.name}:*@{current + 1}")

    def _has_passed(self, point: Point, node: str, pids: set[int]) -> Callable[[], bool]:
        soak, cluster = self.soak, self.soak.cluster
        name = {"sailord": "sailord", "agent": node}.get(point.actor)
        if name is not None:
            return lambda: name not in soak.armed
        return lambda: not pids <= set(cluster.workers(node))
