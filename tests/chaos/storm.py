"""Runs a job under a seeded storm of faults.

A fault comes about every ten seconds, whether or not the last one is over. The seed determines
their kinds, times and targets. Some invariants apply only without other faults; so from time to
time there is a lull, followed by faults of one kind.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from agents.protocol.records import JobId
from sailord.checkpoints.object_storage import open_storage
from sailord.client import ServerProblem
from sailord.local.cluster import ZONES, EmulatedNode
from tests.chaos import leaks
from tests.chaos.checker import AWAY, END, NEAR_S
from tests.chaos.cluster import full
from tests.chaos.faulty import KINDS
from tests.chaos.job_driver import JobDriver
from tests.chaos.net import CUT, DEAF, MUTE, SAILORD, SLOW, STORE, LinkFaults

NODES_MIN, NODES_MAX = 3, 6
EVERY_S = 10.0
SETTLE_STEPS = 8
TIDY_S = 80.0
"""Time for cleanup: a little more than idle workers wait for a generation (`IDLE_S` of agents)."""
KEEP = 3
"""Checkpoints that a job keeps by default."""
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
    "full disk": 1,
    "objects": 4,
    "partition": 2,
    "one way": 1,
    "slow link": 1,
    "resets": 1,
    "sailord cut": 1,
    "slow store": 1,
    "clock": 2,
    "store away": 1,
    "store member": 2,
    "stop member": 1,
    "move without store": 2,
}
"""Relative frequency of each fault."""
NEEDS_MOUNTS = ("full memory", "read-only", "full disk")
NEEDS_ETCD = ("store away", "store member", "stop member", "move without store")
OF_HEAD = ("sailord", "sailord away", "stop sailord", "everybody in charge")
OF_NO_NODE = ("addition", "read-only", "full disk", "objects", "sailord cut", "slow store", "clock")
LULL_EVERY_S = 75.0
"""Mean time between lulls."""
CALM_S, MOVED_S = 2 * NEAR_S + 1.0, NEAR_S + 1.0
"""Quiet time before faults that workers must not notice, and before a planned reconfiguration that
must lose no step."""
APART_S = 8.0
DAEMON_FAULTS = ("agent", "stop sailord", "sailord", "all agents")
JUMPS_S = (-4000.0, -30.0, 30.0, 4000.0)
PLANNED = ("drain", "notice", "doubled notice")


@dataclass(eq=False)
class Storm(JobDriver):
    """One storm."""

    has_objects: bool = False
    """Whether checkpoints go to an object store instead of a folder."""

    # ---- course of the storm --------------------------------------------------------------------

    def begin(self, job: str) -> None:
        """Start everything and wait until the job trains."""
        self.cluster.start()
        self.recorder.start()
        self.cluster.client.ask("POST", "/v1/jobs", {"job": job, "id": self.job})
        self.wait_running(0)

    def inject_faults(self, seconds: float, every_s: float = EVERY_S) -> None:
        """Inject faults for this time."""
        end, lull_at, lulls = time.monotonic() + seconds, self._next_lull(), self._lulls()
        while time.monotonic() < end:
            if time.monotonic() > lull_at and not self.only:
                next(lulls)()
                lull_at = self._next_lull()
            self.live(self.rng.uniform(0.2, 1.8) * every_s)
            self.inject(self._draw())

    def _next_lull(self) -> float:
        return time.monotonic() + self.rng.uniform(0.6, 1.4) * LULL_EVERY_S

    def _lulls(self) -> Iterator[Callable[[], None]]:
        lulls = [self._kill_daemons, self._reconfigure_twice]
        self.rng.shuffle(lulls)
        return itertools.cycle(lulls)

    def _kill_daemons(self) -> None:
        """Kill sailord and agents, one after the other, without other faults."""
        self._wait_for_calm(CALM_S)
        first = "sailord away" if self.cluster.members is None else self.rng.choice(AWAY)
        for kind in (first, *self.rng.sample(DAEMON_FAULTS, 2)):
            self.inject(kind)
            self.live(APART_S)

    def _reconfigure_twice(self) -> None:
        """Reconfigure twice as planned, so that nothing but a planned one precedes the second."""
        while len(self.cluster.nodes) < NODES_MIN + 2:
            self._addition()
        self._wait_for_calm(MOVED_S)
        for kind in ("drain", self.rng.choice(PLANNED)):
            self.inject(kind, self.members())
            self.live(APART_S)

    def _wait_for_calm(self, seconds: float) -> None:
        while self._due or self.cluster.stopped:
            self.live(0.2)
        self.wait_running(1)
        self.say("a lull")
        self.live(seconds)

    def _draw(self) -> str:
        cluster = self.cluster
        missing: tuple[str, ...] = () if cluster.has_own_memory else NEEDS_MOUNTS
        missing += NEEDS_ETCD if cluster.members is None else ()
        missing += () if self.has_objects else ("objects",)
        missing += ("read-only", "full disk") if self.has_objects else ()
        kinds = [kind for kind in self.only or FAULTS if kind not in missing]
        return self.rng.choices(kinds, [FAULTS[kind] for kind in kinds])[0]

    def settle(self) -> int:
        """Wait until all faults are over, cancel the job, and return its last step."""
        while self._due or self.cluster.stopped:
            self.live(0.2)
        self.wait_running(SETTLE_STEPS)
        self._make_last_durable()
        self._report_leftovers("durable", self._orphans)
        self.recorder.write("faults", {"at": time.time(), "kind": END, "nodes": []})
        self.order(f"{self.path}/cancel")
        self.wait("the job does not end", self._is_over)
        _, step = max((line["generation"], line["step"]) for line in self._steps())
        return int(step)

    def sweep(self) -> None:
        """Look for leaks of the ended job while the daemons that clean up still run."""
        self._report_leftovers("ended", self._leftovers)
        self._read_kept()

    def _make_last_durable(self) -> None:
        client = self.cluster.client
        step = client.ask("GET", "/v1/status")["job"]["step"]
        self.order(f"{self.path}/checkpoint")
        self.wait("the last checkpoint is not made", lambda: self.durable().step >= step)

    def _report_leftovers(self, when: str, look: Callable[[], list[str]]) -> None:
        """Report what is still left after ``TIDY_S``."""
        end = time.monotonic() + TIDY_S
        while (left := look()) and time.monotonic() < end:
            self.live(0.5)
        for each in left:
            self.breach(f"left over, job {when}: {each}")

    def _orphans(self) -> list[str]:
        """Return objects in the durable store that no kept checkpoint needs."""
        with contextlib.suppress(ServerProblem):
            storage = open_storage(f"file://{self.cluster.durable}")
            begun = self.recorder.begun
            durable = self.durable()
            return list(
                leaks.in_durable(storage, JobId(self.job), durable=durable, keep=KEEP, begun=begun)
            )
        return ["sailord did not say what is durable"]

    def _leftovers(self) -> list[str]:
        """Return memory, ports and workers that the job has left on the nodes."""
        cluster, place = self.cluster, self.cluster.place
        return [
            *leaks.in_memory(place.memory),
            *(leaks.in_shared_memory(place) if cluster.has_own_memory else ()),
            *leaks.ports(place.folder, cluster.servers()),
            *(f"worker {pid} of {name}" for name in cluster.nodes for pid in cluster.workers(name)),
        ]

    def _read_kept(self) -> None:
        """Record whether every byte of each kept checkpoint is readable."""
        storage = open_storage(f"file://{self.cluster.durable}")
        for point, faults in leaks.readable(storage, JobId(self.job)):
            about = {"step": point.step, "generation": point.generation, "faults": faults}
            self.recorder.write("commits", {"at": time.time(), **about, "is_kept": True})

    def _is_over(self) -> bool:
        jobs = self.cluster.client.ask("GET", "/v1/jobs")["jobs"]
        return any(j["id"] == self.job and j["state"] == "cancelled" for j in jobs)

    # ---- faults ---------------------------------------------------------------------------------

    def inject(self, kind: str, among: Collection[str] = ()) -> None:
        """Inject one fault, on one of the preferred nodes if any of them is free."""
        act = getattr(self, "_" + kind.replace(" ", "_").replace("-", "_"))
        free = [name for name in self.cluster.nodes if name not in self._busy]
        if kind in OF_HEAD or kind in OF_NO_NODE or kind in NEEDS_ETCD:
            is_busy = self._is_head_away if kind in OF_HEAD else kind in self._busy
            is_busy |= kind in NEEDS_ETCD and STORE in self._busy
            if is_busy:
                return
            self.note(kind, [])
            act()
        elif kind == "all agents":
            self.note(kind, free)
            act(free)
        elif free:
            name = self.rng.choice(sorted(set(free) & set(among)) or sorted(free))
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
        self.later(self.rng.choice((0.0, 0.5, 3.0, 6.0)), "", lambda: self._restart(name))

    def _restart(self, name: str) -> None:
        self.cluster.start_agent(name)
        self._busy.discard(name)

    def _all_agents(self, names: list[str]) -> None:
        for name in names:
            self._agent(name)

    def _sailord(self, away_s: float | None = None) -> None:
        self._is_head_away = True
        self.cluster.kill_head()
        self.later(away_s if away_s is not None else self.rng.choice((0.0, 1.0)), "", self._head)

    def _head(self) -> None:
        self.cluster.start_head()
        self._is_head_away = False

    def _sailord_away(self) -> None:
        self._sailord(self.rng.uniform(5.0, 9.0))

    def _everybody_in_charge(self) -> None:
        self._all_agents([name for name in self.cluster.nodes if name not in self._busy])
        self._sailord()

    def _take(self, name: str) -> None:
        """Remove a machine now, and record the moment apart from an earlier notice's."""
        self.recorder.write("faults", {"at": time.time(), "kind": "taken", "nodes": [name]})
        self.cluster.kill_node(name)

    def _node(self, name: str) -> None:
        self._take(name)
        self._busy.discard(name)
        if len(self.cluster.nodes) < NODES_MIN + 1:
            self.later(self.rng.uniform(1.0, 8.0), "a machine is added", self._addition)

    def replace_node(self, name: str) -> None:
        """Replace a machine by an empty one with its name."""
        self._node_and_back(name)

    def _node_and_back(self, name: str) -> None:
        gone: EmulatedNode = self.cluster.nodes[name]
        self._take(name)
        wait_s = self.rng.choice((0.0, 2.0, 10.0))
        self.later(wait_s, f"{name} comes back", lambda: self.cluster.bring_back(gone))

    def _pause(self, pids: list[int], seconds: float) -> None:
        self.cluster.stop(pids)
        # In a thread of its own: the main one may be waiting for the suspended process.
        threading.Timer(seconds, self.cluster.go_on, (pids,)).start()

    def _stop_rank(self, name: str) -> None:
        self._pause(self.cluster.workers(name), self.rng.choice((0.5, 3.0, 8.0)))

    def _stop_agent(self, name: str) -> None:
        self._pause([self.cluster.nodes[name].agent.pid], self.rng.choice((0.5, 3.0, 8.0)))

    def _stop_sailord(self) -> None:
        self._pause([self.cluster.head_pid], self.rng.choice((0.5, 3.0, 8.0)))

    def _stop_node(self, name: str) -> None:
        self._pause(self.cluster.family(name), self.rng.choice((0.5, 3.0, 8.0)))

    def warn(self, name: str, within_s: float) -> None:
        body = {"leaves_at": time.time() + within_s, "reason": "the storm"}
        self.order(f"/v1/nodes/{name}/preempt", body)

    def _notice(self, name: str) -> None:
        self._busy.add(name)
        within_s = self.rng.choice((10.0, 30.0))
        self.later(within_s, f"the cloud takes {name}", lambda: self._node(name))
        self.warn(name, within_s)

    def _doubled_notice(self, name: str) -> None:
        self._notice(name)
        self.warn(name, 10.0)

    def _false_notice(self, name: str) -> None:
        self._busy.add(name)
        self.warn(name, 30.0)
        self.later(self.rng.uniform(0.1, 6.0), "a false alarm", lambda: self.withdraw(name))

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
            kind = self.rng.choice(("large", "large", "small"))
            self.cluster.add_node(kind, self.rng.choice(ZONES))

    def _swap(self, name: str) -> None:
        self._addition()
        self._node(name)

    def _full_memory(self, name: str) -> None:
        self._busy.add(name)
        memory = contextlib.ExitStack()
        memory.enter_context(full(self.cluster.place.memory / name))

        def free() -> None:
            memory.close()
            self._busy.discard(name)

        self.later(8.0, f"{name} has room again", free)

    def _full_disk(self) -> None:
        disk = contextlib.ExitStack()
        disk.enter_context(full(self.cluster.durable))
        self._until(8.0, "full disk", "there is room for checkpoints again", disk.close)

    def _objects(self) -> None:
        kind = self.rng.choice(KINDS)
        self.say(f"  the object store: {kind}")
        self.cluster.set_storage_trouble(kind)
        over = "the object store is well again"
        self._until(12.0, "objects", over, lambda: self.cluster.set_storage_trouble(""))

    def _until(self, seconds: float, who: str, text: str, act: Callable[[], None]) -> None:
        """End a fault after some time; its target gets no other fault before."""
        self._busy.add(who)

        def end() -> None:
            act()
            self._busy.discard(who)

        self.later(seconds, text, end)

    # ---- clock and network ----------------------------------------------------------------------

    def _clock(self) -> None:
        """Set a daemon's clock wrong, then right again. Requests are signed with the time."""
        free = [name for name in self.cluster.nodes if name not in self._busy]
        name, ahead_s = self.rng.choice((SAILORD, *sorted(free))), self.rng.choice(JUMPS_S)
        self.say(f"  {name} {ahead_s:+.0f} s")
        self.cluster.set_clock(name, ahead_s)
        right = f"the clock of {name} is right again"
        self._until(8.0, "clock", right, lambda: self.cluster.set_clock(name, 0.0))

    def _partition(self, name: str) -> None:
        self._set_faults(name, CUT, self.rng.choice((1.0, 4.0, 12.0)))

    def _one_way(self, name: str) -> None:
        self._set_faults(name, self.rng.choice((DEAF, MUTE)), self.rng.choice((1.0, 4.0, 12.0)))

    def _slow_link(self, name: str) -> None:
        self._set_faults(name, SLOW, 12.0)

    def _slow_store(self) -> None:
        self._set_faults(STORE, SLOW, 8.0)

    def _sailord_cut(self) -> None:
        self._set_faults(SAILORD, CUT, self.rng.choice((1.0, 4.0, 8.0)))

    def _set_faults(self, name: str, faults_of: LinkFaults, seconds: float) -> None:
        now = self.cluster.proxies.net.faults_of
        now[name] = faults_of
        who = "slow store" if name == STORE else "sailord cut" if name == SAILORD else name

        def clear_up() -> None:
            now.pop(name, None)

        self._until(seconds, who, f"{name} is reached again", clear_up)

    def _resets(self, name: str) -> None:
        self.cluster.proxies.net.reset(name)

    # ---- an etcd --------------------------------------------------------------------------------

    def _store_away(self) -> None:
        self._without_store(self.rng.uniform(5.0, 9.0))

    def _without_store(self, seconds: float) -> None:
        members = self.cluster.members
        assert members is not None
        members.kill()
        self._until(seconds, STORE, "the store is there again", members.start)

    def _store_member(self) -> None:
        members = self.cluster.members
        assert members is not None
        one = [self.rng.randrange(len(members.processes))]
        members.kill(one)
        self._until(self.rng.uniform(1.0, 6.0), STORE, "", lambda: members.start(one))

    def _stop_member(self) -> None:
        members = self.cluster.members
        assert members is not None
        self._pause([self.rng.choice(members.pids())], 3.0)

    def _move_without_store(self) -> None:
        """Stop the store in some phase of the reconfiguration after a loss."""
        name = self.rng.choice(self.members() or sorted(self.cluster.nodes))
        self.recorder.write("faults", {"at": time.time(), "kind": "rank", "nodes": [name]})
        self.cluster.kill_workers(name)
        self._busy.add(STORE)
        away_s = self.rng.uniform(3.0, 6.0)
        self.later(self.rng.uniform(0.1, 3.0), "no store", lambda: self._without_store(away_s))

    def _read_only(self) -> None:
        try:
            self.cluster.set_read_only(True)
        except OSError:
            return  # A file is open for writing just now.
        self.later(8.0, "it takes writes again", lambda: self.cluster.set_read_only(False))
