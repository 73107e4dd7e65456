"""Runs the capacity decisions: feeds them events, executes their commands at the provider.

The record is stored under the leader's term before a request is sent, so that the next leader knows
what may have been made. Slow calls run as tasks and end in an event.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, assert_never

import structlog

from agents.daemon.clock import Clock
from agents.daemon.tasks import Tasks, is_set_within
from agents.protocol.codec import WireError, encode
from agents.protocol.records import JobId, Order
from agents.store.interface import Put, StoreError
from planner.replan.past_moves import downtime_s
from sailord.capacity.cluster_view import ClusterView
from sailord.capacity.core import model
from sailord.capacity.core.budget import usd_left, usd_per_hour_limit
from sailord.capacity.core.deadline import rented_in_use
from sailord.capacity.core.deadline_model import JobProgress
from sailord.capacity.core.decide import decide, record_of
from sailord.capacity.core.model import CapacityRecord, CapacityState
from sailord.capacity.core.planner_view import (
    agents_of,
    holding,
    options_of,
    pool_supplies,
    progress_of,
    target_of,
    without_market,
    work_left,
)
from sailord.capacity.core.supply import draws_on_quotas
from sailord.capacity.rented import RentedNow, read_capacity
from sailord.cluster_records import Gateway
from sailord.config import Config
from sailord.core.model.phases import Held
from sailord.planning.messages import CapacityAnswer, CapacityRequest, PoolSupply
from sailord.planning.pool import PlannerPool
from sailord.providers.interface import (
    DeleteResult,
    InDoubt,
    InstanceRequest,
    Notice,
    Provider,
    ProviderError,
)
from simulator.documents.problems import InputError

log = structlog.get_logger("sailord")

TICK_S = 0.5
READ_S = 300.0
"""Interval at which prices and quotas are read."""
READ_AGAIN_S = 30.0
"""Pause before a failed read is repeated: no request is sent without prices and quotas."""
QUIET_TIMES = 6
"""Observations are this many times ``look_s`` apart while nothing is rented or wanted."""
QUOTAS_S = 5.0
"""Pause before quotas are read after instances came or went."""
SAVE_S = 10.0
"""A changed record is stored within this time."""
RETRY_S = 0.5
WANT_S = 2.0
"""Interval of questions to the planner if something changed."""
WANT_AGAIN_S = 300.0
"""Interval of questions to the planner if nothing changed."""
WANT_TIMEOUT_S = 120.0
HELD_TOO_LONG = "it was held for too long, so its instances are given back"
MOVE_S = 60.0
"""Assumed duration of a reconfiguration to instances that do not exist yet."""


@dataclass(eq=False)
class CapacityLoop:
    """Rents and deletes instances at a provider while this process is the leader."""

    config: Config
    provider: Provider
    policy: model.CapacityPolicy
    cluster: ClusterView
    planner: PlannerPool
    gateway: Gateway
    clock: Clock
    _: KW_ONLY
    rented: RentedNow = field(default_factory=RentedNow)
    """Where the state is kept, for those who read it."""
    tell: Callable[[str, str, bool], None] = lambda _job, _text, _is_at_risk: None
    """Tells what is rented for the deadline of a job, and whether the deadline is at risk."""
    ended: Callable[[str, str], None] | None = None
    """Told, on a thread, the name and the number of each instance that is no more."""
    new_id: Callable[[], str] = lambda: str(uuid.uuid4())
    """A globally unique id."""
    _term: int | None = None
    _events: asyncio.Queue[model.CapacityEvent] = field(default_factory=asyncio.Queue)
    _moved: asyncio.Event = field(default_factory=asyncio.Event)
    """Instances came or went, so quotas have changed."""
    _unsaved: asyncio.Event = field(default_factory=asyncio.Event)
    """The same, and the stored record lacks it."""
    _saving: asyncio.Lock = field(default_factory=asyncio.Lock)
    _tasks: Tasks = field(default_factory=Tasks)
    _saved: CapacityRecord | None = None
    _asked: tuple[object, ...] = ()
    _asked_at: float = float("-inf")
    _target_of: JobId | None = None
    """The job whose target was set last in this term; empty: no job's."""
    why_not_rented: str = ""
    """Why the planner's last answer had no plan for the active job, if it had none."""

    def __post_init__(self) -> None:
        self.state = CapacityState(self.policy, self.clock.now())

    @property
    def state(self) -> CapacityState:
        """The state now."""
        assert self.rented.state is not None
        return self.rented.state

    @state.setter
    def state(self, state: CapacityState) -> None:
        self.rented.state = state

    async def check(self) -> None:
        """Raise ``InputError`` for configuration errors, unless instances may exist already: those
        need a running sailord. A provider that does not answer is no error."""
        try:
            for problem in await self.provider.check():
                log.warning("renting may fail", problem=str(problem))
        except ProviderError as error:
            log.warning("the provider does not answer yet", error=str(error))
        except InputError as error:
            if not await self._may_have_machines():
                raise
            log.error("no further instance can be rented", error=str(error))

    async def _may_have_machines(self) -> bool:
        try:
            books = await read_capacity(self.gateway)
        except (StoreError, WireError):
            return True
        return bool(books.machines or books.asks)

    async def run(self) -> None:
        """Run forever; act only while this process is the leader."""
        try:
            async with asyncio.TaskGroup() as group:
                for work in (
                    self._decide_all(),
                    self._tick(),
                    self._look_often(),
                    self._every(READ_S, self._read),
                    self._follow_quotas(),
                    self._keep(),
                    self._every(WANT_S, self._want),
                    self._hear(),
                ):
                    group.create_task(work)
        finally:
            self._tasks.cancel()
            await self.provider.close()

    async def _decide_all(self) -> None:
        while True:
            event = await self._events.get()
            before = self.state
            self.state, commands = decide(self.state, event)
            if draws_on_quotas(self.state) != draws_on_quotas(before):
                self._moved.set()
                self._unsaved.set()
            if isinstance(event, model.Observed) and self.ended is not None:
                for id_ in before.instances.keys() - self.state.instances.keys():
                    name = before.instances[id_].instance.name
                    self._tasks.start(asyncio.to_thread(self.ended, name, id_))
            for command in commands:
                self._perform(command)

    def _feed(self, event: model.CapacityEvent) -> None:
        self._events.put_nowait(event)

    def _perform(self, command: model.CapacityCommand) -> None:
        match command:
            case model.Create():
                self._tasks.start(self._create(command.ask))
            case model.Cancel():
                self._tasks.start(self._cancel(command.ask))
            case model.DeleteInstances():
                self._tasks.start(self._delete(command.ids))
            case model.Drain():
                self._tasks.start(self._drain(command))
            case model.PauseJob(why, job):
                self._tasks.start(self._pause(f"budget-{self.clock.now():.0f}", why, job))
            case model.Tell():
                self.tell(command.job, command.text, command.is_at_risk)
            case model.Log():
                log.info("capacity", text=command.text)
            case _:
                assert_never(command)

    def report_stock(self, zone: str, gpu: str) -> None:
        """End the cooldown of pools with such GPUs that were out of stock."""
        if self._term is not None:
            self._feed(model.StockReported(self.clock.now(), zone, gpu))

    def retry_boots(self) -> None:
        """Request instances of pools that were stopped since none brought up an agent."""
        if self._term is not None:
            self._feed(model.BootsRetried(self.clock.now()))

    def _progress(self) -> JobProgress | None:
        """How far the active job is; a move takes as long as the longest of the last ones."""
        found = progress_of(self.cluster.state)
        if found is None or found.deadline is None:
            return found
        moves = self.cluster.move_context.moves
        return replace(found, move_s=max(map(downtime_s, moves), default=MOVE_S))

    # ---- leadership and storage ---------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            term, now = self.cluster.state.term, self.clock.now()
            if self._term is not None and term != self._term:
                self._term = None
                self._feed(model.SteppedDown(now))
            if self._term is None and term is not None:
                await self._take_over(term)
            if self._term is not None:
                if self.cluster.is_store_available:
                    agents, in_use = agents_of(self.cluster.state)
                    held = holding(self.cluster.state)
                    self._feed(model.AgentsCounted(now, agents, in_use, held))
                    self._feed(model.ProgressSeen(now, self._progress()))
                self._feed(model.Tick(now))
            await asyncio.sleep(TICK_S)

    async def _take_over(self, term: int) -> None:
        try:
            books = await read_capacity(self.gateway)
        except StoreError:
            return  # The next tick tries again; no request until then.
        except WireError as error:
            self.gateway.unreadable.note(self.gateway.keys.capacity, f"{error}; nothing is rented")
            return
        self.gateway.unreadable.clear(self.gateway.keys.capacity)
        self._term, self._asked, self._saved, self._target_of = term, (), books, None
        # A new id prefixes requests, not the term: a new store counts terms from 1 again.
        self._feed(model.TookOver(self.clock.now(), self.new_id(), books))
        self._tasks.start(self._read())
        self._tasks.start(self._look())

    async def _save(self) -> bool:
        """Store the record; return False if another process is the leader."""
        async with self._saving:  # An older record never replaces a newer one.
            while True:
                term, books = self._term, record_of(self.state)
                if term is None or not self.state.prefix:
                    return False
                order = Put(self.gateway.keys.capacity, encode(books))
                try:
                    if not await self.gateway.write_as_leader(term, [order]):
                        return False
                except StoreError as error:
                    log.warning("cannot store the capacity record", error=str(error))
                    await asyncio.sleep(RETRY_S)
                else:
                    self._saved = books
                    return True

    async def _keep(self) -> None:
        """Store the record every ``SAVE_S``, and as soon as instances came or went."""
        while True:
            await is_set_within(self._unsaved, SAVE_S)
            self._unsaved.clear()
            if self._term is not None and self._saved != record_of(self.state):
                await self._save()

    # ---- the provider -------------------------------------------------------------------------

    async def _every(self, seconds: float, act: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            if self._term is not None:
                await act()
            await asyncio.sleep(seconds)

    async def _look_often(self) -> None:
        """Observe the provider; seldom while nothing is rented, requested or wanted."""
        begun_s, now = float("-inf"), asyncio.get_running_loop().time
        while True:
            is_quiet = not any((*draws_on_quotas(self.state), *self.state.target.values()))
            pause_s = self.policy.look_s * (QUIET_TIMES if is_quiet else 1)
            if self._term is not None and now() >= begun_s + pause_s:
                begun_s = now()
                await self._look()
            await asyncio.sleep(min(self.policy.look_s, 1.0))

    async def _look(self) -> None:
        try:
            seen = await self.provider.observe()
        except ProviderError as error:
            log.warning("the provider does not answer", error=str(error))
        except Exception:  # A fault of ours: without a leader nothing would be given back.
            log.exception("what the provider answered cannot be read")
        else:
            self._feed(model.Observed(self.clock.now(), seen))

    async def _read(self) -> None:
        term = self._term
        while term is not None and self._term == term:
            read = [
                await self._ask("prices", self._read_prices),
                await self._ask("quotas", self._read_quotas),
            ]
            if all(read):
                return
            await asyncio.sleep(READ_AGAIN_S)

    async def _ask(self, what: str, read: Callable[[], Coroutine[Any, Any, None]]) -> bool:
        """Read something of the provider; return whether it answered."""
        try:
            await read()
        except ProviderError as error:
            log.warning("the provider did not answer", question=what, error=str(error))
            return False
        except Exception:
            log.exception("what the provider answered cannot be read", question=what)
            return False
        return True

    async def _read_prices(self) -> None:
        prices = await self.provider.prices()
        self._feed(model.PricesRead(self.clock.now(), prices))

    async def _read_quotas(self) -> None:
        quotas = tuple(await self.provider.quotas())
        self._feed(model.QuotasRead(self.clock.now(), quotas))

    async def _follow_quotas(self) -> None:
        """Read quotas soon after instances came or went."""
        while True:
            await self._moved.wait()
            await asyncio.sleep(QUOTAS_S)
            self._moved.clear()
            if self._term is not None:
                await self._ask("quotas", self._read_quotas)

    async def _create(self, ask: InstanceRequest) -> None:
        if not await self._save() or ask.request_id not in self.state.asks:
            return  # It is not sent: the next leader, or our own next term, would not know of it.
        try:
            outcome = await self.provider.create(ask)
        except ProviderError as error:
            outcome = InDoubt(ask.request_id, str(error))
        except Exception as error:
            # A fault of ours, after which instances may have been made all the same.
            log.exception("a request for instances failed")
            outcome = InDoubt(ask.request_id, f"{type(error).__name__}: {error}")
        self._feed(model.RequestAnswered(self.clock.now(), outcome))

    async def _cancel(self, ask: InstanceRequest) -> None:
        if why := await self.provider.cancel(ask):
            log.warning("a waiting request was not withdrawn", pool=str(ask.pool), error=why)

    async def _delete(self, ids: tuple[str, ...]) -> None:
        try:
            deleted = await self.provider.delete(ids)
        except ProviderError as error:
            deleted = DeleteResult((), dict.fromkeys(ids, str(error)))
        self._feed(model.DeletionAnswered(self.clock.now(), deleted))

    async def _hear(self) -> None:
        async for notice in self.provider.notices():
            if self._term is not None:
                self._tasks.start(self._warn(notice))

    async def _warn(self, notice: Notice) -> None:
        """Preempt the node once, as its agent's own notice would."""
        id_ = f"capacity-{notice.kind}-{notice.instance}"
        reason = f"the provider announced {notice.kind}"
        await self._give(Order(id_, "preempt", notice.node, notice.at + notice.seconds, reason))

    async def _drain(self, order: model.Drain) -> None:
        if await self._save():
            id_ = f"capacity-drain-{order.node}"
            # Not a notice: the job leaves it now, even if it would be there for hours.
            await self._give(Order(id_, "drain", order.node, order.leaves_at, order.why))

    async def _give(self, order: Order) -> None:
        while self._term is not None and order.id not in self.cluster.state.known_orders:
            try:
                await self.gateway.give_order(order)
            except StoreError:
                await asyncio.sleep(RETRY_S)
            else:
                return

    async def _pause(self, cause: str, why: str, job: str = "") -> None:
        """Pause the job that has the cluster, or only this one: another may have come meanwhile."""
        active = self.cluster.state.active
        if active is not None and job in ("", active.job):
            id_ = f"capacity-{cause}-{self._term}-{active.job}"
            await self._give(Order(id_, "pause", active.job, reason=why))

    # ---- the planner --------------------------------------------------------------------------

    async def _want(self) -> None:
        active, now = self.cluster.state.active, self.clock.now()
        if self.cluster.state.unreadable:
            return  # A job whose record cannot be read may have the cluster.
        if active is not None and isinstance(active.phase, Held):
            # The instances hold the job's state while an operator decides, but not forever.
            rents = any(each.instance.request_id for each in self.state.instances.values())
            if rents and now >= active.phase.since + self.policy.idle_s:
                why = f"{HELD_TOO_LONG} ([capacity] idle_s): {active.phase.reason}"
                await self._pause(f"held-{active.phase.since:.0f}", why)
            return
        if active is None or self.state.stop:
            self._asked, self._target_of, self.why_not_rented = (), JobId(""), ""
            self._feed(model.TargetSet(now, {}))
            return
        pools = pool_supplies(self.state, self.provider.pools, self.cluster.state)
        key = (active.job, pools)
        if key == self._asked and now < self._asked_at + WANT_AGAIN_S:
            self._keep_used(active.job)
            return
        wanted = await self._ask_planner(active.job, pools)
        now_active = self.cluster.state.active
        if wanted is None or now_active is None or now_active.job != active.job:
            return  # The answer was about another job.
        self._asked, self._asked_at = key, now
        self.why_not_rented = wanted.why if wanted.counts is None and wanted.choices is None else ""
        log.info("capacity wanted", why=wanted.why, counts=wanted.counts)
        after = pool_supplies(self.state, self.provider.pools, self.cluster.state)
        if without_market(after) != without_market(pools):
            self._asked = ()  # Outdated: instances that came meanwhile are no surplus.
        elif wanted.choices is not None:
            options = options_of(active.job, self.provider.pools, pools, wanted.choices)
            self._target_of = active.job
            self._feed(model.TargetSet(self.clock.now(), options.spot, options))
        elif wanted.counts is not None:
            target = target_of(self.provider.pools, pools, wanted.counts)
            self._target_of = active.job
            self._feed(model.TargetSet(self.clock.now(), target))
        else:
            self._keep_used(active.job)

    def _keep_used(self, job: JobId) -> None:
        """Want what the job uses, and nothing of the last job's, while no plan for it was found."""
        if self._target_of not in (None, job):
            self._feed(model.TargetSet(self.clock.now(), rented_in_use(self.state)))

    async def _ask_planner(
        self, job: JobId, pools: tuple[PoolSupply, ...]
    ) -> CapacityAnswer | None:
        try:
            spec = await self.gateway.read_spec(job)
        except StoreError:
            return None
        if spec is None:
            return None
        record, left = self.cluster.state.jobs.get(job), None
        if record is not None and None not in (record.deadline, record.steps):
            left = work_left(self.state, self._progress())
            if left is None:
                return None  # The job is held, or no longer the active one.
        request = CapacityRequest(
            spec=spec,
            cluster_file=self.config.cluster_file,
            profiles=self.config.profiles,
            links=self.config.measured_links,
            pools=pools,
            usd_per_hour_max=usd_per_hour_limit(self.state),
            move_s=MOVE_S,
            usd_left=usd_left(self.state),
            on_demand_min=self.policy.on_demand_min,
            past=self.cluster.move_context,
            left=left,
            begun=0 if record is None else record.begun,
            usd_max=None if record is None else record.bill.usd_max,
        )
        asked = asyncio.ensure_future(self.planner.ask_capacity(request, timeout_s=WANT_TIMEOUT_S))
        try:
            while not asked.done():
                await asyncio.wait([asked], timeout=TICK_S)
                active = self.cluster.state.active
                if active is None or active.job != job:
                    return None  # Its instances are given back now, not after the answer.
            return await asked
        except Exception as error:
            log.exception("the capacity planner failed")
            return CapacityAnswer(None, f"the planner failed: {type(error).__name__}: {error}")
        finally:
            asked.cancel()
