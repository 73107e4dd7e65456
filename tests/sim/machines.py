"""Machines of the simulated world, each with an agent that decides as the real one does."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from agents.core import decide as agent
from agents.core import model
from agents.protocol.parts import is_of_another
from agents.protocol.records import (
    ENDED,
    LIVE,
    Durable,
    Fence,
    GenerationRecord,
    JobId,
    JobRecord,
    NodeId,
    NodeMeasurements,
    NodeRecord,
    Order,
    Point,
    Report,
    ReportReply,
    Sealed,
    Uploaded,
)
from agents.registration import choose
from agents.snapshots.memory import may_need
from tests.sim.clock import Process
from tests.sim.storage import Client, Store, Unanswered
from tests.sim.workers import Gang

if TYPE_CHECKING:
    from tests.sim.world import World

TICK_S = 1.0
LOOK_S = 3.0


class Machine:
    """One life of a machine, from boot to end, and what outlives its processes."""

    def __init__(self, world: World, id_: NodeId, name: str) -> None:
        self.world, self.clock, self.random = world, world.clock, world.random
        self.id, self.name = id_, name
        gpu = world.gpus[int(name.strip("m")) % len(world.gpus)]
        zone = "b" if world.faults.survive == "zone" and int(name.strip("m")) % 2 else "a"
        self.record = NodeRecord(
            id_, name, f"us-central1-{zone}", f"{gpu}x1", gpu, 1, f"{name}:1",
            lease_s=world.lease_s,
        )  # fmt: skip
        self.booted_at = self.clock.now
        self.ahead_s = self.random.choice((0.0, self.random.uniform(-2.0, 2.0)))
        """Offset of its clock from true time; faults may set it at any moment."""
        self.is_up = True
        self.times_slower = 1.0
        self.unfit = world.why_unfit
        """Why the first job cannot be prepared here."""
        self.gang: Gang | None = None
        self.job: JobId | None = None
        self.sealed_at: dict[Point, float] = {}
        self.sealed: tuple[Sealed, ...] = ()
        """Sealed snapshots in its memory, of ``job``, its workers' last job."""
        self.of_others: dict[JobId, tuple[Sealed, ...]] = {}
        """Those of earlier jobs, which have not ended."""
        self.kept = model.State(self.record)
        """The agent's state on disk."""
        self.is_full = int(id_.strip("n")) % 2 == 1
        """Its memory is full at each generation's start and second snapshot."""
        self.agent: Agent | None = None
        self.agent = Agent(self)

    def end(self) -> None:
        """Power off: end agent and workers and lose the memory."""
        self.is_up = False
        self.kill_agent(for_good=True)
        self.gang = None

    def had_sealed(self, job: JobId, point: Point) -> bool:
        return any(sealed.point == point for sealed in self.sealed_of(job))

    def sealed_of(self, job: JobId | None) -> tuple[Sealed, ...]:
        """Return the snapshots of a job in its memory."""
        return self.sealed if job == self.job else self.of_others.get(job or JobId(""), ())

    def serve(self, job: JobId) -> None:
        """Begin to work for a job; snapshots of the last one stay in memory."""
        if self.job != job:
            before, kept = self.job, self.sealed
            self.job, self.sealed = job, self.of_others.pop(job, ())
            if before is not None:
                self.of_others[before] = kept

    def kill_agent(self, *, for_good: bool = False) -> None:
        if self.agent is not None:
            self.agent.is_up = False
            self.agent = None
        if not for_good:
            self.clock.after(self.random.uniform(0.5, 5.0), self._restart_agent)

    def _restart_agent(self) -> None:
        if self.is_up and self.agent is None:
            self.agent = Agent(self)

    def set_unfit(self, why: str) -> None:
        """Let the job's preparation fail here, or succeed again."""
        self.unfit = why
        self.tell(lambda agent: agent.prepared())

    def seal(self, sealed: Sealed, *, slots: int) -> None:
        """Add a snapshot in place of its generation's oldest; others stay until released."""
        gang = self.gang
        mine = [each for each in self.sealed if each.point.generation == sealed.point.generation]
        if mine and gang is not None and not gang.has_lost:  # After a loss it asks for no room.
            self.make_room(gang.record, is_complete=True)
        gone = mine[: max(len(mine) - slots + 1, 0)]
        before = self.sealed = (*self.sealed, sealed)
        self.sealed_at[sealed.point] = self.clock.now
        if gone:
            self.sealed = tuple(each for each in before if each not in gone)
            self.world.checker.check_release(self, before)

    def make_room(self, record: GenerationRecord, *, is_complete: bool = False) -> None:
        """Delete what a generation can spare if the memory is full.

        Once it has a point that ``is_complete``, it can spare all of past ones, if any.
        """
        before, number = self.sealed, record.number
        if self.job != record.job or record.fallback is None or not self.is_full:
            return
        past = [each for each in before if each.point.generation < number]
        kept = [each for each in past if not is_complete and may_need(record, each.point)]
        self.sealed = tuple(each for each in before if each not in past or each in kept)
        if self.sealed != before:
            self.world.checker.check_release(self, before, may_lose_one=True)
            self.tell(lambda agent: agent.snapshots_changed())

    def release(self, order: model.ReleaseSnapshots) -> None:
        """Delete snapshots up to the safe point, except the running generation's last two."""
        if self.job != order.job:
            return
        before, safe = self.sealed, (order.safe.generation, order.safe.step)
        running = [s.point for s in before if s.point.generation == order.running][-2:]
        kept = [s for s in before if (s.point.generation, s.point.step) >= safe]
        kept += [s for s in before if s.point in running and s not in kept]
        if len(kept) < len(before):
            self.sealed = tuple(sorted(kept, key=lambda each: each.point))
            self.world.checker.check_release(self, before)
            self.tell(lambda agent: agent.snapshots_changed())

    def tell(self, happened: Callable[[Agent], None]) -> None:
        """Give an event to the machine's agent, if it is up."""
        here = self.agent
        if here is not None:
            here.run(lambda: happened(here))


