"""Machines of the simulated world: an agent with its real core, workers that count steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING

from agents import decide as agent
from agents.model import (
    AbortGang,
    AbortHeard,
    Command,
    End,
    EndAsked,
    Event,
    Gang,
    GangExited,
    GangReported,
    GenerationRead,
    JoinGeneration,
    KillGang,
    LeaseEnded,
    Note,
    NoticeSeen,
    NoticeWithdrawn,
    RaiseIntent,
    Register,
    Registered,
    SelfTested,
    SendReport,
    SnapshotsChanged,
    State,
    StoreFailed,
    TellStop,
    Ticked,
)
from agents.protocol import (
    Fence,
    GenerationRecord,
    Holding,
    NodeId,
    NodeRecord,
    Point,
    Report,
    Sealed,
)
from tests.sim.storage import Client, Store, Unanswered

if TYPE_CHECKING:
    from tests.sim.world import World

LAYERS = 6
LEASE_S = 10.0


@dataclass
class Crew:
    """The worker processes of one machine: they outlive their agent, not their machine."""

    pid: int
    generation: int
    taking: str
    step: int
    stop_at: int | None = None
    broken: tuple[NodeId, ...] = ()
    failure: str = ""
    is_stuck: bool = False
    """Not even an abort moves it: only a kill does."""


class Machine:
    """One life of a machine, from boot to end."""

    def __init__(self, world: World, id_: NodeId, name: str, zone: str) -> None:
        self.world, self.clock, self.random = world, world.clock, world.random
        self.id, self.name = id_, name
        self.record = NodeRecord(id_, name, zone, "box", "A100-40", 1, f"{name}:1")
        self.is_up = True
        self.crew: Crew | None = None
        self.sealed: tuple[Sealed, ...] = ()
        self.kept = (Fence(0, 0), 0)
        """What an agent keeps on its disk: the fence it heard, the generation it left."""
        self.agent: Agent | None = None
        self.agent = Agent(self)

    def end(self) -> None:
        """Power off: agent, workers and memory are gone at once."""
        self.is_up = False
        self.agent, self.crew, self.sealed = None, None, ()

    def kill_agent(self) -> None:
        self.agent = None
        self.clock.after(self.random.uniform(0.5, 5.0), self._restart_agent)

    def _restart_agent(self) -> None:
        if self.is_up and self.agent is None:
            self.agent = Agent(self)

    def seal(self, point: Point, holds: tuple[Holding, ...]) -> None:
        self.sealed = (*self.sealed, Sealed(point, holds))[-2:]


class Agent:
    """The agent's shell: it carries events to the real core, and the core's orders out."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.world = machine, machine.world
        self.clock, self.random = machine.clock, machine.random
        self.client = Client(self.world.store, self.random, loss=self.world.faults.loss)
        self.client.is_cut = machine.id in self.world.cut_off
        self.lease: int | None = None
        heard, left = machine.kept
        crew = machine.crew
        gang = None
        if crew is not None:
            gang = Gang(crew.generation, crew.taking, crew.step, self.clock.now)  # type: ignore[arg-type] # a crew's words are a gang's
        self.state = State(machine.record, heard=heard, left=left, gang=gang, sealed=machine.sealed)
        # Reports go on from where the last agent of this life left off.
        self.state = replace(self.state, reports=int(self.clock.now * 1000))
        self.clock.after(self.random.uniform(0.2, 2.0), lambda: self.feed(SelfTested(self.now)))
        for loop in (self._tick, self._read, self._keep):
            self.clock.after(0.0, loop)

    @property
    def now(self) -> float:
        return self.clock.now

    @property
    def is_there(self) -> bool:
        return self.machine.is_up and self.machine.agent is self

    def feed(self, event: Event) -> None:
        if not self.is_there:
            return
        self.state, commands = agent.decide(self.state, event)
        self.machine.kept = (self.state.heard, self.state.left)
        self.machine.record = self.state.node
        for command in commands:
            self._perform(command)

    def _perform(self, command: Command) -> None:
        machine = self.machine
        match command:
            case Register():
                self._register(command.node)
            case JoinGeneration():
                self.world.join(machine, command.record)
            case TellStop():
                crew = machine.crew
                if crew is not None and crew.generation == command.generation:
                    crew.stop_at = command.stop_at
            case AbortGang():
                self.world.abort(machine, command.generation)
            case KillGang():
                self.world.kill_crew(machine, command.generation)
            case SendReport():
                self._tell(command.report)
            case RaiseIntent():
                intent = command.intent
                self._insist(lambda _: self.world.raise_intent(intent), lambda _: None)
            case End() | Note():
                pass

    def _tell(self, report: Report) -> None:
        """To whoever leads; late, out of order, twice, or never."""
        self.world.send(self.machine.id, lambda: self.world.to_heads(report))

    def _register(self, node: NodeRecord) -> None:
        def order(store: Store) -> object:
            if self.lease is None or not store.keep(self.lease):
                self.lease = store.grant(LEASE_S)
            store.put(f"/node/{node.id}", node, self.lease)
            return node

        def done(answer: object) -> None:
            if isinstance(answer, Unanswered):
                self.feed(StoreFailed(self.now))
                self.clock.after(0.5, lambda: self._again(node))
            else:
                self.feed(Registered(self.now, node))

        self.client.ask(order, done)

    def _again(self, node: NodeRecord) -> None:
        if self.is_there and self.state.node == node:
            self._register(node)

    def _insist(self, order: Callable[[Store], object], done: Callable[[object], None]) -> None:
        def answered(answer: object) -> None:
            if isinstance(answer, Unanswered) and self.is_there:
                self.clock.after(0.5, lambda: self._insist(order, done))
            else:
                done(answer)

        self.client.ask(order, answered)

    def _read(self) -> None:
        def done(answer: object) -> None:
            if isinstance(answer, Unanswered):
                self.feed(StoreFailed(self.now))
            else:
                assert answer is None or isinstance(answer, GenerationRecord)
                self.feed(GenerationRead(self.now, answer))

        if self.is_there:
            self.client.ask(lambda s: s.get("/job/gen"), done)
            self.clock.after(self.random.uniform(0.5, 1.5), self._read)

    def wake(self) -> None:
        if self.is_there:
            self.client.ask(
                lambda s: s.get("/job/gen"),
                lambda a: (
                    None if isinstance(a, Unanswered) else self.feed(GenerationRead(self.now, a))  # type: ignore[arg-type] # the key holds records only
                ),
            )

    def _keep(self) -> None:
        def done(answer: object) -> None:
            if answer is False:
                self.lease = None
                self.feed(LeaseEnded(self.now))
            elif isinstance(answer, Unanswered):
                self.feed(StoreFailed(self.now))

        if self.is_there:
            lease = self.lease
            if lease is not None:
                self.client.ask(lambda s: s.keep(lease), done)
            self.clock.after(2.5, self._keep)

    def _tick(self) -> None:
        if self.is_there:
            self.feed(SnapshotsChanged(self.now, self.machine.sealed))
            self.feed(Ticked(self.now))
            self.clock.after(0.5, self._tick)

    def hear_abort(self, fence: Fence) -> None:
        self.feed(AbortHeard(self.now, fence))

    def notice(self, id_: str, leaves_at: float | None) -> None:
        self.feed(NoticeSeen(self.now, id_, leaves_at))

    def withdraw(self, id_: str) -> None:
        self.feed(NoticeWithdrawn(self.now, id_))

    def end_asked(self) -> None:
        self.feed(EndAsked(self.now))

    def crew_says(self, crew: Crew) -> None:
        taking = crew.taking
        self.feed(
            GangReported(
                self.now,
                crew.generation,
                taking,  # type: ignore[arg-type] # a crew's words are a gang's
                crew.step,
                crew.broken,
                crew.failure,
                is_bug=bool(crew.failure) and taking == "failed",
            )
        )

    def crew_left(self, generation: int) -> None:
        self.feed(GangReported(self.now, generation, "idle"))

    def crew_exited(self, generation: int, failure: str, *, is_bug: bool) -> None:
        self.feed(GangExited(self.now, generation, failure, is_bug))


def shuffled(random: Random, items: list[Machine]) -> list[Machine]:
    """The same machines in another order."""
    return random.sample(items, len(items))
