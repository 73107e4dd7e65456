"""One sailord from its start to its end: the store, the election, the eyes and the doors."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from dataclasses import dataclass, field

import structlog
from aiohttp import web

from agents.daemon.clock import Clock
from agents.daemon.logs import begin_log
from agents.daemon.systemd import notify
from agents.protocol.records import JobId
from agents.protocol.store_keys import Keys
from agents.rpc.signing import read_key
from agents.store import (
    Compacted,
    Store,
    StoreError,
    StoreRefused,
    StoreUnavailable,
    open_store,
    serve,
)
from agents.store.sqlite_store import EmbeddedStore
from sailord.api.app import Api, build_app, build_public_app
from sailord.capacity.loop import CapacityLoop
from sailord.cluster_records import Gateway, World
from sailord.config import Config
from sailord.controller.agent_client import Calls
from sailord.controller.election import Election, StateFolder, take_state
from sailord.controller.lifetime_store import KEEP_S, keep_lives, recall_lives
from sailord.controller.loop import Shell
from sailord.core.events import (
    Deposed,
    Elected,
    IntentGiven,
    JobSubmitted,
    NodesObserved,
    StoreReturned,
    Ticked,
)
from sailord.notify.feed import Feed, Happening
from sailord.notify.webhook_sender import Outgoing
from sailord.providers.config import open_provider
from simulator.documents.problems import InputError, Problem

log = structlog.get_logger("sailord")

TICK_S = 0.1
ACCEPTED_AT_ONCE = 64
QUEUED_MAX = 4096
LOOK_S = 1.0
"""How often the store is read where no watch wakes us before."""
LOOK_S_MIN = 0.05
GO_S = 1.0
"""What an end waits for the store to take what may also be lost."""
MAY_WRITE = "its user needs to read and write what docs/operations.md names, all four prefixes"


@dataclass(eq=False)
class Daemon:
    """Everything that runs in the process."""

    config: Config
    store: Store
    state: StateFolder
    clock: Clock
    gateway: Gateway
    election: Election
    shell: Shell
    api: Api
    outgoing: Outgoing
    procurer: CapacityLoop | None = None
    """Only where a provider is configured."""
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    _is_ready: bool = False
    _led: int | None = None
    """The term for which everything was read; who has won one and could not read has yet to."""

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until told to stop."""
        works = [
            self.shell.planning.preload(),
            self.shell.run(),
            self._lead(),
            self._look(),
            self._watch(),
            self._tick(),
            self._remember(),
            self.outgoing.run(),
        ]
        if self.procurer is not None:
            works.append(self.procurer.run())
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
            await stop.wait()
            notify("STOPPING=1")
            for task in tasks:
                task.cancel()
        await self._keep_lives()
        await self.election.resign()

    # ---- leading ------------------------------------------------------------------------------

    async def _lead(self) -> None:
        pause_s = self.config.options.lease_s / 8
        while True:
            try:
                if self.election.term is not None:
                    await self._stay(pause_s)
                else:
                    self._led = None
                    await self.election.run_for_leader()
                if self.election.term not in (None, self._led):
                    await self._take_over()
                self.api.leader = self.election.seen
                if self.api.leader is not None:
                    self._tell_ready("somebody leads")
            except StoreRefused as error:
                await self._cannot_lead(error)
            except StoreError as error:
                self._see_away(error)
                await asyncio.sleep(0.2)
            # Who does not lead looks often: somebody must, soon after a lease has run out.
            await asyncio.sleep(pause_s if self.election.term is not None else min(pause_s, 0.5))

    async def _stay(self, pause_s: float) -> None:
        if self.shell.resign_asked.is_set():
            self.shell.resign_asked.clear()
            await self.election.resign()
            await asyncio.sleep(pause_s)
            return
        await self.election.stay()
        if self.election.term is None:
            self.shell.feed_event(Deposed(self.clock.now()))

    async def _cannot_lead(self, error: StoreRefused) -> None:
        """Another sailord may be let do what we are not; the store's own word says what it was."""
        why = f"{error}; {MAY_WRITE}"
        log.error("the store does not let us lead", cause="StoreRefused", error=why)
        await self.election.resign()
        self.api.leader = None
        await asyncio.sleep(self.config.options.lease_s / 2)

    async def _take_over(self) -> None:
        term = self.election.term
        if term is None:
            return
        world = await self.gateway.read_world()
        for job in world.jobs:
            await self._recall(job.id)
        self.shell.observed.history = await recall_lives(self.gateway)
        await self.shell.outbox.load()
        await self.outgoing.begin(term)
        if self.election.term != term:
            return  # It took so long that we are no longer sure to lead: the next try reads anew.
        self.shell.resign_asked.clear()
        about = {"nodes": len(world.nodes), "jobs": len(world.jobs)}
        log.info("leading", term=term, cause="Elected", **about)
        self._led = term
        self.shell.feed_event(
            Elected(
                self.clock.now(),
                term,
                world.nodes,
                world.jobs,
                world.generations,
                world.durables,
                world.intents,
            )
        )

    async def _recall(self, job: JobId) -> None:
        history = await self.gateway.read_history(job)
        self.shell.feed.recall(
            Happening(
                line.id, line.at, "transition", line.text, job, None, line.generation, line.step,
                line.term,
            )
            for line in history
        )  # fmt: skip

    async def _tick(self) -> None:
        while True:
            if self.election.term is not None and not self.election.is_sure:
                self.election.term = None
                log.warning("no longer sure to lead", cause="Ticked")
                self.shell.feed_event(Deposed(self.clock.now()))
            self.shell.feed_event(Ticked(self.clock.now()))
            await asyncio.sleep(TICK_S)

    async def _remember(self) -> None:
        while True:
            await asyncio.sleep(KEEP_S)
            await self._keep_lives()

    async def _keep_lives(self) -> None:
        term = self.election.term
        if term is not None:
            with contextlib.suppress(StoreError, TimeoutError):  # The next time will do.
                async with asyncio.timeout(GO_S):
                    await keep_lives(self.gateway, self.shell.observed.history, term)

    # ---- looking ------------------------------------------------------------------------------

    async def _look(self) -> None:
        while True:
            self.woken.clear()
            try:
                world = await self.gateway.read_world()
            except StoreError as error:
                self._see_away(error)
                await asyncio.sleep(0.3)
                continue
            self._see(world)
            await asyncio.sleep(LOOK_S_MIN)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.woken.wait(), LOOK_S)

    def _see(self, world: World) -> None:
        now, was_away = self.clock.now(), self.shell.store.mark_available()
        if was_away:
            log.info("the store is back", cause="StoreReturned")
        for fault in world.unreadable:
            log.warning("the store holds what nobody can read", cause="WireError", what=fault)
        state = self.shell.state
        if state.term is None or state.term != self.election.term:
            return
        feed = self.shell.feed_event
        if was_away:
            feed(StoreReturned(now))
        feed(NodesObserved(now, world.nodes))
        durables = dict(world.durables)
        for job in world.jobs:
            if job.id not in state.jobs:
                feed(JobSubmitted(now, job, durables.get(job.id)))
        fresh = [intent for intent in world.intents if intent.id not in state.intents]
        if fresh:
            feed(IntentGiven(now, fresh[0], tuple(fresh[1:])))

    def _see_away(self, error: StoreError) -> None:
        if self.shell.store.mark_unavailable(str(error), at=self.clock.now()):
            log.warning("the store is away", cause=type(error).__name__, error=str(error))
            self._tell_ready("the store is away")

    def _tell_ready(self, status: str) -> None:
        """The doors are open, and what they answer is so: also that the store is away."""
        if not self._is_ready:
            self._is_ready = True
            notify(f"READY=1\nSTATUS={status}")

    async def _watch(self) -> None:
        """A change wakes the looking, and means nothing else."""
        while True:
            try:
                after = (await self.gateway.store.snapshot(self.gateway.keys.leader)).revision
                watch = self.store.watch(self.gateway.keys.all, after=after)
                async with contextlib.aclosing(watch) as changes:
                    async for change in changes:
                        self.woken.set()
                        if isinstance(change, Compacted):
                            break
            except StoreError:
                pass  # Looking goes on without it, and says that the store is away.
            await asyncio.sleep(0.2)