class Agent(Process):
    """The agent's shell: it passes events to the real core and executes its commands."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine.clock, ahead_s=machine.ahead_s)
        self.machine, self.world, self.random = machine, machine.world, machine.random
        self.client = Client(self.world.store, self, loss=self.world.faults.loss)
        self.client.is_cut = machine.id in self.world.cut_from_heads
        self.lease: int | None = None
        self.is_looking = self.is_woken = self.has_other_job = False
        kept = machine.kept
        gang = None
        if kept.gang is not None:
            gang = model.Gang(kept.gang.generation, "fetching", 0, self.now)
        self.state = model.State(
            kept.node,
            now=self.now,
            heard=kept.heard,
            job=kept.job,
            left=kept.left,
            sealed=machine.sealed_of(kept.job),  # The real agent reads its memory first.
            gang=gang,
            uploaded=kept.uploaded,
            notices=kept.notices,
            # Report numbers come from a clock since boot, which survives the agent's restarts.
            reports=int((self.clock.now - machine.booted_at) * 1000),
        )
        self.after(self.random.uniform(0.2, 2.0), lambda: self.feed(model.SelfTested(self.now)))
        self.client.watch("/job/", self._look)
        self.after(0.0, self.prepared)
        for loop in (self._tick, self._poll_store, self._keep, self._find_gang):
            self.after(0.0, loop)

    def feed(self, event: model.Event) -> None:
        if not self.is_up:
            return
        job = self.state.job
        self.state, commands = agent.decide(self.state, event)
        self.machine.kept, self.machine.record = self.state, self.state.node
        for command in commands:
            self._perform(command)
        if self.state.job not in (None, job):
            self.snapshots_changed()

    def _perform(self, command: model.Command) -> None:
        machine, gangs = self.machine, self.world.gangs
        match command:
            case model.Register():
                self._register(command.node)
            case model.JoinGeneration():
                gangs.join(machine, command.record)
                machine.make_room(command.record)
            case model.SendStop():
                gangs.tell_stop(machine, command.generation, command.stop_at)
            case model.AbortGang():
                gangs.abort(machine, command.generation)
            case model.KillGang():
                gangs.kill(machine, command.generation)
            case model.SendReport():
                self._tell(command.report)
            case model.ReleaseSnapshots():
                machine.release(command)
            case model.DeleteJobSnapshots():
                machine.of_others.pop(command.job, None)
                if machine.job == command.job:
                    machine.sealed = ()
                    self.snapshots_changed()
                self.world.checker.check_deleted(machine.id, command.job)
            case model.StoreOrder():
                self._raise(command.order)
            case model.Exit() | model.Note():
                pass

    def _tell(self, report: Report) -> None:
        """Send a report to the leader: late, out of order, twice, or never."""
        self.world.send(self.machine.id, lambda: self.world.report_to_heads(report))

    # ---- the store ------------------------------------------------------------------------

    def _register(self, node: NodeRecord) -> None:
        def request(store: Store) -> object:
            if self.lease is None or not store.keep(self.lease):
                self.lease = store.grant(node.lease_s)
            store.put(f"/node/{node.id}", node, self.lease)
            return node

        def done(answer: object) -> None:
            if isinstance(answer, Unanswered):
                self.feed(model.StoreFailed(self.now))
                self.after(0.5, again)
            else:
                self.feed(model.Registered(self.now, node))

        def again() -> None:
            if self.state.node == node:
                self._register(node)

        self.client.ask(request, done)

    def _raise(self, order: Order) -> None:
        def answered(answer: object) -> None:
            if isinstance(answer, Unanswered):
                self.after(0.5, lambda: self._raise(order))

        self.client.ask(lambda _: self.world.give_order(order), answered)

    def _look(self) -> None:
        """Read the store one request at a time, as the real agent does, so that order is kept."""
        self.is_woken = self.is_looking
        if self.is_looking:
            return
        self.is_looking = True
        held = self.state.job if self.state.gang is not None else None

        def request(store: Store) -> object:
            return store.take("/job/")

        def done(answer: object) -> None:
            self.is_looking = False
            if isinstance(answer, dict):
                self._read(answer, held)
            else:
                self.feed(model.StoreFailed(self.now))
            if self.is_woken:
                self._look()

        self.client.ask(request, done)

    def _read(self, jobs: dict[str, object], held: JobId | None) -> None:
        records = [value for value in jobs.values() if isinstance(value, GenerationRecord)]
        states = {value.id: value for value in jobs.values() if isinstance(value, JobRecord)}
        record = choose(records, states, self.machine.id, held)
        durable = None if record is None else jobs.get(f"/job/{record.job}/durable")
        point = durable.point if isinstance(durable, Durable) else None
        self.feed(model.GenerationRead(self.now, record, point))
        live = {job.id for job in states.values() if job.state in LIVE}
        if self.has_other_job != bool(live - {self.world.first_job}):
            self.has_other_job = not self.has_other_job
            self.prepared()
        kept = {*self.machine.of_others, self.machine.job}
        for job in sorted(each for each in kept if each is not None):
            mine = states.get(job)
            if mine is None:
                continue
            if mine.state in ENDED or is_of_another(self.machine.id, job, states):
                self.feed(model.JobEnded(self.now, mine.id))

    def _poll_store(self) -> None:
        self._look()
        self.after(self.random.uniform(0.5, LOOK_S), self._poll_store)

    def wake(self) -> None:
        self._look()

    def _keep(self) -> None:
        def done(answer: object) -> None:
            if answer is False:
                self.lease = None
                self.feed(model.LeaseEnded(self.now))
            elif isinstance(answer, Unanswered):
                self.feed(model.StoreFailed(self.now))

        lease = self.lease
        if lease is not None:
            self.client.ask(lambda s: s.keep(lease), done)
        self.after(2.5, self._keep)

    # ---- the node -------------------------------------------------------------------------

    def _tick(self) -> None:
        self.feed(model.Ticked(self.now))
        self.after(TICK_S, self._tick)

    def _find_gang(self) -> None:
        """Tell a starting agent about the workers that it finds."""
        self.snapshots_changed()
        known, gang = self.state.gang, self.machine.gang
        if known is not None and (gang is None or gang.generation != known.generation):
            self.gang_exited(known.generation, "workers were gone when the agent started")
        elif gang is not None:
            self.gang_reported(gang)

    def prepared(self) -> None:
        """Tell whether the live job can run here."""
        unfit = "" if self.has_other_job else self.machine.unfit
        self.feed(model.UnfitChanged(self.now, unfit))

    def snapshots_changed(self) -> None:
        job = self.machine.job if self.state.job is None else self.state.job
        self.feed(model.SnapshotsChanged(self.now, self.machine.sealed_of(job), job))

    def upload_done(self, job: JobId, uploaded: Uploaded) -> None:
        self.feed(model.UploadDone(self.now, job, uploaded))

    def hear_answer(self, job: JobId, answer: ReportReply) -> None:
        """Take the leader's reply to a report."""
        if answer.release is not None and answer.term is not None:
            self.feed(model.ReleaseReceived(self.now, answer.term, job, answer.release))
        if answer.upload is not None:
            self.world.gangs.secure(self.machine, job, answer.upload)

    def hear_abort(self, job: JobId, fence: Fence) -> None:
        self.feed(model.AbortReceived(self.now, job, fence))

    def notice(self, id_: str, leaves_at: float | None) -> None:
        """Take a preemption notice; ``leaves_at`` is in true time."""
        self.feed(model.NoticeGiven(self.now, id_, leaves_at))

    def withdraw(self, id_: str) -> None:
        self.feed(model.NoticeWithdrawn(self.now, id_))

    def gang_reported(self, gang: Gang) -> None:
        taking = "idle" if gang.taking == "left" else gang.taking
        rank = gang.record.members.index(self.machine.id)
        self.feed(
            model.GangReported(
                self.now,
                gang.generation,
                taking,  # type: ignore[arg-type] # a gang's words are a gang's
                gang.step,
                gang.broken,
                gang.failure,
                is_bug=gang.is_bug,
                measured=NodeMeasurements(
                    busy=((rank, self.world.step_s * self.machine.times_slower),)
                ),
                sealing=gang.sealing,
                contradicted=gang.contradicted,
                agreed_at=gang.agreed_at,
            )
        )

    def gang_exited(self, generation: int, failure: str) -> None:
        self.feed(model.GangExited(self.now, generation, failure))
