"""Carries messages to the controller's decisions and from them, and decides nothing itself.

Events wait in one queue and are decided upon one after the other. Writes to the store are
carried out in their order by one task, each once the one before it is settled; everything else
that is commanded runs by itself and ends in another event.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, assert_never

import structlog

from agents.protocol import Fence, GenerationRecord, JobId, NodeId, NodeRecord
from agents.store import StoreError
from sailord import invariants
from sailord.calls import CallFailed, Calls
from sailord.clock import Clock
from sailord.config import Config
from sailord.decide import decide
from sailord.feed import Feed
from sailord.gateway import Gateway
from sailord.model import (
    AbortGeneration,
    Command,
    Event,
    GenerationWritten,
    Node,
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
    WakeAgents,
    WriteGeneration,
    WriteJob,
    WriteRefused,
)
from sailord.pace import Pace
from sailord.planning import Found, PlanningService, Request
from sailord.telling import Teller

log = structlog.get_logger("sailord")

RETRY_S = 0.3
"""Before a write is tried again that the store did not take."""
SAMPLES_MAX = 4096

Write = WriteGeneration | WriteJob | SettleIntent


@dataclass(eq=False)
class Shell:
    """One sailord's state, and all that is on its way."""

    config: Config
    gateway: Gateway
    calls: Calls
    clock: Clock
    feed: Feed
    planning: PlanningService = field(default_factory=PlanningService)
    state: State = field(init=False)
    shown: State = field(init=False)
    """What we knew while we last led: for those who only look."""
    teller: Teller = field(init=False)
    plans: dict[str, Found] = field(default_factory=dict)
    """Answers of the planner that may yet have to be stored, by hash."""
    decision_s: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES_MAX))
    waited_s: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES_MAX))
    pace: Pace = field(default_factory=Pace)
    decisions: int = 0
    replans: int = 0
    resign_asked: asyncio.Event = field(default_factory=asyncio.Event)
    events: asyncio.Queue[tuple[float, Event]] = field(default_factory=asyncio.Queue)
    _writes: asyncio.Queue[tuple[int, Write]] = field(default_factory=asyncio.Queue)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.state = self.shown = State(options=self.config.options, now=self.clock.now())
        self.teller = Teller(self.gateway, self.feed)

    def feed_event(self, event: Event) -> None:
        """Let it be decided upon."""
        self.events.put_nowait((time.monotonic(), event))

    async def run(self) -> None:
        """Decide for ever; a breach of an invariant ends the process."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._decide_all())
            group.create_task(self._write_all())
            group.create_task(self.teller.run())

    async def _decide_all(self) -> None:
        while True:
            since, event = await self.events.get()
            begun = time.monotonic()
            before = self.state
            self.state, commands = decide(before, event)
            invariants.check(before, self.state, commands)
            if self.state.term is not None:
                self.shown = self.state
            done = time.monotonic()
            self.decisions += 1
            self.decision_s.append(done - begun)
            self.waited_s.append(done - since)
            self.teller.look(before, event, self.state)
            self.pace.look(self.state)
            for command in commands:
                self._perform(command, type(event).__name__)

    def _perform(self, command: Command, cause: str) -> None:
        match command:
            case WriteGeneration() | WriteJob() | SettleIntent():
                assert self.state.term is not None
                self._writes.put_nowait((self.state.term, command))
            case RequestPlan():
                self.replans += 1
                self._start(self._plan(command))
            case AbortGeneration():
                self._start(self._abort(command))
            case WakeAgents():
                for node in command.nodes:
                    self._start(self._wake(node))
            case ProbeAgent():
                self._start(self._probe(command.node))
            case Resign():
                log.warning("resigning", why=command.why, cause=cause)
                self.resign_asked.set()
            case Note():
                self.teller.note(command, self.state, cause, self.clock.now())
            case _:
                assert_never(command)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            # Our own bug; the next start reads everything anew.
            asyncio.get_running_loop().call_exception_handler(
                {"message": "a command failed", "exception": task.exception(), "task": task}
            )

    # ---- writing ------------------------------------------------------------------------------

    async def _write_all(self) -> None:
        while True:
            term, write = await self._writes.get()
            while term == self.state.term and not await self._try_write(term, write):
                await asyncio.sleep(RETRY_S)

    async def _try_write(self, term: int, write: Write) -> bool:
        """Whether the write is settled, one way or the other."""
        try:
            match write:
                case WriteGeneration():
                    is_written = await self._write_generation(write)
                case WriteJob():
                    order = self.gateway.put_job(write.job)
                    is_written = await self.gateway.write_as_leader(term, [order])
                case SettleIntent():
                    order = self.gateway.forget_intent(write.id)
                    is_written = await self.gateway.write_as_leader(term, [order])
                case _:
                    assert_never(write)
        except StoreError as error:
            log.warning("the store did not take a write", error=str(error), term=term)
            return False
        if not is_written:
            self.feed_event(WriteRefused(self.clock.now()))
        elif isinstance(write, WriteGeneration):
            self.feed_event(GenerationWritten(self.clock.now(), write.record))
        return True

    async def _write_generation(self, write: WriteGeneration) -> bool:
        found = self.plans.get(write.record.plan)
        is_written = await self.gateway.write_generation(
            write.record,
            write.replaces,
            plan=None if found is None else found.plan,
            about=None if found is None else found.about_bytes,
        )
        if is_written and write.replaces is not None and write.record.state == "open":
            kept = {write.record.plan, write.replaces.plan}
            self.plans = {sha: plan for sha, plan in self.plans.items() if sha in kept}
            await self.gateway.forget_plans(write.record.job, but=kept, term=write.record.term)
        return is_written

    # ---- asking others ------------------------------------------------------------------------

    async def _plan(self, command: RequestPlan) -> None:
        try:
            found = await self._ask_planner(command)
        except StoreError as error:
            found = f"the store does not say what the job is: {error}"
        now = self.clock.now()
        if isinstance(found, str):
            self.feed_event(PlanRefused(now, command.request, found))
            return
        self.plans[found.proposal.plan] = found
        self.feed_event(PlanFound(now, command.request, found.proposal))

    async def _ask_planner(self, command: RequestPlan) -> Found | str:
        nodes = self.state.nodes
        spec = await self.gateway.read_spec(command.job)
        if spec is None:
            return "the job's file is gone from the store"
        running, text = command.running, None
        ran_on: list[NodeRecord] = []
        if running is not None:
            text = await self._plan_text(command.job, running)
            ran_on += [n.record for id_ in running.members if (n := nodes.get(id_)) is not None]
        request = Request(
            spec=spec,
            cluster_file=self.config.cluster_file,
            profiles=self.config.profiles,
            nodes=tuple(nodes[id_].record for id_ in command.nodes if id_ in nodes),
            running=text,
            ran_on=tuple(record for record in ran_on if record.gpus),
            is_safe=command.is_safe,
        )
        return await self.planning.ask(request, timeout_s=self.config.options.plan_s)

    async def _plan_text(self, job: JobId, record: GenerationRecord) -> bytes | None:
        known = self.plans.get(record.plan)
        return known.plan if known is not None else await self.gateway.read_plan(job, record.plan)

    async def _abort(self, command: AbortGeneration) -> None:
        term = self.state.term
        if term is None:
            return
        fence = Fence(term, command.generation)
        nodes = (self._node(id_) for id_ in command.nodes)
        calls = (self.calls.abort(n.record.address, fence) for n in nodes if n is not None)
        # Whom this does not reach reads it from the store.
        for failure in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(failure, BaseException) and not isinstance(failure, CallFailed):
                raise failure

    async def _wake(self, id_: NodeId) -> None:
        node = self._node(id_)
        if node is not None:
            try:
                await self.calls.wake(node.record.address)
            except CallFailed as error:
                log.debug("an agent was not woken", node=id_, error=str(error))

    async def _probe(self, id_: NodeId) -> None:
        node = self._node(id_)
        try:
            if node is None:
                raise CallFailed("nothing is known of the node")
            report = await self.calls.report(node.record.address)
        except CallFailed as error:
            log.info("an agent did not answer a probe", node=id_, error=str(error))
            self.feed_event(ProbeFailed(self.clock.now(), id_))
        else:
            self.feed_event(Reported(self.clock.now(), report))

    def _node(self, id_: NodeId) -> Node | None:
        node = self.state.nodes.get(id_)
        return node if node is not None and node.record.address else None
