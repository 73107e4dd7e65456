"""Head nodes of the simulated world: the real controller, elected through the store."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from agents.protocol import (
    Fence,
    GenerationRecord,
    Intent,
    JobRecord,
    NodeRecord,
)
from sailord import decide as controller
from sailord import invariants
from sailord.model import (
    AbortGeneration,
    Command,
    Deposed,
    Elected,
    Event,
    GenerationWritten,
    IntentGiven,
    NodesObserved,
    Note,
    PlanFound,
    PlanRefused,
    ProbeAgent,
    ProbeFailed,
    Reported,
    RequestPlan,
    Resign,
    SettleIntent,
    State,
    StoreReturned,
    Ticked,
    WakeAgents,
    WriteGeneration,
    WriteJob,
    WriteRefused,
)
from tests.sim.storage import Client, Store, Unanswered

if TYPE_CHECKING:
    from tests.sim.world import World

LEASE_S = 10.0
MARGIN_S = 2.0


class Head:
    """One sailord process: its shell carries messages and decides nothing."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.clock, self.random = world.clock, world.random
        self.client = Client(world.store, self.random, loss=world.faults.loss)
        self.state = State(options=world.options)
        self.is_up = True
        self.lease: int | None = None
        self.sure_until = 0.0
        self.was_away = False
        self.writes: list[tuple[Callable[[Store], object], Callable[[object], None]]] = []
        self._campaign()
        self._tick()
        self._observe()

    @property
    def now(self) -> float:
        return self.clock.now

    def crash(self) -> None:
        """SIGKILL: only what was stored is left."""
        self.is_up = False
        delay = self.random.uniform(0.5, 6.0)
        self.clock.after(delay, lambda: self.world.start_head(self.name))

    def feed(self, event: Event) -> None:
        if not self.is_up:
            return
        before = self.state
        self.state, commands = controller.decide(before, event)
        invariants.check(before, self.state, commands)
        self.world.checker.decided(self.name, before, self.state)
        for command in commands:
            self._perform(command)

    # ---- leading --------------------------------------------------------------------------

    def _campaign(self) -> None:
        if not self.is_up:
            return
        self.clock.after(1.0, self._campaign)
        if self.state.term is not None:
            self._stay()
            return

        def order(store: Store) -> object:
            if store.get("/leader") is not None:
                return None
            lease = store.grant(LEASE_S)
            store.put("/leader", self.name, lease)
            return lease, store.created("/leader"), *_everything(store)

        asked = self.now

        def done(answer: object) -> None:
            if isinstance(answer, tuple) and self.state.term is None:
                lease, term, nodes, jobs, generations, intents = answer
                self.writes = []
                self.lease, self.sure_until = lease, asked + LEASE_S - MARGIN_S
                self.feed(Elected(self.now, term, nodes, jobs, generations, (), intents))

        self.client.ask(order, done)

    def _stay(self) -> None:
        asked, lease = self.now, self.lease
        assert lease is not None

        def done(answer: object) -> None:
            if answer is True:
                self.sure_until = max(self.sure_until, asked + LEASE_S - MARGIN_S)
            elif answer is False:
                self._step_down()

        self.client.ask(lambda store: store.keep(lease), done)

    def _step_down(self) -> None:
        if self.state.term is not None:
            self.lease = None
            self.feed(Deposed(self.now))

    def _tick(self) -> None:
        if not self.is_up:
            return
        # A real shell would ask its clock before each act; so does this one, when it acts.
        if self.state.term is not None and self.now >= self.sure_until:
            self._step_down()
        self.feed(Ticked(self.now))
        self.clock.after(0.25, self._tick)

    # ---- looking --------------------------------------------------------------------------

    def _observe(self) -> None:
        if not self.is_up:
            return

        def done(answer: object) -> None:
            if isinstance(answer, Unanswered):
                self.was_away = True
                return
            if self.state.term is None:
                return
            if self.was_away:
                self.was_away = False
                self.feed(StoreReturned(self.now))
            assert isinstance(answer, tuple)
            nodes, _, _, intents = answer
            self.feed(NodesObserved(self.now, nodes))
            for intent in intents:
                self.feed(IntentGiven(self.now, intent))

        self.client.ask(_everything, done)
        self.clock.after(self.random.uniform(0.3, 1.0), self._observe)

    # ---- acting ---------------------------------------------------------------------------

    def _perform(self, command: Command) -> None:
        match command:
            case RequestPlan():
                self._plan(command)
            case WriteGeneration():
                self._write(command)
            case WriteJob():
                job = command.job
                self._insist(lambda store: store.put("/job/state", job))
            case SettleIntent():
                id_ = command.id
                self._insist(lambda store: store.delete(f"/intent/{id_}"))
            case AbortGeneration():
                term = self.state.term
                assert term is not None
                fence = Fence(term, command.generation)
                for node in command.nodes:
                    self.world.send(node, lambda n=node: self.world.abort_word(n, fence))  # type: ignore[misc] # the default binds the loop's value
            case WakeAgents():
                for node in command.nodes:
                    self.world.send(node, lambda n=node: self.world.wake(n))  # type: ignore[misc] # the default binds the loop's value
            case ProbeAgent():
                self._probe(command)
            case Note():
                self.world.checker.noted(self.name, command.text)
            case Resign():
                lease, self.lease = self.lease, None
                if lease is not None:
                    self.client.ask(lambda store: store.revoke(lease), lambda _: None)

    def _plan(self, command: RequestPlan) -> None:
        if self.random.random() < self.world.faults.planner_dies:
            return
        nodes = [self.state.nodes[id_].record for id_ in command.nodes]
        proposal = self.world.planner.propose(nodes, command.running)
        took = self.random.uniform(0.01, 0.5)
        if proposal is None:
            why = f"{len(nodes)} nodes are too few"
            self.clock.after(took, lambda: self.feed(PlanRefused(self.now, command.request, why)))
        else:
            self.clock.after(
                took, lambda: self.feed(PlanFound(self.now, command.request, proposal))
            )

    def _write(self, command: WriteGeneration) -> None:
        """Settle it, whatever the store does: written, or refused since another leads."""
        record = command.record

        def order(store: Store) -> object:
            if store.get("/job/gen") == record:
                return True
            if not self._leads(store) or store.get("/job/gen") != command.replaces:
                return False
            store.put("/job/gen", record)
            return True

        def done(answer: object) -> None:
            if answer:
                self.feed(GenerationWritten(self.now, record))
            else:
                self.feed(WriteRefused(self.now))

        self._in_turn(order, done)

    def _insist(self, order: Callable[[Store], object]) -> None:
        self._in_turn(lambda store: order(store) if self._leads(store) else None, lambda _: None)

    def _leads(self, store: Store) -> bool:
        return store.created("/leader") == self.state.term and store.get("/leader") == self.name

    def _in_turn(self, order: Callable[[Store], object], done: Callable[[object], None]) -> None:
        """Write one after another, each until it is known what became of it."""
        self.writes.append((order, done))
        if len(self.writes) == 1:
            self._write_next()

    def _write_next(self) -> None:
        term = self.state.term
        order, done = self.writes[0]

        def answered(answer: object) -> None:
            if not self.is_up or self.state.term != term:
                return
            if isinstance(answer, Unanswered):
                self.client.ask(order, answered)
                return
            self.writes.pop(0)
            if self.writes:
                self._write_next()
            done(answer)

        self.client.ask(order, answered)

    def _probe(self, command: ProbeAgent) -> None:
        answered = False

        def heard(report: object) -> None:
            nonlocal answered
            answered = True
            self.feed(Reported(self.now, report))  # type: ignore[arg-type] # the world hands on reports only

        self.world.probe(command.node, heard)

        def look() -> None:
            if not answered:
                self.feed(ProbeFailed(self.now, command.node))

        self.clock.after(0.4, look)


def _everything(
    store: Store,
) -> tuple[
    tuple[NodeRecord, ...],
    tuple[JobRecord, ...],
    tuple[GenerationRecord, ...],
    tuple[Intent, ...],
]:
    nodes = tuple(v for v in store.take("/node/").values() if isinstance(v, NodeRecord))
    jobs = tuple(v for v in (store.get("/job/state"),) if isinstance(v, JobRecord))
    records = tuple(v for v in (store.get("/job/gen"),) if isinstance(v, GenerationRecord))
    intents = [
        (e.created, e.value)
        for k, e in store.entries.items()
        if k.startswith("/intent/") and isinstance(e.value, Intent)
    ]
    return nodes, jobs, records, tuple(v for _, v in sorted(intents, key=lambda x: x[0]))
