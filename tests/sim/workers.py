"""Workers of the simulated world: they step in lockstep, seal, upload, and detect lost peers."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from agents.protocol.records import (
    Durable,
    GenerationRecord,
    Holding,
    JobId,
    NodeId,
    Point,
    Sealed,
    Sealing,
)

if TYPE_CHECKING:
    from tests.sim.machines import Machine
    from tests.sim.world import World

LAYERS = 6
SLOTS = 3
"""Sealed snapshots of the current generation that a node has room for."""
NOTICE_S = 0.25
"""Where sealing is slow, peers notice a loss within this time, not only at the end of a step."""
HANGS = LIES = 0.1
"""Shares of seals after a loss that never end, and that are announced to take far too long."""


@dataclass(eq=False)
class Gang:
    """The worker processes of one machine: they outlive their agent, not their machine."""

    pid: int
    record: GenerationRecord
    taking: str
    step: int
    stop_at: int | None = None
    broken: tuple[NodeId, ...] = ()
    failure: str = ""
    is_bug: bool = False
    is_loaded: bool = False
    """Whether the generation's initial state is fetched."""
    is_stuck: bool = False
    """Whether aborts have no effect, so that only a kill ends it."""
    frozen_until: float = 0.0
    seals: dict[int, float] = field(default_factory=dict)
    """When the seals that are under way will be done, by step."""
    sealing: Sealing | None = None
    """What it announced after a loss."""
    contradicted: tuple[NodeId, ...] = ()
    """Nodes whose bits the others contradict."""
    agreed_at: int | None = None
    """The last step after which they did not."""
    has_lost: bool = False
    """It has lost a peer for good; only where sealing is slow."""

    @property
    def generation(self) -> int:
        return self.record.number


