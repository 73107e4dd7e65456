"""A job under a seeded storm of faults, and what became of it.

Faults come about every ten seconds, whether or not the last one is over. Which, when, and on what
is drawn from one seed; how the processes run between them is not.
"""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from agents.protocol import NodeId
from agents.seating import read_seating
from sailord.client import ServerProblem
from sailord.local.cluster import ZONES, Node
from tests.chaos.cluster import ChaosCluster, ChaosPlace
from tests.chaos.record import Recorder, read_steps

JOB = "exact"
NODES_MIN, NODES_MAX = 3, 6
EVERY_S = 10.0
SETTLE_S = 90.0
SETTLE_STEPS = 8
FAULTS: dict[str, int] = {
    "rank": 3,
    "agent": 3,
    "sailord": 2,
    "sailord away": 1,
    "all agents": 1,
    "everybody in charge": 1,
    "node": 3,
    "node and back": 3,
    "stop rank": 2,
    "stop agent": 2,
    "stop sailord": 2,
    "stop node": 2,
    "notice": 3,
    "false notice": 2,
    "doubled notice": 2,
    "no notice": 2,
    "drain": 1,
    "addition": 3,
    "swap": 2,
    "full memory": 1,
    "read-only": 1,
}
"""How often each comes, in relation."""
NEEDS_MOUNTS = ("full memory", "read-only")


class Stuck(Exception):  # noqa: N818 - what happened, in a sentence for a person
    """Something did not come in time."""


