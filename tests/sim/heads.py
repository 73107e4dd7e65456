"""Head nodes of the simulated world: the real controller, elected through the store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from agents.protocol.records import (
    Durable,
    Fence,
    GenerationRecord,
    JobId,
    JobRecord,
    NodeRecord,
    Order,
    Report,
)
from sailord.core.model import commands, events
from sailord.core.model.state import State
from sailord.core.queries.report_reply import answer_to
from sailord.core.queries.restore_choice import release_now
from sailord.core.sharing.decide_parts import decide_parts
from sailord.core.sharing.parts import Parts, whole
from tests.sim.clock import Process
from tests.sim.planners import with_step_time
from tests.sim.storage import Client, Store, Unanswered

if TYPE_CHECKING:
    from tests.sim.world import World

LEASE_S = 10.0
MARGIN_S = 2.0
TICK_S = 0.5
LOOK_S = 3.0
UNANSWERED = 0.7
"""Share of reports without a reply: replies are repeated, so that losing some is harmless."""
SLOW_TOO_MUCH = 2.0
"""Slowdown from which the job is faster without the node."""
TWICE = 0.1
"""Share of events that are delivered twice."""


class Head(Process):
    """One sailord process: its shell passes messages to the real core and decides nothing."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world.clock, ahead_s=world.heads_ahead_s.get(name, 0.0))
        self.world, self.name, self.random = world, name, world.random
        self.client = Client(world.store, self, loss=world.faults.loss)
        self.parts = Parts(State(options=world.options, now=self.now))
        self.lease: int | None = None
        self.lease_until = 0.0
        self.was_away = False
        self.is_to_look = False
        self.writes: list[tuple[Callable[[Store], object], Callable[[object], None]]] = []
        for prefix in ("/node/", "/job/", "/intent/"):
            self.client.watch(prefix, self._schedule_read)
        for loop in (self._campaign, self._tick, self._poll_store):
            self.after(self.random.uniform(0.0, 0.2), loop)

    @property
    def state(self) -> State:
        """All nodes and jobs that it knows."""
        return whole(self.parts)

    def crash(self) -> None:
        """Kill the process: everything but the store is lost."""
        self.is_up = False
        delay = self.random.uniform(0.5, 6.0)
        self.clock.after(delay, lambda: self.world.start_head(self.name))

    def feed(self, event: events.Event) -> None:
        if not self.is_up:
            return
        before = self.parts
        self.parts, decided = decide_parts(before, event)
        for job in (None, *self.parts.others):
            then, now = before.of_job(job), self.parts.of_job(job)
            self.world.checker.decided(self.name, then, now)
            self.world.checker.forecast(now)
        if self.world.books is not None:
            self.world.books.decided(self)
        for command in decided:
            self._perform(command)

    def hear(self, report: Report) -> None:
        """Take an agent's report; reply with the snapshots to release and the point to upload."""
        self.feed(events.Reported(self.now, report))
        if self.random.random() < UNANSWERED:
            return
        part = self.parts.of_node(report.node)
        answer = answer_to(part, report, release_now(part))
        if answer.release is not None or answer.upload is not None:
            self.world.answer(report, answer)

    # ---- election -------------------------------------------------------------------------

    def _campaign(self) -> None:
        self.after(1.0, self._campaign)
        if self.state.term is not None:
            self._renew_lease()
            return

        def request(store: Store) -> object:
            if store.get("/leader") is not None:
                return None
            lease = store.grant(LEASE_S)
            store.put("/leader", self.name, lease)
            return lease, store.created("/leader"), read_store(store)

        asked = self.clock.now

        def done(answer: object) -> None:
            if isinstance(answer, tuple) and self.state.term is None:
                lease, term, seen = answer
                self.writes = []
                self.lease, self.lease_until = lease, asked + LEASE_S - MARGIN_S
                self.feed(events.Elected(self.now, term, **seen._asdict()))

        self.client.ask(request, done)

    def _renew_lease(self) -> None:
        asked, lease = self.clock.now, self.lease
        assert lease is not None

        def done(answer: object) -> None:
            if answer is True:
                self.lease_until = max(self.lease_until, asked + LEASE_S - MARGIN_S)
            elif answer is False:
                self._step_down()

        self.client.ask(lambda store: store.keep(lease), done)

    def _step_down(self) -> None:
        if self.state.term is not None:
            self.lease = None
            self.feed(events.Deposed(self.now))

    def _tick(self) -> None:
        # As in the real shell, the lease's deadline is checked again before each write.
        if self.state.term is not None and self.clock.now >= self.lease_until:
            self._step_down()
        if self.state.term is not None:
            self.feed(events.Ticked(self.now))
        self.after(TICK_S, self._tick)

    # ---- observing the store --------------------------------------------------------------

    def _schedule_read(self) -> None:
        """Schedule one look at the store for several changes."""
        if not self.is_to_look and self.state.term is not None:
            self.is_to_look = True
            self.after(self.random.uniform(0.0, 0.3), self._look)

    def _poll_store(self) -> None:
        self._look()
        self.after(self.random.uniform(1.0, LOOK_S), self._poll_store)

    def _look(self) -> None:
        self.is_to_look = False
        if self.state.term is not None:
            self.client.ask(read_store, self._see)

    def _see(self, answer: object) -> None:
        if isinstance(answer, Unanswered):
            self.was_away = True
            return
        if self.state.term is None:
            return
        if self.was_away:
            self.was_away = False
            self.feed(events.StoreReturned(self.now))
        assert isinstance(answer, StoreContents)
        self.feed(events.NodesObserved(self.now, answer.nodes))
        for job in answer.jobs:
            if job.id not in self.state.jobs:
                self.feed(events.JobSubmitted(self.now, job))
        heard = self.state.known_orders
        told = [i for i in answer.orders if i.id not in heard or self.random.random() < TWICE]
        if told:
            self.feed(events.OrderGiven(self.now, told[0], tuple(told[1:])))

    # ---- commands -------------------------------------------------------------------------

    def _perform(self, command: commands.Command) -> None:
        match command:
            case commands.RequestPlan():
                self._plan(command)
            case commands.WriteGeneration():
                self._write(command)
            case commands.WriteJob():
                job = command.job
                self._write_if_leader(lambda store: store.put(f"/job/{job.id}/state", job))
            case commands.GiveOrder():
                order = command.order
                self._write_if_leader(lambda store: store.put(f"/intent/{order.id}", order))
            case commands.SettleOrder():
                id_ = command.id
                self._write_if_leader(lambda store: store.delete(f"/intent/{id_}"))
            case commands.AbortGeneration():
                term = self.state.term
                assert term is not None
                job_id, fence = command.job, Fence(term, command.generation)
                for node in command.nodes:
                    self.world.send(node, partial(self.world.deliver_abort, node, job_id, fence))
            case commands.WakeAgents():
                for node in command.nodes:
                    self.world.send(node, partial(self.world.wake, node))
            case commands.ProbeAgent():
                self._probe(command)
            case commands.Note():
                self.world.checker.log(self.name, command.text)
            case commands.Resign():
                lease, self.lease = self.lease, None
                if lease is not None:
                    self.client.ask(lambda store: store.revoke(lease), lambda _: None)
            case commands.WriteManifest() | commands.CheckDurable() | commands.CollectGarbage():
                self.after(self.random.uniform(0.05, 1.0), partial(self._at_storage, command))
            case commands.CommitCheckpoint():
                self._commit(command)

    def _plan(self, command: commands.RequestPlan) -> None:
        if self.random.random() < self.world.faults.planner_dies:
            return
        state = self.state
        nodes = [state.nodes[id_].record for id_ in command.nodes]
        found = self.world.planner.propose(nodes, command.running)
        if not isinstance(found, str):
            found = with_step_time(found, self.world.step_s)
        if command.slow and not isinstance(found, str):
            # All ranks wait for the slowest: leave out a node that is slow enough.
            is_slow = max(command.slow.values()) > SLOW_TOO_MUCH
            found = replace(found, is_worth_it=is_slow, why="it is hardly slow")

        def answered() -> None:
            if isinstance(found, str):
                self.feed(events.PlanRefused(self.now, command.request, found))
            else:
                self.feed(events.PlanFound(self.now, command.request, found))

        self.after(self.random.uniform(0.01, 0.5), answered)

    def _at_storage(
        self, command: commands.WriteManifest | commands.CheckDurable | commands.CollectGarbage
    ) -> None:
        """Do something at the object store; its result or failure becomes an event."""
        objects, job = self.world.objects, command.job.id
        match command:
            case commands.WriteManifest():
                if not objects.is_up:
                    self.feed(events.CommitFailed(self.now, job, command.point, "it is away"))
                    return
                if self.state.term is None:
                    return
                durable = objects.write_manifest(command, self.state.term)
                self.feed(events.ManifestWritten(self.now, job, durable))
            case commands.CheckDurable():
                found = objects.newest_readable(command.durable, command.step_max)
                why = "" if found == command.durable else "a layer is damaged"
                away = not objects.is_up
                found = None if away else found
                checked = events.DurableChecked(self.now, job, command.durable, found, why, away)
                self.feed(replace(checked, step_max=command.step_max))
            case commands.CollectGarbage():
                objects.collect(command)

    def _commit(self, command: commands.CommitCheckpoint) -> None:
        record, durable = command.record, command.durable
        key = f"/job/{record.job}/durable"

        def request(store: Store) -> object:
            there, present = store.get(key), store.get(f"/job/{record.job}/gen")
            if there == durable:
                return True
            if not self._leads(store):
                return None
            assert isinstance(present, GenerationRecord)
            is_late = isinstance(there, Durable) and there.point.step >= durable.point.step
            if is_late or present.number != record.number or present.state == "closed":
                return False
            store.put(key, durable)
            return True

        def done(answer: object) -> None:
            if answer is None:
                self.feed(events.WriteRefused(self.now))
            elif answer:
                self.feed(events.CheckpointCommitted(self.now, record.job, durable))
            else:
                self.feed(
                    events.CommitFailed(self.now, record.job, durable.point, "it came too late")
                )

        self._enqueue_write(request, done)

    def _write(self, command: commands.WriteGeneration) -> None:
        """Repeat a write until it is stored, or refused because another head leads."""
        record = command.record
        key = f"/job/{record.job}/gen"

        def request(store: Store) -> object:
            if store.get(key) == record:
                return True
            if not self._leads(store) or store.get(key) != command.replaces:
                return False
            store.put(key, record)
            if command.lowers is not None:
                store.put(f"/job/{record.job}/durable", command.lowers)
            if command.settles:
                store.delete(f"/intent/{command.settles}")
            return True

        def done(answer: object) -> None:
            if answer:
                self.feed(events.GenerationWritten(self.now, record))
            else:
                self.feed(events.WriteRefused(self.now))

        self._enqueue_write(request, done)

    def _write_if_leader(self, request: Callable[[Store], object]) -> None:
        self._enqueue_write(
            lambda store: request(store) if self._leads(store) else None, lambda _: None
        )

    def _leads(self, store: Store) -> bool:
        return store.created("/leader") == self.state.term and store.get("/leader") == self.name

    def _enqueue_write(
        self, request: Callable[[Store], object], done: Callable[[object], None]
    ) -> None:
        """Write records one after another, each after the result of the last."""
        self.writes.append((request, done))
        if len(self.writes) == 1:
            self._write_next()

    def _write_next(self) -> None:
        term = self.state.term
        request, done = self.writes[0]

        def answered(answer: object) -> None:
            if self.state.term != term:
                return
            if isinstance(answer, Unanswered):
                self.client.ask(request, answered)
                return
            self.writes.pop(0)
            if self.writes:
                self._write_next()
            done(answer)

        self.client.ask(request, answered)

    def _probe(self, command: commands.ProbeAgent) -> None:
        answered = False

        def heard(report: Report) -> None:
            nonlocal answered
            answered = True
            self.hear(report)

        self.world.probe(command.node, lambda report: self.run(lambda: heard(report)))

        def look() -> None:
            if not answered:
                self.feed(events.ProbeFailed(self.now, command.node))

        self.after(0.4, look)


class StoreContents(NamedTuple):
    """One look at the store, with the fields of ``Elected``."""

    nodes: tuple[NodeRecord, ...]
    jobs: tuple[JobRecord, ...]
    generations: tuple[GenerationRecord, ...]
    durables: tuple[tuple[JobId, Durable], ...]
    orders: tuple[Order, ...]


def read_store(store: Store) -> StoreContents:
    values = [(key, entry) for key, entry in sorted(store.entries.items())]
    orders = [(e.created, e.value) for _, e in values if isinstance(e.value, Order)]
    return StoreContents(
        tuple(e.value for _, e in values if isinstance(e.value, NodeRecord)),
        tuple(e.value for _, e in values if isinstance(e.value, JobRecord)),
        tuple(e.value for _, e in values if isinstance(e.value, GenerationRecord)),
        tuple((JobId(k.split("/")[2]), e.value) for k, e in values if isinstance(e.value, Durable)),
        tuple(order for _, order in sorted(orders, key=lambda each: each[0])),
    )
