"""Carries messages to the controller's decisions and from them, and decides nothing itself.

Events wait in one queue and are decided upon one after the other. Writes to the store are
carried out in their order by one task, each once the one before it is settled; everything else
that is commanded runs by itself and ends in another event.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import assert_never

import structlog

from agents.daemon.clock import Clock
from agents.daemon.failpoints import failpoint
from agents.daemon.systemd import notify
from agents.daemon.tasks import Tasks, run_in_batches
from agents.protocol.codec import WireError
from agents.protocol.records import (
    Abort,
    Fence,
    GenerationRecord,
    JobId,
    NodeId,
    NodeRecord,
    Report,
    ReportReply,
)
from agents.rpc.client import CallFailed
from agents.store import StoreError, StoreRefused
from sailord.checkpoints.catalog import Checkpoints
from sailord.checkpoints.object_storage import StorageError
from sailord.cluster_records import Gateway
from sailord.config import Config
from sailord.controller.agent_client import Calls
from sailord.controller.probe_cache import Releasing
from sailord.controller.step_rate import Pace
from sailord.controller.store_health import StoreHealth
from sailord.core import invariants
from sailord.core.commands import (
    AbortGeneration,
    CheckDurable,
    CollectGarbage,
    Command,
    CommitCheckpoint,
    GiveIntent,
    Note,
    ProbeAgent,
    RequestPlan,
    Resign,
    SettleIntent,
    WakeAgents,
    WriteGeneration,
    WriteJob,
    WriteManifest,
)
from sailord.core.decide import decide
from sailord.core.events import (
    CheckpointCommitted,
    CommitFailed,
    Event,
    GenerationWritten,
    ManifestWritten,
    PlanFound,
    PlanRefused,
    ProbeFailed,
    Reported,
    Ticked,
    WriteRefused,
)
from sailord.core.nodes import Node
from sailord.core.phases import Running
from sailord.core.replan_triggers import usable
from sailord.core.report_reply import answer_to
from sailord.core.state import Active, State
from sailord.notify.announcer import Teller
from sailord.notify.feed import Feed
from sailord.notify.outbox import Outbox, generation_opened, job_left
from sailord.planning.machine_lifetimes import MachineLifetimes
from sailord.planning.messages import FoundPlan, MoveContext, NoAnswer, PlanRequest, repeat_plan
from sailord.planning.pool import PlannerPool

log = structlog.get_logger("sailord")

RETRY_S = 0.3
"""Before a write is tried again that the store did not take."""
REPORTS_S = 0.02
"""Reports that come within so short a time are decided upon together."""
SAMPLES_MAX = 4096

Write = WriteGeneration | WriteJob | GiveIntent | SettleIntent | CommitCheckpoint


@dataclass(eq=False)
class Shell:
    """One sailord's state, and all that is on its way."""

    config: Config
    gateway: Gateway
    calls: Calls
    clock: Clock
    feed: Feed
    planning: PlannerPool = field(default_factory=PlannerPool)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    state: State = field(init=False)
    shown: State = field(init=False)
    """What we knew while we last led: for those who only look."""
    teller: Teller = field(init=False)
    outbox: Outbox = field(init=False)
    plans: dict[str, FoundPlan] = field(default_factory=dict)
    """Answers of the planner that may yet have to be stored, by hash."""
    decision_s: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES_MAX))
    waited_s: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES_MAX))
    pace: Pace = field(default_factory=Pace)
    observed: MachineLifetimes = field(default_factory=MachineLifetimes)
    store: StoreHealth = field(default_factory=StoreHealth)
    decisions: int = 0
    replans: int = 0
    resign_asked: asyncio.Event = field(default_factory=asyncio.Event)
    events: asyncio.Queue[tuple[float, Event]] = field(default_factory=asyncio.Queue)
    _foreseen: tuple[JobId, int] | None = None
    """The generation after which is being looked ahead."""
    _writes: asyncio.Queue[tuple[int, Write]] = field(default_factory=asyncio.Queue)
    _reports: dict[NodeId, Report] = field(default_factory=dict)
    """The newest of each node, of those that are not yet decided upon."""
    _tasks: Tasks = field(default_factory=Tasks)
    _releasing: Releasing = field(default_factory=Releasing)

    def __post_init__(self) -> None:
        self.state = self.shown = State(options=self.config.options, now=self.clock.now())
        self.outbox = Outbox(self.gateway)
        self.teller = Teller(self.gateway, self.feed, self.outbox)

    def feed_event(self, event: Event) -> None:
        """Let it be decided upon."""
        self.events.put_nowait((time.monotonic(), event))

    def hear(self, report: Report) -> None:
        """Let a report be decided upon, with those that come in the same moment."""
        if not self._reports:
            since = time.monotonic()
            asyncio.get_running_loop().call_later(REPORTS_S, self._hear_all, since)
        known = self._reports.get(report.node)
        if known is None or known.number < report.number:
            self._reports[report.node] = report

    def _hear_all(self, since: float) -> None:
        first, *others = self._reports.values()
        self._reports.clear()
        self.events.put_nowait((since, Reported(self.clock.now(), first, tuple(others))))

    def answer_to(self, report: Report) -> ReportReply:
        """What an agent is told in return."""
        point = self._releasing.point(self.state, time.monotonic())
        return answer_to(self.state, report, point)

    async def run(self) -> None:
        """Decide for ever; a breach of an invariant ends the process."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._decide_all())
            group.create_task(self._write_all())
            group.create_task(self.teller.run())
            group.create_task(self.outbox.run())

    async def _decide_all(self) -> None:
        while True:
            since, event = await self.events.get()
            begun = time.monotonic()
            before = self.state
            self.state, commands = decide(before, event)
            invariants.check(before, self.state, commands)
            if self.state.term is not None:
                self.shown = self.state
            if self.state.term != before.term:
                self.outbox.ring()
            done = time.monotonic()
            self.decisions += 1
            self.decision_s.append(done - begun)
            self.waited_s.append(done - since)
            self.teller.look(before, self.state)
            self.pace.look(self.state)
            self.observed.observe(self.state)
            self._foresee()
            for command in commands:
                failpoint(*_place(command, self.state))
                self._perform(command, type(event).__name__)
            if isinstance(event, Ticked):
                # Fed by who decides, so that one who is stuck is started anew.
                notify("WATCHDOG=1")

    @property
    def move_context(self) -> MoveContext:
        """What the planner needs to judge a reconfiguration now."""
        return self.observed.context(self.state)

    @property
    def is_store_available(self) -> bool:
        return self.store.is_available

    def standing(self) -> dict[str, object]:
        """Say what every line of the log is about."""
        term, active = self.state.term, self.state.active
        if active is None:
            return {"term": term}
        number = None if active.generation is None else active.generation.number
        return {"job": active.job, "generation": number, "term": term, "step": active.progress.step}

    def _perform(self, command: Command, cause: str) -> None:
        match command:
            case (
                WriteGeneration() | WriteJob() | GiveIntent() | SettleIntent() | CommitCheckpoint()
            ):
                assert self.state.term is not None
                self._writes.put_nowait((self.state.term, command))
            case RequestPlan():
                self.replans += 1
                self._tasks.start(self._plan(command, cause))
            case WriteManifest():
                self._tasks.start(self._describe(command))
            case CheckDurable():
                self._tasks.start(self._check(command))
            case CollectGarbage():
                self._tasks.start(self._sweep(command))
            case AbortGeneration():
                self._tasks.start(self._abort(command))
            case WakeAgents():
                self._tasks.start(run_in_batches(map(self._wake, command.nodes)))
            case ProbeAgent():
                self._tasks.start(self._probe(command.node))
            case Resign():
                log.warning("resigning", why=command.why, cause=cause)
                self.resign_asked.set()
            case Note():
                self.teller.note(command, self.state, cause, self.clock.now())
            case _:
                assert_never(command)

    async def _write_all(self) -> None:
        while True:
            term, write = await self._writes.get()
            while term == self.state.term and not await self._try_write(term, write):
                await asyncio.sleep(RETRY_S)
            self.store.refused_write = ""

    async def _try_write(self, term: int, write: Write) -> bool:
        """Whether the write is settled, one way or the other."""
        try:
            match write:
                case WriteGeneration():
                    is_written = await self._write_generation(write)
                case WriteJob():
                    news = job_left(write.job, self.clock.now(), term)
                    orders = [self.gateway.put_job(write.job), *self.outbox.orders_for(news)]
                    is_written = await self.gateway.write_as_leader(term, orders)
                    self.outbox.ring()
                case GiveIntent():
                    order = self.gateway.put_intent(write.intent)
                    is_written = await self.gateway.write_as_leader(term, [order])
                case SettleIntent():
                    order = self.gateway.forget_intent(write.id)
                    is_written = await self.gateway.write_as_leader(term, [order])
                case CommitCheckpoint():
                    is_written = await self._commit(term, write)
                case _:
                    assert_never(write)
        except StoreError as error:
            cause, said = type(error).__name__, str(error)
            self.store.refused_write = said if isinstance(error, StoreRefused) else ""
            log.warning("the store did not take a write", cause=cause, error=said, term=term)
            return False
        except WireError as error:
            log.error("the store holds what nobody can read", cause="WireError", what=str(error))
            is_written = False
        name, generation = _place(write, self.state)
        failpoint(f"after {name}", generation)
        if not is_written:
            self.feed_event(WriteRefused(self.clock.now()))
        elif isinstance(write, WriteGeneration):
            self.outbox.ring()
            self.feed_event(GenerationWritten(self.clock.now(), write.record))
        return True

    async def _write_generation(self, write: WriteGeneration) -> bool:
        found, is_new = self.plans.get(write.record.plan), write.record.state == "open"
        news = generation_opened(write.record, self.clock.now()) if is_new else None
        is_written = await self.gateway.write_generation(
            write.record,
            write.replaces,
            plan=None if found is None else found.plan,
            about=None if found is None else found.about_bytes,
            lowers=write.lowers,
            also=[
                *self.outbox.orders_for(news),
                *([self.gateway.forget_intent(write.settles)] if write.settles else ()),
            ],
        )
        if is_written and write.replaces is not None and write.record.state == "open":
            kept = {write.record.plan, write.replaces.plan}
            self.plans = {sha: plan for sha, plan in self.plans.items() if sha in kept}
            await self.gateway.forget_plans(write.record.job, but=kept, term=write.record.term)
        return is_written

    async def _commit(self, term: int, write: CommitCheckpoint) -> bool:
        job, durable = write.record.job, write.durable
        became = await self.gateway.commit(durable, write.record, term)
        now = self.clock.now()
        if became == "committed":
            self.feed_event(CheckpointCommitted(now, job, durable))
        elif became == "late":
            why = "the generation is over, or a later step is durable"
            self.feed_event(CommitFailed(now, job, durable.point, why))
        return became != "deposed"

    # ---- the durable store --------------------------------------------------------------------

    async def _describe(self, command: WriteManifest) -> None:
        job, term = command.job.id, self.state.term
        if term is None:
            return
        try:
            spec = await self.gateway.read_spec(job)
            durable = await self.checkpoints.describe(command, term=term, spec=spec or "")
        except (StoreError, StorageError) as error:
            cause = type(error).__name__
            log.warning("a checkpoint was not committed", job=job, cause=cause, why=str(error))
            failed = CommitFailed(self.clock.now(), job, command.point, str(error))
            self.feed_event(failed)
        else:
            self.feed_event(ManifestWritten(self.clock.now(), job, durable))

    async def _check(self, command: CheckDurable) -> None:
        found = await self.checkpoints.check(command)
        self.feed_event(replace(found, at=self.clock.now()))

    async def _sweep(self, command: CollectGarbage) -> None:
        try:
            removed = await self.checkpoints.sweep(command)
        except StorageError as error:
            said = {"cause": type(error).__name__, "why": str(error)}
            log.warning("the durable store was not tidied up", job=command.job.id, **said)
        else:
            if removed:
                log.info("removed from the durable store", job=command.job.id, objects=removed)

    async def _plan(self, command: RequestPlan, cause: str) -> None:
        begun = time.monotonic()
        try:
            found = await self._ask_planner(command)
        except StoreError as error:
            found = NoAnswer(f"the store does not say what the job is: {error}")
        why_not = found if isinstance(found, str) else ""
        took = {"request": command.request, "seconds": round(time.monotonic() - begun, 2)}
        log.info("the planner answered", job=command.job, cause=cause, why_not=why_not, **took)
        now = self.clock.now()
        if isinstance(found, str):
            is_known = not isinstance(found, NoAnswer)
            self.feed_event(PlanRefused(now, command.request, found, is_known))
            return
        self.plans[found.proposal.plan] = found
        self.feed_event(PlanFound(now, command.request, found.proposal))

    async def _ask_planner(self, command: RequestPlan) -> FoundPlan | str:
        if command.repeats and command.running is not None:
            again = await self._repeated(command.running)
            if again is not None:
                return again
        request = await self._request(
            command.job,
            command.nodes,
            command.running,
            is_safe=command.is_safe,
            is_urgent=command.is_urgent,
        )
        if request is not None and command.slow:
            slow = tuple(sorted(command.slow.items()))
            factors = tuple(sorted(command.factors.items()))
            request = replace(request, slow=slow, factors=factors)
        if request is None:
            return "the job's file is gone from the store"
        return await self.planning.ask(request, timeout_s=self.config.options.plan_s)

    async def _repeated(self, record: GenerationRecord) -> FoundPlan | None:
        """The plan that ran last; ``None``: it is not known well enough."""
        known = self.plans.get(record.plan)
        if known is not None:
            return repeat_plan(record, known.plan, known.about)
        plan = await self.gateway.read_plan(record.job, record.plan)
        about = await self.gateway.read_about(record.job, record.plan)
        return None if plan is None else repeat_plan(record, plan, about)

    async def _request(
        self,
        job: JobId,
        asked_for: Iterable[NodeId],
        running: GenerationRecord | None,
        *,
        is_safe: bool = False,
        is_urgent: bool = False,
    ) -> PlanRequest | None:
        """A question with all that belongs to it; none if nobody knows the job any more."""
        nodes = self.state.nodes
        past = self.move_context
        spec = await self.gateway.read_spec(job)
        if spec is None:
            return None
        text = None
        ran_on: list[NodeRecord] = []
        if running is not None:
            text = await self._plan_text(job, running)
            ran_on += [n.record for id_ in running.members if (n := nodes.get(id_)) is not None]
        return PlanRequest(
            spec=spec,
            cluster_file=self.config.cluster_file,
            profiles=self.config.profiles,
            nodes=tuple(nodes[id_].record for id_ in asked_for if id_ in nodes),
            running=text,
            ran_on=tuple(record for record in ran_on if record.gpus),
            is_safe=is_safe,
            is_urgent=is_urgent,
            past=past,
        )

    def _foresee(self) -> None:
        """Once a generation runs, look ahead: what if it loses this node, or that one."""
        active = self.state.active
        if active is None or active.generation is None or active.question is not None:
            return
        if not isinstance(active.phase, Running):
            return
        name = active.job, active.generation.number
        if name != self._foreseen:
            self._foreseen = name
            self._tasks.start(self._look_ahead(active, active.generation))

    async def _look_ahead(self, active: Active, generation: GenerationRecord) -> None:
        try:
            request = await self._request(active.job, usable(self.state, active), generation)
        except StoreError:
            return  # Then a loss is answered when it is asked about.
        if request is not None:
            self.planning.precompute(request)

    async def _plan_text(self, job: JobId, record: GenerationRecord) -> bytes | None:
        known = self.plans.get(record.plan)
        return known.plan if known is not None else await self.gateway.read_plan(job, record.plan)

    async def _abort(self, command: AbortGeneration) -> None:
        term = self.state.term
        if term is None:
            return
        word = Abort(command.job, Fence(term, command.generation))
        await run_in_batches(self._abort_at(node, word) for node in command.nodes)

    async def _abort_at(self, id_: NodeId, word: Abort) -> None:
        node = self._node(id_)
        if node is not None:
            with contextlib.suppress(CallFailed):  # It reads it from the store.
                await self.calls.abort(node.record.address, word)

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
            log.info(
                "an agent did not answer a probe", node=id_, cause="ProbeFailed", error=str(error)
            )
            self.feed_event(ProbeFailed(self.clock.now(), id_))
        else:
            self.hear(report)

    def _node(self, id_: NodeId) -> Node | None:
        node = self.state.nodes.get(id_)
        return node if node is not None and node.record.address else None


def _place(command: Command, state: State) -> tuple[str, int | None]:
    """What a command is called where a test may have us die, and whose generation's it is."""
    if isinstance(command, WriteGeneration):
        return f"WriteGeneration.{command.record.state}", command.record.number
    active = state.active
    generation = None if active is None else active.generation
    return type(command).__name__, None if generation is None else generation.number