async def run_daemon(config: Config) -> None:
    """Run until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    state = take_state(config.state)
    key = read_key(config.key)
    async with contextlib.AsyncExitStack() as stack:
        store = await _open_store(config)
        stack.push_async_callback(store.close)
        if isinstance(store, EmbeddedStore):
            server = await serve(store, config.store_socket)
            stack.push_async_callback(server.close)
        daemon = _assemble(config, store, state, key)
        stack.push_async_callback(daemon.shell.calls.close)
        stack.callback(daemon.shell.planning.close)
        if daemon.procurer is not None:
            await daemon.procurer.check()
        await _open_doors(daemon, stack)
        begin_log(config.log_format, daemon.shell.standing)
        await daemon.run(stop)


async def _open_store(config: Config) -> Store:
    try:
        return await open_store(config.store)
    except StoreUnavailable as error:
        raise InputError(Problem("store", str(error), "stop the process that has it")) from None


def _assemble(config: Config, store: Store, state: StateFolder, key: bytes) -> Daemon:
    clock, keys, feed = Clock(), Keys(config.cluster_name), Feed()
    gateway = Gateway(store, keys)
    shell = Shell(config, gateway, Calls(key), clock, feed)
    lease_s = config.options.lease_s
    election = Election(store, keys.leader, state, config.address, lease_s)
    woken = asyncio.Event()
    api = Api(config, shell, Gateway(store, keys), clock, key, woken)
    receivers = config.webhooks.receivers
    outgoing = Outgoing(receivers, shell.outbox, lambda: shell.state.term)
    procurer = None
    if config.provider is not None:
        provider = open_provider(config.provider, config.cluster, clock.now)
        own = Gateway(store, keys)
        procurer = CapacityLoop(
            config, provider, config.capacity, shell, shell.planning, own, clock
        )
        api.procurer = procurer
    return Daemon(
        config, store, state, clock, gateway, election, shell, api, outgoing, procurer, woken
    )


async def _open_doors(daemon: Daemon, stack: contextlib.AsyncExitStack) -> None:
    """Listen for agents and people: over TCP with a token, over the Unix socket without."""
    config = daemon.config
    inside = web.AppRunner(build_app(daemon.api), access_log=None, shutdown_timeout=1.0)
    outside = web.AppRunner(build_public_app(daemon.api), access_log=None, shutdown_timeout=1.0)
    for runner in (inside, outside):
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
    early = config.socket.with_name(f".{config.socket.name}.new")
    early.unlink(missing_ok=True)
    try:
        await web.UnixSite(inside, early, backlog=1024).start()
        early.chmod(0o600)
        early.rename(config.socket)
    except OSError as error:
        what = f"cannot be a socket: {error.strerror or error}"
        raise InputError(Problem(str(config.socket), what, "name another file")) from None
    try:
        await _listen(outside, config.host, config.port)
    except OSError as error:
        what = f"cannot be listened on: {error.strerror}"
        place = f"{config.host}:{config.port}"
        raise InputError(Problem(place, what, "give another address under [listen]")) from None


async def _listen(door: web.AppRunner, host: str, port: int) -> None:
    """Take a few connections at each turn of the loop; many may wait in the kernel's queue."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, port), family=family)
    await web.SockSite(door, listening, backlog=ACCEPTED_AT_ONCE).start()
    listening.listen(QUEUED_MAX)
