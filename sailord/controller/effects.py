"""Carries out the commands that do not write to the store: planner, agents, checkpoint storage.

Each command runs in a task of its own. One that a rule waits for ends in an event, also when it
fails.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import assert_never

import structlog

from agents.daemon.clock import Clock
from agents.daemon.tasks import Tasks, run_in_batches
from agents.protocol.records import Abort, Fence, GenerationRecord, JobId, NodeId
from agents.rpc.client import CallFailed
from agents.store.interface import StoreError
from sailord.checkpoints.catalog import Checkpoints
from sailord.checkpoints.object_storage import StorageError
from sailord.cluster_records import Gateway
from sailord.config import Config
from sailord.controller.agent_client import AgentClient
from sailord.controller.cluster_state import ClusterState
from sailord.controller.inbox import Inbox
from sailord.core.model.commands import (
    AbortGeneration,
    CheckDurable,
    CollectGarbage,
    Effect,
    ProbeAgent,
    RequestPlan,
    WakeAgents,
    WriteManifest,
)
from sailord.core.model.events import (
    CommitFailed,
    DurableChecked,
    Event,
    ManifestWritten,
    PlanFound,
    PlanRefused,
    ProbeFailed,
)
from sailord.core.model.nodes import Node
from sailord.core.model.phases import Running
from sailord.core.model.state import Active
from sailord.core.queries.replan_triggers import usable
from sailord.planning.messages import (
    FoundPlan,
    NoAnswer,
    PlanRequest,
    PoolPrice,
    Unpaid,
    repeat_plan,
)
from sailord.planning.pool import PlannerPool
from sailord.planning.precomputed import NextPlan, NoPlan

log = structlog.get_logger("sailord")


@dataclass(eq=False)
class Effects:
    """Runs commands concurrently; none waits for another."""

    config: Config
    gateway: Gateway
    agents: AgentClient
    planner: PlannerPool
    checkpoints: Checkpoints
    cluster: ClusterState
    inbox: Inbox
    clock: Clock
    plans: dict[tuple[JobId, str], FoundPlan]
    """Answers of the planner, by job and hash; shared with the store writer."""
    _: KW_ONLY
    keeps_deadline: Callable[[JobId], bool] = lambda _job: False
    """Whether instances are rented so that a job meets its deadline."""
    prices: Callable[[], tuple[PoolPrice, ...]] = tuple
    """What the provider charges for machines of its pools."""
    plan_requests: int = 0
    _precomputed_for: tuple[JobId, int, object] | None = None
    """The job, generation, and goal, budget and prices whose losses are being precomputed."""
    _tasks: Tasks = field(default_factory=Tasks)

    def start(self, command: Effect, cause: str) -> None:
        """Run a command; ``cause`` is the event that led to it, for the log."""
        match command:
            case RequestPlan():
                self.plan_requests += 1
                self._start(
                    self._plan(command, cause),
                    lambda at, why: PlanRefused(at, command.request, why, is_known=False),
                )
            case WriteManifest():
                self._start(
                    self._write_manifest(command),
                    lambda at, why: CommitFailed(at, command.job.id, command.point, why),
                )
            case CheckDurable():
                self._start(
                    self._check_durable(command),
                    lambda at, why: DurableChecked(
                        at, command.job.id, command.durable, None, why, step_max=command.step_max
                    ),
                )
            case CollectGarbage():
                self._tasks.start(self._collect_garbage(command))
            case AbortGeneration():
                self._tasks.start(self._abort(command))
            case WakeAgents():
                self._tasks.start(run_in_batches(map(self._wake, command.nodes)))
            case ProbeAgent():
                self._start(self._probe(command.node), lambda at, _: ProbeFailed(at, command.node))
            case _:
                assert_never(command)

    def _start(
        self, work: Coroutine[None, None, None], failed: Callable[[float, str], Event]
    ) -> None:
        """Start work that a rule waits for: a fault of ours must end in its event, too."""

        async def answered() -> None:
            try:
                await work
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
                self.inbox.put(failed(self.clock.now(), f"sailord failed, see its log: {why}"))
                raise  # The trace is logged.

        self._tasks.start(answered())

    # ---- checkpoint storage -------------------------------------------------------------------

    async def _write_manifest(self, command: WriteManifest) -> None:
        job, term = command.job.id, self.cluster.term
        if term is None:
            return
        try:
            spec = await self.gateway.read_spec(job)
            durable = await self.checkpoints.write_manifest(command, term=term, spec=spec or "")
        except (StoreError, StorageError) as error:
            cause = type(error).__name__
            log.warning("checkpoint not committed", job=job, cause=cause, why=str(error))
            self.inbox.put(CommitFailed(self.clock.now(), job, command.point, str(error)))
        else:
            self.inbox.put(ManifestWritten(self.clock.now(), job, durable))

    async def _check_durable(self, command: CheckDurable) -> None:
        found = await self.checkpoints.check(command)
        self.inbox.put(replace(found, at=self.clock.now()))

    async def _collect_garbage(self, command: CollectGarbage) -> None:
        try:
            removed = await self.checkpoints.collect_garbage(command)
        except StorageError as error:
            said = {"cause": type(error).__name__, "why": str(error)}
            log.warning("old checkpoints not deleted", job=command.job.id, **said)
        else:
            if removed:
                log.info("old checkpoints deleted", job=command.job.id, objects=removed)

    # ---- planner ------------------------------------------------------------------------------

    async def _plan(self, command: RequestPlan, cause: str) -> None:
        begun = time.monotonic()
        try:
            found = await self._find_plan(command)
        except StoreError as error:
            found = NoAnswer(f"the job cannot be read from the store: {error}")
        why_not = found if isinstance(found, str) else ""
        took = {"request": command.request, "seconds": round(time.monotonic() - begun, 2)}
        log.info("planner answered", job=command.job, cause=cause, why_not=why_not, **took)
        now = self.clock.now()
        if isinstance(found, str):
            is_known = not isinstance(found, NoAnswer)
            is_unpaid = isinstance(found, Unpaid)
            self.inbox.put(PlanRefused(now, command.request, found, is_known, is_unpaid))
            return
        self.plans[command.job, found.proposal.plan] = found
        self.inbox.put(PlanFound(now, command.request, found.proposal))

    async def _find_plan(self, command: RequestPlan) -> FoundPlan | str:
        if command.repeats and command.running is not None:
            again = await self._repeat(command.running)
            if again is not None:
                return again
        request = await self._request(
            command.job,
            command.nodes,
            command.running,
            leaving=command.leaving,
            is_urgent=command.is_urgent,
        )
        if request is None:
            return "the job's file is not in the store"
        if command.slow:
            slow = tuple(sorted(command.slow.items()))
            factors = tuple(sorted(command.factors.items()))
            request = replace(request, slow=slow, factors=factors)
        if command.ratios and command.running is not None and command.running.busy is not None:
            busy = command.running.busy
            request = replace(
                request,
                ratios=command.ratios,
                predicted=busy.seconds,
                relative_error=busy.relative_error,
            )
        limit_s = self.config.options.plan_s
        return await self.planner.ask(request, timeout_s=limit_s, job=command.job)

    async def _repeat(self, record: GenerationRecord) -> FoundPlan | None:
        """The generation's plan again; ``None`` if the store does not have all of it."""
        known = self.plans.get((record.job, record.plan))
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
        leaving: tuple[NodeId, ...] = (),
        is_urgent: bool = False,
    ) -> PlanRequest | None:
        """Build a request; ``None`` if the job's file is not in the store, or we lead no longer."""
        nodes, record = self.cluster.state.nodes, self.cluster.state.jobs.get(job)
        past = self.cluster.move_context_of(job)
        spec = await self.gateway.read_spec(job)
        if spec is None or record is None:
            return None
        members = () if running is None else running.members
        ran_on = (nodes[id_].record for id_ in members if id_ in nodes)
        return PlanRequest(
            spec=spec,
            cluster_file=self.config.cluster_file,
            profiles=self.config.profiles,
            links=self.config.measured_links,
            nodes=tuple(nodes[id_].record for id_ in asked_for if id_ in nodes),
            running=None if running is None else await self._plan_text(job, running),
            ran_on=tuple(record for record in ran_on if record.gpus),
            leaving=leaving,
            is_urgent=is_urgent,
            past=past,
            keeps_deadline=self.keeps_deadline(job),
            begun=record.begun,
            usd_max=record.bill.usd_max,
            prices=self.prices(),
            kinds=tuple(sorted({each.record.gpu for each in nodes.values()} - {""})),
        )

    async def _plan_text(self, job: JobId, record: GenerationRecord) -> bytes | None:
        known = self.plans.get((job, record.plan))
        return known.plan if known is not None else await self.gateway.read_plan(job, record.plan)

    def following(self, lost: NodeId) -> NextPlan | NoPlan | None:
        """Return the plan that would follow the loss of a node, or why none would; ``None``: it was
        not computed."""
        active, known = self.cluster.state.active, self._precomputed_for
        if active is None or active.generation is None or known is None:
            return None
        is_of_it = known[:2] == (active.job, active.generation.number)
        return self.planner.following(lost) if is_of_it else None

    def precompute_losses(self) -> None:
        """Have the next plan for each loss of a node computed, once per generation and goal."""
        active = self.cluster.state.active
        if active is None or active.generation is None or active.question is not None:
            return
        if not isinstance(active.phase, Running):
            return
        budget = self.cluster.state.job.bill.usd_max
        about = self.keeps_deadline(active.job), budget, self.prices()
        asked = active.job, active.generation.number, about
        if asked != self._precomputed_for:
            self._precomputed_for = asked
            self._tasks.start(self._precompute(active, active.generation))

    async def _precompute(self, active: Active, generation: GenerationRecord) -> None:
        try:
            nodes = usable(self.cluster.parts.of_job(active.job), active)
            request = await self._request(active.job, nodes, generation)
        except StoreError:
            return  # The planner is asked when a node is lost.
        if request is not None:
            self.planner.precompute(request)

    # ---- agents -------------------------------------------------------------------------------

    async def _abort(self, command: AbortGeneration) -> None:
        term = self.cluster.term
        if term is None:
            return
        abort = Abort(command.job, Fence(term, command.generation))
        await run_in_batches(self._abort_at(node, abort) for node in command.nodes)

    async def _abort_at(self, id_: NodeId, abort: Abort) -> None:
        node = self._node(id_)
        if node is not None:
            with contextlib.suppress(CallFailed):  # The agent will read it from the store.
                await self.agents.abort(node.record, abort)

    async def _wake(self, id_: NodeId) -> None:
        node = self._node(id_)
        if node is not None:
            try:
                await self.agents.wake(node.record)
            except CallFailed as error:
                log.debug("agent not woken", node=id_, error=str(error))

    async def _probe(self, id_: NodeId) -> None:
        node = self._node(id_)
        try:
            if node is None:
                raise CallFailed("unknown node, or a node without an address")
            report = await self.agents.report(node.record)
        except CallFailed as error:
            log.info("agent does not answer probe", node=id_, cause="ProbeFailed", error=str(error))
            self.inbox.put(ProbeFailed(self.clock.now(), id_))
        else:
            self.inbox.put_report(report)

    def _node(self, id_: NodeId) -> Node | None:
        node = self.cluster.state.nodes.get(id_)
        return node if node is not None and node.record.address else None
