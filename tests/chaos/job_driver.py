"""Drives one job under faults: waits, orders, delayed actions, restarts of dead processes.

The seed determines the faults; how the processes are scheduled between them varies.
"""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from agents.protocol.records import NodeId, Point
from agents.workers.specs import read_rank_map
from sailord.client import ServerProblem
from tests.chaos.cluster import ChaosCluster
from tests.chaos.recorder import Recorder, read_steps

SETTLE_S = 90.0


class Stuck(Exception):  # noqa: N818 - what happened, in a sentence for a person
    """A condition did not hold within the time limit."""


@dataclass(eq=False)
class JobDriver:
    """Looks after one job and its cluster."""

    cluster: ChaosCluster
    recorder: Recorder
    job: str
    rng: random.Random
    say: Callable[[str], None]
    only: tuple[str, ...] = ()
    """Kinds of faults to inject; empty: all."""
    faults: Counter[str] = field(default_factory=Counter)
    resumed: int = 0
    _due: list[tuple[float, str, Callable[[], None]]] = field(default_factory=list)
    _busy: set[str] = field(default_factory=set)
    """Nodes (or parts of the cluster) with a fault in progress."""
    _whim: random.Random = field(default_factory=random.Random)
    """For choices whose number depends on timing: they must not consume the seeded sequence."""
    armed: set[str] = field(default_factory=set)
    """Processes armed with a fail point, or that have just died at one."""
    _is_head_away: bool = False

    @property
    def path(self) -> str:
        """The job's path in the API."""
        return f"/v1/jobs/{self.job}"

    # ---- state of the job -----------------------------------------------------------------------

    def generation(self) -> int:
        """Return the running generation's number, or 0; resume the job if it is held."""
        job = self.cluster.client.ask("GET", "/v1/status")["job"]
        if job is None:
            return 0
        if job["phase"]["name"] == "held":
            self.say(f"held: {job['phase']['reason']}; resuming")
            self.recorder.write("holds", {"at": time.time(), "reason": job["phase"]["reason"]})
            self.resumed += 1
            self.cluster.client.ask("POST", f"{self.path}/resume")
        # The generation keeps running while the planner looks for a better plan.
        if job["generation"] is None or job["phase"]["name"] not in ("running", "planning"):
            return 0
        return int(job["generation"]["number"])

    def _steps(self) -> list[dict[str, Any]]:
        return list(read_steps(self.cluster.place.folder, self.job))

    def durable(self) -> Point:
        """Return the newest durable checkpoint."""
        found = self.cluster.client.ask("GET", f"{self.path}/checkpoints")["checkpoints"]
        points = (Point(at["step"], at["generation"]) for at in found if at["is_durable"])
        return max(points, default=Point(0, 0))

    def wait_running(self, steps: int) -> None:
        """Return once the job runs and has done this many more steps."""
        first: list[int] = []

        def holds() -> bool:
            job = self.cluster.client.ask("GET", "/v1/status")["job"]
            if not self.generation() or not job:
                return False
            first.append(job["step"])
            return bool(job["step"] >= first[0] + steps)

        self.wait("the job makes no progress", holds)

    def wait(self, complaint: str, holds: Callable[[], bool]) -> None:
        """Return once the condition holds; raise ``Stuck`` after ``SETTLE_S``."""
        end = time.monotonic() + SETTLE_S
        while time.monotonic() < end:
            with contextlib.suppress(ServerProblem):
                if holds():
                    return
            self.live(0.2)
        raise Stuck(f"{complaint} within {SETTLE_S:.0f} s")

    def _look_after(self) -> None:
        """Report and restart every daemon that ended without having been killed."""
        if not self._is_head_away and (reason := self.cluster.head_ended()):
            self._ended("sailord", reason)
            self.cluster.start_head()
        for name, node in list(self.cluster.nodes.items()):
            has_failed = name in self.armed and not self.is_armed(name)
            if (has_failed or name not in self._busy) and node.agent.poll() is not None:
                self._ended(name, self.cluster.last_line(name))
                self.cluster.start_agent(name)
        with contextlib.suppress(ServerProblem):
            if self._whim.random() < 0.02:
                self.generation()

    def _ended(self, name: str, reason: str) -> None:
        if name in self.armed and not self.is_armed(name):
            self.armed.discard(name)
        else:
            self.breach(f"{name} ended by itself: {reason}")

    def first_node(self) -> str:
        """Return the node of rank 0."""
        plan = self.cluster.client.ask("GET", f"{self.path}/plan")["plan"]
        first = read_rank_map(json.dumps(plan), NodeId("")).first
        return str(first).partition(".")[0]

    def breach(self, text: str) -> None:
        self.say(text)
        self.recorder.write("breaches", {"at": time.time(), "text": text})

    def order(self, path: str, body: dict[str, Any] | None = None) -> bool:
        """Send an order until sailord answers; return False on a timeout or a refusal."""
        end, reason = time.monotonic() + SETTLE_S, ""
        while time.monotonic() < end:
            try:
                self.cluster.client.ask("POST", path, body)
            except ServerProblem as problem:
                if "would change nothing" in str(problem):
                    return True  # An earlier attempt took effect, or there is nothing to change.
                if "no such node" in str(problem):
                    return False  # The node has not registered yet; the order is moot.
                if "did not answer" not in str(problem) and str(problem) != reason:
                    reason = str(problem)
                    self.say(f"{path}: {reason}")
                self.live(0.3)
            else:
                return True
        return False

    def members(self) -> list[str]:
        """Return the names of the generation's members, sorted."""
        job = self.cluster.client.ask("GET", "/v1/status")["job"]
        if job is None or job["generation"] is None:
            return []
        names = {member.partition(".")[0] for member in job["generation"]["members"]}
        return sorted(names & set(self.cluster.nodes))

    # ---- fail points ----------------------------------------------------------------------------

    def arm(self, name: str, where: str) -> None:
        """Arm a fail point of a daemon or of a node's workers."""
        self.armed.add(name)
        self.cluster.arm(name, where)

    def is_armed(self, name: str) -> bool:
        """Return whether the fail point has not fired yet."""
        return self.cluster.is_armed(name)

    def disarm(self, name: str) -> None:
        """Remove the fail point; restart the daemon if it died there."""
        is_daemon = name == "sailord" or name in self.cluster.nodes
        if is_daemon and not self.is_armed(name):
            self.wait(f"{name} does not die", lambda: name not in self.armed)
        self.cluster.disarm(name)
        self.armed.discard(name)

    # ---- delayed actions ------------------------------------------------------------------------

    def live(self, seconds: float) -> None:
        """Sleep, and run delayed actions as they become due."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._do_due()
            self._look_after()
            time.sleep(0.05)

    def later(self, seconds: float, what: str, act: Callable[[], None]) -> None:
        self._due.append((time.monotonic() + seconds, what, act))

    def _do_due(self) -> None:
        now = time.monotonic()
        due = [entry for entry in self._due if entry[0] <= now]
        self._due = [entry for entry in self._due if entry[0] > now]
        for _, what, act in sorted(due, key=lambda entry: entry[0]):
            if what:
                self.say(f"  {what}")
            act()
