"""One sailord from start to stop: election, reading the store, the controller and the API."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from dataclasses import dataclass
from functools import partial

import structlog
from aiohttp import web

from agents.daemon.bounded_file import keep_bounded
from agents.daemon.clock import Clock
from agents.daemon.logs import begin_log
from agents.daemon.named_socket import named_socket
from agents.daemon.systemd import notify
from agents.daemon.tasks import is_set_within
from agents.protocol.records import JobId
from agents.protocol.store_keys import Keys
from agents.rpc.listener import Listener
from agents.rpc.signing import ClusterKey
from agents.rpc.tls import Tls
from agents.store.change_signal import signal_changes
from agents.store.interface import StoreError, StoreRefused, StoreUnavailable
from agents.store.store_thread import StoreThread
from sailord.api.app import build_app, build_public_app
from sailord.api.handlers.context import ApiContext
from sailord.api.handlers.controller_view import ControllerView
from sailord.api.handlers.problems import watch_problems
from sailord.capacity.loop import CapacityLoop
from sailord.capacity.rented import RentedNow
from sailord.cluster_records import Gateway, StoredRecords
from sailord.config import Config
from sailord.controller.agent_client import AgentClient
from sailord.controller.availability_log import FILE, AvailabilityLog
from sailord.controller.election import Election, StateFolder, lock_state_folder
from sailord.controller.ended_jobs import EndedJobs
from sailord.controller.lifetime_store import SAVE_S, load_lifetimes, save_lifetimes
from sailord.controller.loop import Controller, build_controller
from sailord.controller.recovery import Recovery
from sailord.core.model.events import (
    Deposed,
    Elected,
    JobSubmitted,
    NodesObserved,
    OrderGiven,
    StoreReturned,
    Ticked,
)
from sailord.goodput.bookkeeper import Bookkeeper, prices_of
from sailord.network.profiler import NetworkProfiler
from sailord.notify.webhook_sender import WebhookSender
from sailord.own_certificate import end_instance, keep_certificate, open_tls
from sailord.page.curve_keeper import CurveKeeper
from sailord.providers.config import open_provider
from simulator.documents.problems import InputError, Problem

log = structlog.get_logger("sailord")

TICK_S = 0.1
READ_S = 1.0
"""How often the store is read if no watch reports a change."""
READ_S_MIN = 0.05
STORE_WAIT_S = 10.0
"""For a store's file that another process has open."""
SHUTDOWN_SAVE_S = 1.0
"""How long a shutdown waits for the store to save node lifetimes, which may be lost."""
PERMISSIONS = "its user must be allowed to read and write the four prefixes in docs/operations.md"


