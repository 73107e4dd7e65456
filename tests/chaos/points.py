"""Kills a process at each named fail point, after provoking what leads there.

Each point names what provokes it. Daemons and workers read their fail point from a file while
they run (`agents/daemon/failpoints.py`), so that arming one disturbs nothing else.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, assert_never

from tests.chaos.storm import Storm

Way = Literal[
    "training", "loss", "notice", "checkpoint", "rollback", "pause", "node", "all memory",
    "restart", "goodbye", "stuck rank",
]  # fmt: skip
"""What provokes the point:

- *training*: nothing, training reaches it
- *loss*: kill another node's workers
- *notice*: send a notice to another node
- *checkpoint*, *rollback*, *pause*: order it; after a pause, resume
- *node*, *all memory*: replace another node, or every node
- *restart*, *goodbye*: kill the agent, or send it SIGTERM
- *stuck rank*: suspend the node's own worker, and kill another node's workers
"""
WITHIN_S = 40.0
"""A point that is not reached within this time counts as missed, in seconds."""
TRIES = 2


@dataclass(frozen=True, slots=True)
class Point:
    """A process, its fail point, and what provokes it."""

    actor: Literal["sailord", "agent", "worker"]
    name: str
    way: Way = "loss"
    is_next: bool = False
    """The point is reached at every step: arm it for the next generation only."""
    is_anywhere: bool = False
    """The plan determines which node reaches it: arm it on all."""

    def __str__(self) -> str:
        return f"{self.actor} at {self.name} ({self.way})"


def _all(actor: Literal["sailord", "agent", "worker"], names: str, way: Way) -> tuple[Point, ...]:
    return tuple(Point(actor, name.replace("+", "after "), way) for name in names.split())


OF_A_STEP = "copying copied sealing sealed data forward backward sync vote step"
ALL: tuple[Point, ...] = (
    *_all("sailord", "RequestPlan WriteGeneration.open +WriteGeneration.open", "loss"),
    *_all("sailord", "WakeAgents AbortGeneration", "loss"),
    *_all("sailord", "WriteGeneration.stopping +WriteGeneration.stopping", "notice"),
    *_all("sailord", "WriteGeneration.open +WriteGeneration.open", "notice"),
    *_all("sailord", "WriteManifest CommitCheckpoint +CommitCheckpoint", "checkpoint"),
    *_all("sailord", "CollectGarbage SettleOrder +SettleOrder", "checkpoint"),
    *_all("sailord", "WriteGeneration.open +WriteGeneration.open", "rollback"),
    *_all("sailord", "WriteGeneration.closed +WriteGeneration.closed", "pause"),
    *_all("sailord", "WriteJob +WriteJob", "pause"),
    *_all("sailord", "ProbeAgent", "node"),
    *_all("sailord", "CheckDurable", "all memory"),
    *_all("agent", "JoinGeneration AbortGang", "loss"),
    *_all("agent", "SendStop", "notice"),
    *_all("agent", "ReleaseSnapshots SendReport copied", "training"),
    *_all("agent", "uploading uploaded", "checkpoint"),
    Point("agent", "receiving", "node", is_anywhere=True),
    Point("agent", "serving", "node", is_anywhere=True),
    *_all("agent", "Register", "restart"),
    *_all("agent", "StoreOrder", "goodbye"),
    *_all("agent", "KillGang", "stuck rank"),
    *_all("worker", "joined meeting met fetched filled reserved verified broken left", "loss"),
    *_all("worker", "stopping stopped", "notice"),
    *(Point("worker", name, "loss", is_next=True) for name in OF_A_STEP.split()),
)


@dataclass(eq=False)
class Passes:
    """Tries one fail point after the other on one cluster."""

    storm: Storm
    passed: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    """Points that were not reached."""

    def run(self, points: Iterable[tuple[Point, ...]], until: float = math.inf) -> None:
        """Try each point or pair until that moment; the job must train after each."""
        for each in points:
            if time.monotonic() < until:
                self._try(each)

    def _try(self, points: tuple[Point, ...]) -> None:
        left = points
        for _ in range(TRIES):
            left = self._once(left)
            if not left:
                break
        self.passed += [str(point) for point in points if point not in left]
        self.missed += [str(point) for point in left]

    def _once(self, points: tuple[Point, ...]) -> tuple[Point, ...]:
        """Try the points once, on a random node; return those that were not reached."""
        storm = self.storm
        storm.wait_running(2)
        if any(point.way in ("all memory", "rollback") for point in points):
            self._make_durable()
        current, members = self._where()
        node, other = storm.rng.sample(members, 2)
        if any(point.name == "meeting" for point in points):
            node, other = self._first(members)  # Only rank 0 opens the rendezvous.
        storm.say(f"{' and '.join(map(str, points))} on {node}")
        storm.note("point", [node, other])
        spared = [name for name in members if name != other]
        armed = {
            point: [self._arm(point, name, current) for name in self._who(point, node, spared)]
            for point in points
        }

        def is_left(point: Point) -> bool:
            return all(map(storm.is_armed, armed[point]))

        ways = list(dict.fromkeys(point.way for point in points))
        for way in ways:
            self._provoke(way, node, other)
            end = time.monotonic() + WITHIN_S / len(ways)
            while time.monotonic() < end and any(map(is_left, points)):
                storm.live(0.05)
        left = tuple(filter(is_left, points))
        for name in itertools.chain(*armed.values()):
            storm.disarm(name)
        for way in ways:
            self._undo(way, node, other)
        storm.say("  missed: " + ", ".join(map(str, left)) if left else "  passed")
        storm.wait_running(2)
        return left

    def _who(self, point: Point, node: str, nodes: list[str]) -> list[str]:
        return nodes if point.is_anywhere else [node]

    def _where(self) -> tuple[int, list[str]]:
        """Return the running generation and its members, once there are at least two."""
        storm = self.storm
        found: list[tuple[int, list[str]]] = []

        def holds() -> bool:
            current, members = storm.generation(), storm.members()
            if current and len(members) < 2:
                storm.order(f"{storm.path}/replan")  # After failures a plan may leave nodes out.
                storm.live(2.0)
            found.append((current, members))
            return bool(current) and len(members) >= 2

        storm.wait("the job does not run on two nodes", holds)
        return found[-1]

    def _first(self, members: Sequence[str]) -> tuple[str, str]:
        """Return the node of rank 0, and another."""
        first = self.storm.first_node()
        return first, next(name for name in members if name != first)

    def _arm(self, point: Point, node: str, current: int) -> str:
        """Arm the fail point; return the name that it is armed under."""
        if point.actor != "worker":
            name = "sailord" if point.actor == "sailord" else node
            self.storm.arm(name, point.name)
            return name
        number = current + 1 if point.is_next else "*"
        self.storm.arm(f"{node}.worker", f"*:{point.name}:*@{number}")
        return f"{node}.worker"

    def _provoke(self, way: Way, node: str, other: str) -> None:
        storm, cluster = self.storm, self.storm.cluster
        match way:
            case "training":
                pass
            case "loss":
                cluster.kill_workers(other)
            case "notice":
                storm.warn(other, 60.0)
            case "checkpoint":
                storm.order(f"{storm.path}/checkpoint")
            case "rollback":
                storm.order(f"{storm.path}/checkpoints/{storm.durable().step}/rollback")
            case "pause":
                storm.order(f"{storm.path}/pause")
            case "node":
                storm.replace_node(other)
            case "all memory":
                for name in list(cluster.nodes):
                    storm.replace_node(name)
            case "restart":
                cluster.kill_agent(node)
                cluster.start_agent(node)
            case "goodbye":
                cluster.ask_agent_to_end(node)
            case "stuck rank":
                cluster.stop(cluster.workers(node))
                cluster.kill_workers(other)
            case _:
                assert_never(way)

    def _undo(self, way: Way, node: str, other: str) -> None:
        """Undo what `_provoke` did: resume the job, withdraw the notice, restart the node."""
        storm = self.storm
        if way == "notice":
            storm.withdraw(other)
        elif way == "pause":
            storm.order(f"{storm.path}/resume")
        elif way == "goodbye":
            storm.replace_node(node)  # A restarted agent would continue its shutdown.
        elif way == "stuck rank":
            storm.cluster.go_on(list(storm.cluster.stopped))

    def _make_durable(self) -> None:
        self.storm.order(f"{self.storm.path}/checkpoint")
        self.storm.wait("no checkpoint is committed", lambda: self.storm.durable().step > 0)
