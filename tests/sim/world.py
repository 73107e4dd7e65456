"""The whole cluster on a virtual clock: real decisions, simulated wires, disks and workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from agents.protocol import (
    Fence,
    GenerationRecord,
    Holding,
    Intent,
    JobId,
    JobRecord,
    NodeId,
    NodeRecord,
    Point,
    Report,
)
from sailord.model import Options, Proposal, Reported
from tests.sim.checker import Checker
from tests.sim.clock import Clock
from tests.sim.heads import Head
from tests.sim.machines import LAYERS, Crew, Machine
from tests.sim.storage import Store

JOB = JobId("job")
STEP_S = 0.5


@dataclass(frozen=True)
class Faults:
    """What goes wrong, and how often: one record, so that a seed and it replay everything."""

    every_s: float = 15.0
    loss: float = 0.02
    planner_dies: float = 0.02
    worker_bug: float = 0.02
    stuck_crew: float = 0.1
    kinds: tuple[str, ...] = (
        *("power_off", "power_off", "notice", "false_notice", "late_notice", "reboot", "add"),
        *("add", "agent_killed", "head_killed", "store_away", "cut_off", "crew_killed"),
        *("drain", "pause_resume", "head_paused"),
    )


GENTLE = Faults(kinds=("power_off", "notice", "reboot", "add", "add"), worker_bug=0.0)
"""Machines come and go and nothing else is wrong: nothing may count as a failure of the job."""


class Planner:
    """All nodes in their order, if there are at least two; deterministic, as the real one is."""

    def propose(self, nodes: list[NodeRecord], running: GenerationRecord | None) -> Proposal | None:
        if len(nodes) < 2:
            return None
        members = tuple(sorted(node.id for node in nodes))
        gain = running is None or len(members) > len(running.members)
        return Proposal("plan:" + ",".join(members), members, gain, "as many nodes", STEP_S, 1.5)


class World:
    """Everything there is, driven by one seed."""

    def __init__(self, seed: int, faults: Faults, planner: object = None) -> None:
        self.random, self.faults = Random(seed), faults
        self.clock = Clock()
        self.options = Options(start_s=30.0, stop_s=20.0, stall_s=30.0)
        self.store = Store(self.clock)
        self.checker = Checker(self.clock, self.store)
        self.planner = Planner() if planner is None else planner
        self.machines: dict[NodeId, Machine] = {}
        self.cut_off: set[NodeId] = set()
        self.cut_pairs: set[NodeId] = set()
        self.joined: set[tuple[NodeId, int]] = set()
        self.heads: dict[str, Head] = {}
        self.count = 0
        self.store.put("/job/state", JobRecord(JOB, "queued", layers=LAYERS, atoms=1))
        for _ in range(5):
            self.add_machine()
        self.start_head("head-a")
        self.start_head("head-b")
        self.clock.after(STEP_S, self._step)

    # ---- processes ------------------------------------------------------------------------

    def add_machine(self, name: str | None = None) -> Machine:
        self.count += 1
        zone = f"zone-{self.count % 3}"
        machine = Machine(self, NodeId(f"n{self.count:03}"), name or f"m{self.count:03}", zone)
        self.machines[machine.id] = machine
        return machine

    def start_head(self, name: str) -> None:
        self.heads[name] = Head(self, name)

    def up(self) -> list[Machine]:
        return [m for m in self.machines.values() if m.is_up]

    def fit_for_work(self) -> list[Machine]:
        return [m for m in self.up() if m.record.state == "ready"]

    # ---- wires ----------------------------------------------------------------------------

    def send(self, node: NodeId, what: Callable[[], None]) -> None:
        """Between a node and the heads: late, sometimes never, sometimes twice."""
        if node in self.cut_off or self.random.random() < self.faults.loss:
            return
        self.clock.after(self.random.uniform(0.001, 0.1), what)
        if self.random.random() < self.faults.loss:
            self.clock.after(self.random.uniform(0.1, 5.0), what)

    def to_heads(self, report: Report) -> None:
        for head in list(self.heads.values()):
            head.feed(Reported(self.clock.now, report))

    def abort_word(self, node: NodeId, fence: Fence) -> None:
        machine = self.machines[node]
        if machine.agent is not None:
            machine.agent.hear_abort(fence)

    def wake(self, node: NodeId) -> None:
        agent = self.machines[node].agent
        if agent is not None:
            agent.wake()

    def probe(self, node: NodeId, heard: Callable[[Report], None]) -> None:
        machine = self.machines[node]
        if machine.agent is None or node in self.cut_off:
            return
        report = machine.agent.state.last_report
        if report is not None:
            self.send(node, lambda: heard(report))

    def raise_intent(self, intent: Intent) -> None:
        if f"/intent/{intent.id}" not in self.store.entries:
            self.store.put(f"/intent/{intent.id}", intent)

    # ---- workers --------------------------------------------------------------------------

    def join(self, machine: Machine, record: GenerationRecord) -> None:
        old = machine.crew
        assert old is None or old.taking == "left", "a device has two owners"
        pid = self.checker.next_pid() if old is None else old.pid
        crew = Crew(pid, record.number, "fetching", record.restore.point.step)
        machine.crew = crew
        self.joined.add((machine.id, record.number))
        self.clock.after(self.random.uniform(0.3, 1.5), lambda: self._started(machine, crew))

    def _started(self, machine: Machine, crew: Crew) -> None:
        if machine.crew is not crew or crew.taking != "fetching":
            return
        if self.random.random() < self.faults.worker_bug:
            crew.taking, crew.failure = "failed", "an exception in the model"
        else:
            crew.taking = "running"
            crew.is_stuck = self.random.random() < self.faults.stuck_crew
        self._say(machine)

    def _say(self, machine: Machine) -> None:
        if machine.agent is not None and machine.crew is not None:
            machine.agent.crew_says(machine.crew)

    def abort(self, machine: Machine, generation: int) -> None:
        crew = machine.crew
        if crew is None or crew.generation != generation:
            agent = machine.agent
            if agent is not None and crew is None:
                self.clock.after(0.01, lambda: agent.crew_exited(generation, "", is_bug=False))
            return

        def left() -> None:
            if machine.crew is crew:
                crew.taking = "left"
                if machine.agent is not None:
                    machine.agent.crew_left(generation)

        if not crew.is_stuck:
            self.clock.after(self.random.uniform(0.01, 0.3), left)

    def kill_crew(self, machine: Machine, generation: int) -> None:
        crew = machine.crew

        def gone() -> None:
            if machine.crew is crew:
                machine.crew = None
            if machine.agent is not None:
                machine.agent.crew_exited(generation, "killed", is_bug=False)

        self.clock.after(self.random.uniform(0.05, 0.5), gone)

    def _step(self) -> None:
        """One step of every generation whose members are all there and connected."""
        self.clock.after(STEP_S, self._step)
        record = self.store.get("/job/gen")
        running: dict[int, list[Machine]] = {}
        for machine in self.up():
            crew = machine.crew
            if crew is not None and crew.taking in {"running", "broken"}:
                running.setdefault(crew.generation, []).append(machine)
        for generation, machines in sorted(running.items()):
            members = self.checker.members(generation)
            there = {m.id for m in machines if m.id not in self.cut_pairs}
            if set(members) <= there:
                self._advance(generation, machines)
            else:
                self._notice_absence(machines, members)
        assert record is None or isinstance(record, GenerationRecord)

    def _advance(self, generation: int, machines: list[Machine]) -> None:
        steps = {m.crew.step for m in machines if m.crew is not None}
        assert len(steps) == 1, f"members of generation {generation} are at steps {steps}"
        step = steps.pop() + 1
        stops = [m.crew.stop_at for m in machines if m.crew and m.crew.stop_at is not None]
        is_stop = any(stop <= step for stop in stops)
        ids = sorted(m.id for m in machines)
        self.checker.stepped(generation, step)
        for machine in machines:
            assert machine.crew is not None
            machine.crew.step = step
            machine.crew.broken = ()
            machine.crew.taking = "stopped" if is_stop else "running"
            machine.seal(Point(step, generation), _share(ids, machine.id))
            self._say(machine)

    def _notice_absence(self, machines: list[Machine], members: tuple[NodeId, ...]) -> None:
        for machine in machines:
            assert machine.crew is not None
            gone = []
            for id_ in members:
                if id_ != machine.id and self._is_gone(id_, machine.crew.generation):
                    gone.append(id_)
            if gone:
                machine.crew.taking, machine.crew.broken = "broken", tuple(gone)
                self._say(machine)

    def _is_gone(self, id_: NodeId, generation: int) -> bool:
        """A peer of the generation was connected and is no more, or will never be."""
        machine = self.machines[id_]
        if not machine.is_up or id_ in self.cut_pairs:
            return True
        if (id_, generation) not in self.joined:
            return False  # It is on its way.
        crew = machine.crew
        return crew is None or crew.generation != generation or crew.taking in {"left", "failed"}


def _share(ids: list[NodeId], mine: NodeId) -> tuple[Holding, ...]:
    """A node's own layers, and its left neighbour's, whose buddy it is."""
    place, count = ids.index(mine), len(ids)
    own = [layer for layer in range(LAYERS) if layer % count == place]
    theirs = [layer for layer in range(LAYERS) if layer % count == (place - 1) % count]
    return tuple(Holding(layer, 0, 1) for layer in sorted({*own, *theirs}))