@dataclass(eq=False, kw_only=True)
class Daemon:
    """Everything that runs in the process."""

    config: Config
    store: StoreThread
    clock: Clock
    gateway: Gateway
    election: Election
    controller: Controller
    api: ApiContext
    webhooks: WebhookSender
    recovery: Recovery
    books: Bookkeeper
    curves: CurveKeeper
    capacity: CapacityLoop | None = None
    """Only if a provider is configured."""
    _is_ready: bool = False
    _set_aside: frozenset[JobId] = frozenset()
    """Jobs whose records cannot be read, since this term began or since they were stored later."""
    _led: int | None = None
    """The term whose ``Elected`` the controller has; ``election.term`` is set before the store is
    read."""

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until ``stop`` is set."""
        keys = self.gateway.keys
        works = [
            self.controller.effects.planner.preload(),
            self.controller.run(),
            self.store.run(self.election.keep_renewing()),
            self._lead(),
            self._read_store(),
            signal_changes(
                self.store, keys.all, self.controller.cluster.store_changed, small=keys.leader
            ),
            self._tick(),
            self._save_lifetimes_often(),
            keep_bounded(tuple),
            EndedJobs(self.gateway, self.controller.cluster, self.controller.inbox).run(),
            self.webhooks.run(),
            self.api.network.run(),
            watch_problems(self.api),
            self.books.save_often(lambda: self.election.term),
            self.curves.save_often(lambda: self.election.term),
        ]
        if self.api.tls is not None:
            works.append(keep_certificate(self.config, self.api.key, self.api.tls))
        if self.capacity is not None:
            works.append(self.capacity.run())
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
            await stop.wait()
            notify("STOPPING=1")
            for task in tasks:
                task.cancel()
        await self._save_lifetimes()
        await self.books.save_now(self.election.term)
        await self.curves.save_now(self.election.term)
        await self.store.run(self.election.resign())

    # ---- election -----------------------------------------------------------------------------

    async def _lead(self) -> None:
        """Campaign while there is no leader; the lease is renewed on the store's thread."""
        pause_s = self.config.options.lease_s / 8
        while True:
            try:
                if self.election.term is None:
                    await self.store.run(self.election.campaign())
                elif self.controller.resign_asked.is_set():
                    self.controller.resign_asked.clear()
                    await self.store.run(self.election.resign())
                    await asyncio.sleep(pause_s)
                elif self.election.refused is not None:
                    raise self.election.refused
                if self.election.term not in (None, self._led):
                    await self._take_over()
                self.controller.cluster.leader = self.election.seen
                if self.controller.cluster.leader is not None:
                    self._report_ready("leader elected")
            except StoreRefused as error:
                await self._give_up_leading(error)
            except StoreError as error:
                self._note_outage(error)
                await asyncio.sleep(0.2)
            # A standby looks more often, to take over soon after the leader's lease expires.
            await asyncio.sleep(pause_s if self.election.term is not None else min(pause_s, 0.5))

    async def _give_up_leading(self, error: StoreRefused) -> None:
        """Resign and wait: another sailord may have the permissions that we lack."""
        log.error("cannot lead: the store refuses access", cause="StoreRefused",
                  error=f"{error}; {PERMISSIONS}")  # fmt: skip
        self.election.refused = None
        await self.store.run(self.election.resign())
        self.controller.cluster.leader = None
        await asyncio.sleep(self.config.options.lease_s / 2)

    async def _take_over(self) -> None:
        """Load all that a leader needs from the store, then pass it to the controller."""
        term = self.election.term
        if term is None:
            return
        records = await self.gateway.read_records()
        moves, trained_since = [], []
        newest = {record.job: record.number for record in records.generations}
        for job in records.jobs:
            history = await self.gateway.read_history(job.id)
            self.controller.announcer.restore(job.id, history)
            of_job = [line.move for line in history if line.move is not None]
            moves += of_job
            if of_job and of_job[-1].generation == newest.get(job.id):
                trained_since.append((job.id, of_job[-1].at + of_job[-1].total_s))
        self.controller.cluster.relearn_moves(sorted(moves, key=lambda move: move.at))
        self.controller.cluster.lifetimes.history = await load_lifetimes(self.gateway)
        await self.books.load(term)
        await self.curves.load(term)
        await self.controller.announcer.outbox.load()
        await self.webhooks.begin(term)
        if self.election.term != term:
            return  # Reading took longer than our lease; the next round reads again.
        self.controller.resign_asked.clear()
        self._set_aside = records.set_aside
        about = {"nodes": len(records.nodes), "jobs": len(records.jobs)}
        log.info("elected leader", term=term, cause="Elected", **about)
        self.controller.announcer.tell_election(self.election.told, term, self.clock.now())
        self._led = term
        self.controller.inbox.put(
            Elected(
                self.clock.now(),
                term,
                nodes=records.nodes,
                jobs=records.jobs,
                generations=records.generations,
                durables=records.durables,
                orders=records.orders,
                unreadable=records.blocking,
                trained_since=tuple(trained_since),
            )
        )

    async def _tick(self) -> None:
        while True:
            self.election.show_life()
            term = self.election.term
            if term is not None and not self.election.is_valid:
                self.election.drop(term)
            if self._led is not None and not self.election.leads(self._led):
                log.warning("no longer leader: the lease may have expired, or another leads",
                            cause="Ticked")  # fmt: skip
                self._led = None
                self.controller.inbox.put(Deposed(self.clock.now()))
            self.controller.inbox.put(Ticked(self.clock.now()))
            await asyncio.sleep(TICK_S)

    async def _save_lifetimes_often(self) -> None:
        while True:
            await asyncio.sleep(SAVE_S)
            await self._save_lifetimes()

    async def _save_lifetimes(self) -> None:
        term = self.election.term
        if term is not None and term == self._led:  # Before, the last leader's are not read yet.
            with contextlib.suppress(StoreError, TimeoutError):  # The next save will do.
                async with asyncio.timeout(SHUTDOWN_SAVE_S):
                    history = self.controller.cluster.lifetimes.history
                    await save_lifetimes(self.gateway, history, term)

    # ---- reading the store --------------------------------------------------------------------

    async def _read_store(self) -> None:
        while True:
            self.controller.cluster.store_changed.clear()
            try:
                records = await self.gateway.read_records()
            except StoreError as error:
                self._note_outage(error)
                await asyncio.sleep(0.3)
                continue
            self._take_in(records)
            try:
                await self._recover(records)
            except StoreError as error:
                self._note_outage(error)
            await asyncio.sleep(READ_S_MIN)
            await is_set_within(self.controller.cluster.store_changed, READ_S)

    def _take_in(self, records: StoredRecords) -> None:
        """Turn what was read into events for the controller."""
        now, is_back = self.clock.now(), self.controller.cluster.store.mark_available()
        if is_back:
            log.info("store available again", cause="StoreReturned")
        unreadable = {**records.unreadable, **self.recovery.unknown}
        self.gateway.unreadable.note_all(unreadable, prefixes=[self.gateway.keys.all])
        state = self.controller.cluster.state
        if state.term is None or state.term != self.election.term:
            return
        self.controller.announcer.tell_unreadable(records.unreadable, state)
        if self._set_aside - records.set_aside or records.set_aside & state.jobs.keys():
            log.warning("resigning to read everything again: a job's record can be read now, or "
                        "no longer", cause="WireError")  # fmt: skip
            self.controller.inbox.put(Deposed(now))
            self.controller.resign_asked.set()
            return
        self._set_aside |= records.set_aside
        put = self.controller.inbox.put
        if is_back:
            put(StoreReturned(now))
        put(NodesObserved(now, records.nodes, records.nodes_unreadable))
        durables = dict(records.durables)
        for job in records.jobs:
            if job.id not in state.jobs:
                put(JobSubmitted(now, job, durables.get(job.id)))
        orders = [order for order in records.orders if order.id not in state.known_orders]
        if orders:
            put(OrderGiven(now, orders[0], tuple(orders[1:])))

    async def _recover(self, records: StoredRecords) -> None:
        """Begin the term anew if agents know of later generations than the store."""
        state, now = self.controller.cluster.state, self.clock.now()
        if state.term is None or state.term != self.election.term:
            return
        if not self.recovery.is_due(records, state, now):
            return
        if await self.recovery.recover(records, state):
            self.controller.inbox.put(Deposed(now))
            self.controller.resign_asked.set()

    def _note_outage(self, error: StoreError) -> None:
        if self.controller.cluster.store.mark_unavailable(str(error), at=self.clock.now()):
            log.warning("store unavailable", cause=type(error).__name__, error=str(error))
            self._report_ready("store unavailable")

    def _report_ready(self, status: str) -> None:
        """Tell systemd that the API answers, also if it answers that the store is unavailable."""
        if not self._is_ready:
            self._is_ready = True
            notify(f"READY=1\nSTATUS={status}")