@dataclass(eq=False)
class Soak:
    """One storm."""

    cluster: ChaosCluster
    recorder: Recorder
    chance: random.Random
    say: Callable[[str], None]
    only: tuple[str, ...] = ()
    """Kinds of faults; none: all."""
    faults: Counter[str] = field(default_factory=Counter)
    resumed: int = 0
    _due: list[tuple[float, str, Callable[[], None]]] = field(default_factory=list)
    _busy: set[str] = field(default_factory=set)
    """Nodes with which something is being done."""
    armed: set[str] = field(default_factory=set)
    """Those who are to die at a named place, or have just died there."""
    _is_head_away: bool = False

    # ---- the whole of it ------------------------------------------------------------------------

    def begin(self, job: str) -> None:
        """Start everything and wait until the job trains."""
        self.cluster.start()
        self.recorder.start()
        self.cluster.client.ask("POST", "/v1/jobs", {"job": job, "id": JOB})
        self.wait_running(0)

    def storm(self, seconds: float, every_s: float = EVERY_S) -> None:
        """Let faults come for so long."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.live(self.chance.uniform(0.2, 1.8) * every_s)
            self.strike(self._draw())

    def _draw(self) -> str:
        place = self.cluster.place
        has_mounts = isinstance(place, ChaosPlace) and place.has_mounts
        kinds = [kind for kind in self.only or FAULTS if has_mounts or kind not in NEEDS_MOUNTS]
        return self.chance.choices(kinds, [FAULTS[kind] for kind in kinds])[0]

    def live(self, seconds: float) -> None:
        """Let time pass, in which what is due is done."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._do_due()
            self._look_after()
            time.sleep(0.05)

    def settle(self) -> int:
        """Let all be well again; return the step at which the job is ended."""
        while self._due or self.cluster.stopped:
            self.live(0.2)
        self.wait_running(SETTLE_STEPS)
        self.order(f"/v1/jobs/{JOB}/cancel")
        self.wait("the job does not end", self._is_over)
        self.recorder.write("faults", {"at": time.time(), "kind": "end", "nodes": [], "text": ""})
        _, step = max((line["generation"], line["step"]) for line in self._steps())
        return int(step)

    def _is_over(self) -> bool:
        jobs = self.cluster.client.ask("GET", "/v1/jobs")["jobs"]
        return any(j["id"] == JOB and j["state"] == "cancelled" for j in jobs)

    def _steps(self) -> list[dict[str, Any]]:
        return list(read_steps(self.cluster.place.folder, JOB))

    # ---- looking --------------------------------------------------------------------------------

    def generation(self) -> int:
        """The generation that trains, or may; 0 if none does. A job that is held is resumed."""
        job = self.cluster.client.ask("GET", "/v1/status")["job"]
        if job is None:
            return 0
        if job["phase"]["name"] == "held":
            self.say(f"held: {job['phase']['reason']}; resuming")
            self.recorder.write("holds", {"at": time.time(), "reason": job["phase"]["reason"]})
            self.resumed += 1
            self.cluster.client.ask("POST", f"/v1/jobs/{JOB}/resume")
        # What runs goes on while the planner is asked whether there is something better.
        if job["generation"] is None or job["phase"]["name"] not in ("running", "planning"):
            return 0
        return int(job["generation"]["number"])

    def wait_running(self, steps: int) -> None:
        """Return when the job trains and has done so many more steps."""
        first: list[int] = []

        def holds() -> bool:
            job = self.cluster.client.ask("GET", "/v1/status")["job"]
            if not self.generation() or not job:
                return False
            first.append(job["step"])
            return bool(job["step"] >= first[0] + steps)

        self.wait("the job does not get on", holds)

    def wait_generation(self, number: int) -> None:
        """Return when that generation trains, or a later one."""
        self.wait("the job does not move", lambda: self.generation() >= number)

    def wait_ready(self, name: str) -> None:
        """Return when a plan may use the node, or it is gone."""
        cluster = self.cluster
        self.wait(
            f"{name} does not come",
            lambda: name in cluster.ready_nodes() or name not in cluster.nodes,
        )

    def wait(self, complaint: str, holds: Callable[[], bool]) -> None:
        """Return once something holds; ``Stuck`` if it does not in time."""
        end = time.monotonic() + SETTLE_S
        while time.monotonic() < end:
            with contextlib.suppress(ServerProblem):
                if holds():
                    return
            self.live(0.2)
        raise Stuck(f"{complaint} within {SETTLE_S:.0f} s")

    def _look_after(self) -> None:
        """Whoever ended without having been killed is a finding, and is started again."""
        if not self._is_head_away and (told := self.cluster.head_ended()):
            self._ended("sailord", told)
            self.cluster.start_head()
        for name, node in list(self.cluster.nodes.items()):
            has_failed = name in self.armed and not self.is_armed(name)
            if (has_failed or name not in self._busy) and node.agent.poll() is not None:
                self._ended(name, self.cluster.last_words(name))
                self.cluster.start_agent(name)
        with contextlib.suppress(ServerProblem):
            if self.chance.random() < 0.02:
                self.generation()

    def _ended(self, name: str, told: str) -> None:
        if name in self.armed and not self.is_armed(name):
            self.armed.discard(name)
        else:
            self._breach(f"{name} ended by itself: {told}")

    def first_node(self) -> str:
        """The node of rank 0."""
        plan = self.cluster.client.ask("GET", f"/v1/jobs/{JOB}/plan")["plan"]
        first = read_seating(json.dumps(plan), NodeId("")).first
        return str(first).partition(".")[0]

    def _breach(self, text: str) -> None:
        self.say(text)
        self.recorder.write("breaches", {"at": time.time(), "text": text})

    def order(self, path: str, body: dict[str, Any] | None = None) -> bool:
        """Order something until sailord answers; False if it does not, or refuses."""
        end = time.monotonic() + SETTLE_S
        while time.monotonic() < end:
            try:
                self.cluster.client.ask("POST", path, body)
            except ServerProblem as problem:
                if "would change nothing" in str(problem):
                    return True  # It was done when it was ordered before, or needs no doing.
                if "did not answer" not in str(problem):
                    self.say(f"{path}: {problem}")
                self.live(0.3)
            else:
                return True
        return False

    def members(self) -> list[str]:
        """The nodes on which the job runs, as they are called, sorted."""
        job = self.cluster.client.ask("GET", "/v1/status")["job"]
        names = {member.partition(".")[0] for member in job["generation"]["members"]}
        return sorted(names & set(self.cluster.nodes))

    # ---- who is to die at a named place ---------------------------------------------------------

    def arm(self, name: str, where: str) -> None:
        """Let a daemon, or a node's workers, die there."""
        self.armed.add(name)
        self.cluster.arm(name, where)

    def is_armed(self, name: str) -> bool:
        """Nobody has died there yet."""
        return self.cluster.is_armed(name)

    def disarm(self, name: str) -> None:
        """Nobody is to die there any more; a daemon that has is started again."""
        is_daemon = name == "sailord" or name in self.cluster.nodes
        if is_daemon and not self.is_armed(name):
            self.wait(f"{name} does not die", lambda: name not in self.armed)
        self.cluster.disarm(name)
        self.armed.discard(name)

    # ---- time -----------------------------------------------------------------------------------

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

    # ---- faults ---------------------------------------------------------------------------------

    def strike(self, kind: str) -> None:
        """Let one fault happen, or begin."""
        act = getattr(self, "_" + kind.replace(" ", "_").replace("-", "_"))
        free = [name for name in self.cluster.nodes if name not in self._busy]
        if kind in ("sailord", "sailord away", "stop sailord", "everybody in charge"):
            if self._is_head_away:
                return
            self.note(kind, [])
            act()
        elif kind in ("addition", "read-only"):
            self.note(kind, [])
            act()
        elif kind == "all agents":
            self.note(kind, free)
            act(free)
        elif free:
            name = self.chance.choice(sorted(free))
            takes = kind in ("node", "notice", "no notice", "doubled notice", "drain")
            if takes and len(free) <= NODES_MIN:
                return
            self.note(kind, [name])
            act(name)

    def note(self, kind: str, nodes: list[str]) -> None:
        self.faults[kind] += 1
        self.say(f"{kind} {' '.join(nodes)}")
        self.recorder.write("faults", {"at": time.time(), "kind": kind, "nodes": nodes})

    def _rank(self, name: str) -> None:
        self.cluster.kill_workers(name)

    def _agent(self, name: str) -> None:
        self._busy.add(name)
        self.cluster.kill_agent(name)
        self.later(self.chance.choice((0.0, 0.5, 3.0, 6.0)), "", lambda: self._restart(name))

    def _restart(self, name: str) -> None:
        self.cluster.start_agent(name)
        self._busy.discard(name)

    def _all_agents(self, names: list[str]) -> None:
        for name in names:
            self._agent(name)

    def _sailord(self, away_s: float | None = None) -> None:
        self._is_head_away = True
        self.cluster.kill_head()
        self.later(away_s if away_s is not None else self.chance.choice((0.0, 1.0)), "", self._head)

    def _head(self) -> None:
        self.cluster.start_head()
        self._is_head_away = False

    def _sailord_away(self) -> None:
        self._sailord(self.chance.uniform(5.0, 9.0))

    def _everybody_in_charge(self) -> None:
        self._all_agents([name for name in self.cluster.nodes if name not in self._busy])
        self._sailord()

    def _take(self, name: str) -> None:
        """A machine goes, now: a notice may have been given long ago."""
        self.recorder.write("faults", {"at": time.time(), "kind": "taken", "nodes": [name]})
        self.cluster.kill_node(name)

    def _node(self, name: str) -> None:
        self._take(name)
        self._busy.discard(name)
        if len(self.cluster.nodes) < NODES_MIN + 1:
            self.later(self.chance.uniform(1.0, 8.0), "a machine comes", self._addition)

    def strike_node(self, name: str) -> None:
        """A machine goes, and one with its name comes."""
        self._node_and_back(name)

    def _node_and_back(self, name: str) -> None:
        gone: Node = self.cluster.nodes[name]
        self._take(name)
        wait_s = self.chance.choice((0.0, 2.0, 10.0))
        self.later(wait_s, f"{name} comes back", lambda: self.cluster.bring_back(gone))

    def _pause(self, pids: list[int], seconds: float) -> None:
        self.cluster.stop(pids)
        # A thread of its own: whoever asks what stands still waits.
        threading.Timer(seconds, self.cluster.go_on, (pids,)).start()

    def _stop_rank(self, name: str) -> None:
        self._pause(self.cluster.workers(name), self.chance.choice((0.5, 3.0, 8.0)))

    def _stop_agent(self, name: str) -> None:
        self._pause([self.cluster.nodes[name].agent.pid], self.chance.choice((0.5, 3.0, 8.0)))

    def _stop_sailord(self) -> None:
        self._pause([self.cluster.head_pid], self.chance.choice((0.5, 3.0, 8.0)))

    def _stop_node(self, name: str) -> None:
        self._pause(self.cluster.family(name), self.chance.choice((0.5, 3.0, 8.0)))

    def warn(self, name: str, within_s: float) -> None:
        body = {"leaves_at": time.time() + within_s, "reason": "the storm"}
        self.order(f"/v1/nodes/{name}/preempt", body)

    def _notice(self, name: str) -> None:
        self._busy.add(name)
        within_s = self.chance.choice((10.0, 30.0))
        self.later(within_s, f"the cloud takes {name}", lambda: self._node(name))
        self.warn(name, within_s)

    def _doubled_notice(self, name: str) -> None:
        self._notice(name)
        self.warn(name, 10.0)

    def _false_notice(self, name: str) -> None:
        self._busy.add(name)
        self.warn(name, 30.0)
        self.later(self.chance.uniform(0.1, 6.0), "a false alarm", lambda: self.withdraw(name))

    def withdraw(self, name: str) -> None:
        self.order(f"/v1/nodes/{name}/withdraw", {})
        self._busy.discard(name)

    def _no_notice(self, name: str) -> None:
        self._busy.add(name)
        self.warn(name, 0.0)
        self._node(name)

    def _drain(self, name: str) -> None:
        self._busy.add(name)
        self.later(20.0, f"{name} is given back", lambda: self._node(name))
        self.order(f"/v1/nodes/{name}/drain", {})

    def _addition(self) -> None:
        if len(self.cluster.nodes) < NODES_MAX:
            kind = self.chance.choice(("large", "large", "small"))
            self.cluster.add_node(kind, self.chance.choice(ZONES))

    def _swap(self, name: str) -> None:
        self._addition()
        self._node(name)

    def _full_memory(self, name: str) -> None:
        self._busy.add(name)
        full = contextlib.ExitStack()
        full.enter_context(self.cluster.full_memory(name))

        def free() -> None:
            full.close()
            self._busy.discard(name)

        self.later(8.0, f"{name} has room again", free)

    def _read_only(self) -> None:
        try:
            self.cluster.set_read_only(True)
        except OSError:
            return  # Somebody writes just now.
        self.later(8.0, "it takes writes again", lambda: self.cluster.set_read_only(False))