class Gangs:
    """All workers of the world; what one does is visible to the others at the next step."""

    def __init__(self, world: World) -> None:
        self.world, self.clock, self.random = world, world.clock, world.random
        self.joined: set[tuple[JobId, int, NodeId]] = set()
        self.seals = Random(f"seals {world.seed}")
        """A stream of its own, so that lives without slow seals stay what they were."""
        self.bits = Random(f"bits {world.seed}")
        """As much, for lives without wrong bits."""
        self.clock.after(self.world.step_s, self._step)
        if world.faults.seals_slowly:
            self.clock.after(NOTICE_S, self._notice_soon)

    # ---- orders of agents -----------------------------------------------------------------

    def join(self, machine: Machine, record: GenerationRecord) -> None:
        old, checker = machine.gang, self.world.checker
        assert old is None or old.taking == "left", "a device has two owners"
        machine.serve(record.job)
        pid = checker.next_pid() if old is None else old.pid
        gang = Gang(pid, record, "fetching", record.restore.point.step)
        machine.gang = gang
        self.joined.add((record.job, record.number, machine.id))
        self.clock.after(self.random.uniform(0.3, 1.5), lambda: self._started(machine, gang))

    def _started(self, machine: Machine, gang: Gang) -> None:
        if machine.gang is not gang or gang.taking != "fetching":
            return
        if not self.can_fetch(gang.record):
            self._fail_to_fetch(gang)
        elif self.random.random() < self.world.faults.worker_bug:
            gang.taking, gang.failure, gang.is_bug = "failed", "an exception in the model", True
        else:
            gang.taking, gang.is_loaded = "running", True
            gang.is_stuck = self.random.random() < self.world.faults.stuck_gang
            if self._is_done(gang.record, gang.step):
                self._end_at_once(machine, gang)
        self._report(machine)

    def _is_done(self, record: GenerationRecord, step: int) -> bool:
        steps = self.world.steps[record.job]
        return steps is not None and step >= steps

    def _end_at_once(self, machine: Machine, gang: Gang) -> None:
        """A generation that begins at the last step makes none, and seals what was in memory."""
        restore = gang.record.restore
        if restore.source == "memory":
            point = Point(gang.step, gang.generation)
            is_uploaded = gang.record.persist_every is not None
            self._seal_soon(machine, gang, point, is_stop=True, is_uploaded=is_uploaded)
            gang.taking = "verifying"
        else:
            gang.taking = "stopped"

    def can_fetch(self, record: GenerationRecord) -> bool:
        """Return whether every layer of the restore point is in memory or in the object store."""
        point = record.restore.point
        if record.restore.source == "start":
            return True
        if record.restore.source == "durable":
            durable = self.world.store.get(f"/job/{record.job}/durable")
            line = self.world.objects.line(durable if isinstance(durable, Durable) else None)
            at_point = [each for each in line if each.point == point]
            return any(self.world.objects.is_whole(each) for each in at_point)
        return point in self.points_in_memory(record.job)

    def _fail_to_fetch(self, gang: Gang) -> None:
        """Report holders of the state that are down as broken peers, else a failure."""
        machines = self.world.machines.values()
        point = gang.record.restore.point
        gone = [m.id for m in machines if not m.is_up and m.had_sealed(gang.record.job, point)]
        if gone:
            gang.taking, gang.broken = "broken", tuple(gone)
        else:
            gang.taking, gang.failure = "failed", "no node holds the state"

    def points_in_memory(
        self, job: JobId, *, among: Container[NodeId] | None = None, before: float = float("inf")
    ) -> set[Point]:
        """Return the points of which every layer is on a machine that is up (``among`` these), and
        was so ``before`` then."""
        held: dict[Point, set[int]] = {}
        for machine in self.world.up():
            if among is not None and machine.id not in among:
                continue
            for sealed in machine.sealed_of(job):
                if machine.sealed_at.get(sealed.point, 0.0) > before:
                    continue
                held.setdefault(sealed.point, set()).update(part.layer for part in sealed.holds)
        return {point for point, layers in held.items() if len(layers) == LAYERS}

    def tell_stop(self, machine: Machine, generation: int, stop_at: int) -> None:
        gang = machine.gang
        if gang is not None and gang.generation == generation:
            gang.stop_at = stop_at

    def abort(self, machine: Machine, generation: int) -> None:
        gang = machine.gang
        if gang is None:
            self.clock.after(
                0.01, lambda: machine.tell(lambda a: a.gang_exited(generation, "no workers"))
            )
        elif gang.generation == generation and not gang.is_stuck:
            self.clock.after(self.random.uniform(0.01, 0.3), lambda: self._leave(machine, gang))

    def _leave(self, machine: Machine, gang: Gang) -> None:
        if machine.gang is not gang:
            return
        if gang.sealing is not None:  # Whatever is ordered, it ends first.
            self.clock.after(NOTICE_S, lambda: self._leave(machine, gang))
        elif self.clock.now >= gang.frozen_until:
            gang.taking = "left"
            self._report(machine)

    def kill(self, machine: Machine, generation: int, why: str = "killed") -> None:
        gang = machine.gang

        def gone() -> None:
            if gang is not None and machine.gang is gang and gang.generation == generation:
                machine.gang = None
            if machine.gang is None:  # Else another generation has begun; the end of this is known.
                machine.tell(lambda a: a.gang_exited(generation, why))

        self.clock.after(self.random.uniform(0.05, 0.5), gone)

    def _report(self, machine: Machine) -> None:
        gang = machine.gang
        if gang is not None:
            machine.tell(lambda agent: agent.gang_reported(gang))

    def contradict(self, wrong: Machine) -> None:
        """Let all workers of a running generation find that one machine's bits are wrong."""
        gang = wrong.gang
        machines = next((each for each in self._running() if wrong in each), [])
        ago = self.bits.randrange(12)
        for machine in machines:
            if gang is None or machine.gang is None or machine.gang.taking != "running":
                continue
            machine.gang.taking, machine.gang.is_bug = "failed", True
            machine.gang.failure = f"a piece differs, and most contradict a rank on {wrong.id}"
            machine.gang.contradicted = (wrong.id,)
            began = machine.gang.record.restore.point.step
            machine.gang.agreed_at = max(began, gang.step - ago)
            self._report(machine)

    # ---- steps ----------------------------------------------------------------------------

    def _running(self) -> list[list[Machine]]:
        """Return the machines of each generation that have its state, and train or lost a peer."""
        running: dict[tuple[JobId, int], list[Machine]] = {}
        for machine in self.world.up():
            gang = machine.gang
            if gang is not None and gang.is_loaded and gang.taking in {"running", "broken"}:
                running.setdefault((gang.record.job, gang.generation), []).append(machine)
        return [running[key] for key in sorted(running)]

    def _notice_soon(self) -> None:
        """Let the peers of a lost worker notice that, in the middle of a step."""
        self.clock.after(NOTICE_S, self._notice_soon)
        for machines in self._running():
            assert machines[0].gang is not None
            self._notice_absence(machines[0].gang.record, machines)

    def _step(self) -> None:
        """Do one step of every generation whose members are all up and connected."""
        self.clock.after(self.world.step_s, self._step)
        for machines in self._running():
            there = {m.id for m in machines if self._can_step(m)}
            record = machines[0].gang.record if machines[0].gang is not None else None
            assert record is not None
            if set(record.members) <= there:
                self._advance(record, machines)
            else:
                self._notice_absence(record, machines)

    def _can_step(self, machine: Machine) -> bool:
        assert machine.gang is not None
        is_thawed = self.clock.now >= machine.gang.frozen_until and not machine.gang.has_lost
        return is_thawed and machine.id not in self.world.cut_from_peers

    def _advance(self, record: GenerationRecord, machines: list[Machine]) -> None:
        gangs = [m.gang for m in machines if m.gang is not None]
        steps = {gang.step for gang in gangs}
        assert len(steps) == 1, f"members of generation {record.number} are at steps {steps}"
        step = steps.pop() + 1
        # The vote at each step's end spreads an order to stop to all ranks.
        is_done = self._is_done(record, step)
        is_stop = is_done or any(g.stop_at is not None and g.stop_at <= step for g in gangs)
        self.world.checker.step_done(record, step)
        point = Point(step, record.number)
        is_sealed = is_stop or step % record.memory_every == 0
        is_uploaded = record.persist_every is not None and (
            is_done or step % record.persist_every == 0
        )
        for machine, gang in zip(machines, gangs, strict=True):
            gang.step, gang.broken, gang.taking = step, (), "running"
            if is_sealed:
                self._seal_soon(machine, gang, point, is_stop=is_stop, is_uploaded=is_uploaded)
            if not is_stop:
                self._report(machine)

    def _seal_soon(
        self, machine: Machine, gang: Gang, point: Point, *, is_stop: bool, is_uploaded: bool
    ) -> None:
        """Seal on each node before the next step ends; a stopping node parks once it has sealed."""
        holds = share(gang.record.members, machine.id)
        if is_stop:
            gang.taking = "sealing"

        def seal() -> None:
            if not machine.is_up or machine.gang is not gang:
                return
            if gang.seals and self.clock.now < gang.frozen_until:
                self.clock.after(gang.frozen_until - self.clock.now, seal)
                return
            gang.seals.pop(point.step, None)
            machine.seal(Sealed(point, holds), slots=SLOTS)
            if is_stop and gang.taking in {"sealing", "verifying"}:
                gang.taking = "stopped"
            machine.tell(lambda agent: agent.snapshots_changed())
            if is_stop:
                self._report(machine)
            if is_uploaded:
                self._upload_soon(machine, gang.record, point)
            if gang.has_lost and not gang.seals:
                self._settle(machine, gang)

        seal_s = self.random.uniform(0.0, 0.4)
        if self.world.faults.seals_slowly:
            seal_s = self.seals.uniform(0.1, 0.9) * self.world.step_s
            gang.seals[point.step] = self.clock.now + seal_s
        self.clock.after(seal_s, seal)

    def _lose(self, machine: Machine, gang: Gang, gone: tuple[NodeId, ...]) -> None:
        """Seal the state of the last step after a loss, and announce how long that takes."""
        gang.has_lost, gang.broken = True, gone
        point = Point(gang.step, gang.generation)
        is_new = gang.step > gang.record.restore.point.step
        if is_new and not machine.had_sealed(gang.record.job, point) and not gang.seals:
            self._seal_soon(machine, gang, point, is_stop=False, is_uploaded=False)
        if not gang.seals:
            self._settle(machine, gang)
            return
        step, done_at = max(gang.seals.items())
        wrong = self.seals.uniform(0.7, 1.3) * (20.0 if self.seals.random() < LIES else 1.0)
        ready_in_s = wrong * (done_at - self.clock.now)
        gang.sealing = Sealing(step, ready_in_s)
        if self.seals.random() < HANGS:
            gang.frozen_until = float("inf")
        self.world.checker.seal_announced(machine, gang.record, gang.sealing)
        self._report(machine)

    def _settle(self, machine: Machine, gang: Gang) -> None:
        """Report the loss once everything is sealed."""
        if gang.sealing is not None:
            self.world.checker.seal_done(machine, gang.record, gang.sealing)
        gang.taking, gang.sealing = "broken", None
        self._report(machine)

    def _upload_soon(self, machine: Machine, record: GenerationRecord, point: Point) -> None:
        """Start uploading in the background."""

        def stored(tries: int = 3) -> None:
            if not machine.is_up or machine.job != record.job or machine.agent is None:
                return  # The agent uploads; an upload in progress dies with it.
            mine = own_share(record.members, machine.id)
            vote = self.world.objects.put(record.job, point, machine.id, mine)
            if vote is not None:
                machine.tell(lambda agent: agent.upload_done(record.job, vote))
            elif tries > 1:
                self.clock.after(2.0, lambda: stored(tries - 1))

        self.clock.after(self.random.uniform(0.5, 6.0), stored)

    def secure(self, machine: Machine, job: JobId, point: Point) -> None:
        """Upload a snapshot now, whatever the interval says."""
        opened = self.world.checker.opened.get((job, point.generation))
        is_there = any(sealed.point == point for sealed in machine.sealed)
        if machine.job == job and opened is not None and is_there:
            self._upload_soon(machine, opened.record, point)

    def _notice_absence(self, record: GenerationRecord, machines: list[Machine]) -> None:
        for machine in machines:
            assert machine.gang is not None
            if self.clock.now < machine.gang.frozen_until or machine.gang.has_lost:
                continue
            gone = [id_ for id_ in record.members if self._is_gone(record, id_, to=machine.id)]
            if self.world.faults.seals_slowly:
                # Who loses a peer tells the others which.
                told = {
                    id_
                    for each in machines
                    if each.gang is not None and each.gang.has_lost
                    for id_ in each.gang.broken
                    if each.gang.record == record
                }
                if gone or told:
                    self._lose(machine, machine.gang, tuple(sorted({*gone, *told} - {machine.id})))
            elif gone:
                machine.gang.taking, machine.gang.broken = "broken", tuple(gone)
                self._report(machine)

    def _is_gone(self, record: GenerationRecord, id_: NodeId, *, to: NodeId) -> bool:
        """Return whether a peer was connected and no longer is, or can never connect."""
        machine = self.world.machines[id_]
        if id_ == to:
            return False
        if not machine.is_up or id_ in self.world.cut_from_peers or to in self.world.cut_from_peers:
            return True
        if (record.job, record.number, id_) not in self.joined:
            return False  # It is still joining.
        gang = machine.gang
        return gang is None or gang.record != record or gang.taking in {"left", "failed"}


def own_share(members: tuple[NodeId, ...], mine: NodeId) -> tuple[Holding, ...]:
    """Return a node's own layers."""
    place, count = members.index(mine), len(members)
    return tuple(Holding(layer, 0, 1) for layer in range(LAYERS) if layer % count == place)


def share(members: tuple[NodeId, ...], mine: NodeId) -> tuple[Holding, ...]:
    """Return a node's own layers and those it replicates for its left neighbour."""
    place, count = members.index(mine), len(members)
    theirs = {place, (place - 1) % count}
    return tuple(Holding(layer, 0, 1) for layer in range(LAYERS) if layer % count in theirs)