async def run_daemon(config: Config) -> None:
    """Run until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    state = lock_state_folder(config.state)
    key, tls = ClusterKey.read(config.key, config.cluster_name), open_tls(config)
    async with contextlib.AsyncExitStack() as stack:
        store = await open_store_of(config)
        stack.push_async_callback(store.close)
        daemon = _assemble(config, store, state, key, tls)
        stack.push_async_callback(daemon.controller.effects.agents.close)
        stack.callback(daemon.controller.effects.planner.close)
        if daemon.capacity is not None:
            await daemon.capacity.check()
        await _listen(daemon, stack)
        begin_log(config.log_format, daemon.controller.cluster.log_fields)
        for place in config.unread:
            log.warning("a setting is no longer read", place=place)
        await daemon.run(stop)


async def open_store_of(config: Config) -> StoreThread:
    """Open the store; wait a moment for `sailord backup`, which may be reading its file."""
    end_s = time.monotonic() + STORE_WAIT_S
    while True:
        try:
            return await StoreThread.open(config.store, socket=config.store_socket)
        except StoreUnavailable as error:
            if time.monotonic() >= end_s:
                cure = "stop the process that uses it"
                raise InputError(Problem("store", str(error), cure)) from None
        await asyncio.sleep(0.2)


def _assemble(
    config: Config, store: StoreThread, state: StateFolder, key: ClusterKey, tls: Tls | None
) -> Daemon:
    clock, keys, rented = Clock(), Keys(config.cluster_name), RentedNow()
    gateway = Gateway(store, keys)
    controller = build_controller(
        config,
        gateway,
        clock,
        AgentClient(key, tls),
        keeps_deadline=rented.keeps_deadline,
        prices=rented.prices,
    )
    cluster, announcer, effects = controller.cluster, controller.announcer, controller.effects
    election = Election(store.inner, keys.leader, state, config.address, config.options.lease_s)
    network = NetworkProfiler(config, cluster, effects.agents, clock)
    own = Gateway(store, keys, gateway.unreadable)
    books = Bookkeeper(
        own,
        prices_of(config.cluster),
        capacity=lambda: rented.state,
        parts=lambda: tuple(cluster.parts.all()),
    )
    capacity = None
    if config.provider is not None:
        authority = None if config.tls is None else config.tls.authority
        capacity = CapacityLoop(
            config,
            open_provider(config.provider, config.cluster, clock.now),
            config.capacity,
            cluster,
            effects.planner,
            Gateway(store, keys, gateway.unreadable),
            clock,
            rented=rented,
            tell=lambda job, text, is_at_risk: announcer.tell_deadline(
                JobId(job), text, cluster.state, is_at_risk=is_at_risk
            ),
            ended=None if authority is None else partial(end_instance, authority),
        )
    view = ControllerView(controller)
    api = ApiContext(config, view, own, clock, key, network, books, capacity, tls)
    webhooks = WebhookSender(config.webhooks.receivers, announcer.outbox, cluster)
    recovery = Recovery(Gateway(store, keys, gateway.unreadable), effects.agents)
    available = AvailabilityLog(config.state / FILE)
    cluster.lifetimes.given_back = rented.given_back
    cluster.lost_nodes.rented = rented.node_names
    cluster.watchers += [books.observe, available.note]
    cluster.watchers.append(lambda _: api.curves.observe(cluster.parts.all()))
    return Daemon(
        config=config,
        store=store,
        clock=clock,
        gateway=gateway,
        election=election,
        controller=controller,
        api=api,
        webhooks=webhooks,
        recovery=recovery,
        books=books,
        curves=CurveKeeper(own, api.curves),
        capacity=capacity,
    )


async def _listen(daemon: Daemon, stack: contextlib.AsyncExitStack) -> None:
    """Serve the API: over TCP with the token, over the Unix socket without."""
    config = daemon.config
    local = web.AppRunner(build_app(daemon.api), access_log=None, shutdown_timeout=1.0)
    public = web.AppRunner(build_public_app(daemon.api), access_log=None, shutdown_timeout=1.0)
    for runner in (local, public):
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
    # With groups any user may connect; the kernel says which one does.
    mode = 0o666 if config.operators or config.viewers else 0o600
    try:
        with named_socket(config.socket, mode) as early:
            await web.UnixSite(local, early, backlog=1024).start()
    except OSError as error:
        what = f"cannot create the socket: {error.strerror or error}"
        raise InputError(Problem(str(config.socket), what, "name another file")) from None
    try:
        listener = Listener(public, daemon.api.strangers, daemon.api.tls)
        await listener.start(config.host, config.port)
        stack.push_async_callback(listener.close)
    except OSError as error:
        what = f"cannot listen: {error.strerror}"
        place = f"{config.host}:{config.port}"
        raise InputError(Problem(place, what, "name another address under [listen]")) from None
