"""One agent from start to stop: its parts, its HTTP server, and how signals end it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import structlog

from agents.cloud.notices import SHUTDOWN, Notices
from agents.config import Config
from agents.core.model import DeviceFailed, Event, NoticeWithdrawn, SelfTested, State, StopRequested
from agents.daemon.bounded_file import keep_bounded
from agents.daemon.clock import Clock
from agents.daemon.logs import LogForm, begin_log
from agents.daemon.state_folder import lock_folder
from agents.daemon.systemd import notify
from agents.devices.monitor import listen_for_xids, wait_broken
from agents.devices.probe import Devices, self_test
from agents.last_answer import LastAnswer
from agents.links.http import LinkRoutes
from agents.links.receiver import Receiver
from agents.links.sender import Sender
from agents.loop import AgentLoop, CurrentState
from agents.node_identity import identify_node
from agents.own_certificate import open_tls
from agents.protocol.store_keys import Keys
from agents.registration import Registration
from agents.report_sender import ReportSender
from agents.rpc.client import SignedClient
from agents.rpc.enrolment import copies_for_workers, worker_tls
from agents.rpc.signing import ClusterKey, Verifier
from agents.rpc.tls import Tls
from agents.saved_state import SavedState, initial_state, load_or_begin, stop_notices
from agents.server import AgentServer
from agents.snapshots.checkpoint_http import CheckpointRoutes, checkpoint_path
from agents.snapshots.http import SnapshotRoutes
from agents.snapshots.lifecycle import SnapshotLifecycle
from agents.snapshots.memory import SnapshotMemory
from agents.snapshots.readers import ReadAdmission
from agents.store.factory import open_store
from agents.store.interface import Store
from agents.work.fetch import PackageFetcher
from agents.work.preparation import Preparation
from agents.workers.fork_client import ForkClient, ForkedCommands
from agents.workers.gang import WorkerGang
from agents.workers.join import GenerationJoiner
from agents.workers.rendezvous import Rendezvous
from agents.workers.specs import WorkerSettings
from simulator.documents.problems import InputError, Problem
from simulator.hardware.catalogue import Catalogue

FAILED, ALONE = 1, 76
"""Exit codes: it may be restarted; no leader has answered for ``alone_s``."""
LIFE_FILE = "life.json"
LEAVE_S = 10.0
"""The longest wait to leave the store, which may be gone with the leader."""
SHUTDOWN_LEFT_S = 5.0
"""The last part of the time until the machine is off, for the end of workers and agent."""
RETEST_S = 5.0

log = structlog.get_logger("sailor-agent")


async def run_agent(config: Config, devices: Devices, catalogue: Catalogue, form: LogForm) -> None:
    """Run the agent until a signal ends it."""
    for place in config.unread:
        log.warning("a setting is no longer read", place=place)
    key, clock = ClusterKey.read(config.key, config.cluster_name), Clock()
    lock, path = lock_folder(config.state, service="agent"), config.state / LIFE_FILE
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(os.close, lock)
        session = await stack.enter_async_context(aiohttp.ClientSession(auto_decompress=False))
        answer = LastAnswer.read(None if config.alone_s is None else config.state / "last-answer")
        tls = await _open_tls(config, key, session, answer, stack)
        saved = load_or_begin(path)
        node = await identify_node(config, devices, catalogue, saved, session)
        store = await open_store(config.store)
        stack.push_async_callback(store.close)
        options = config.options_on(is_emulated=devices.is_emulated)
        state = initial_state(saved, node, options, clock.now())
        if config.worker_folder is not None:
            os.umask(0o027)  # Workers have our group, so that they can read files written for them.
        client = SignedClient(session, key, tls=tls)
        parts = _assemble(config, devices, catalogue, client, store, clock, state, saved, answer)
        loop, feed = parts.loop, parts.loop.events.put_nowait
        stack.callback(parts.preparation.close)
        loop.snapshots.open()
        stack.callback(loop.snapshots.uploader.close)
        await _listen(config, parts, stack)
        await loop.joiner.resume(saved.job, saved.generation)
        proving = replace(loop.state.node, proves_reads=parts.fork_client.proves_reads)
        loop.current.state = replace(loop.state, node=proving)
        loop.snapshots.resume()
        begin_log(form, loop.log_context)
        notices = Notices(node.id, config.notice_s, config.shutdown_s, clock, feed)
        notices.restore(saved.notices)
        for id_ in stop_notices(saved):
            feed(NoticeWithdrawn(clock.now(), id_))
        stop = ServiceStop(loop, notices, config)
        is_over = await _run_until_stopped(
            loop,
            stop,
            loop.registration.poll(node.id, loop.held_job, parts.preparation.look),
            notices.watch(session),
            _monitor_devices(loop, devices, config.state),
            keep_bounded(parts.logs),
        )
        answer.forget()
        await loop.gang.close(is_over=is_over or stop.is_shutdown)
        if is_over:
            # The node leaves the store at once, and the next start registers another node.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LEAVE_S):
                    await loop.registration.leave()
            path.unlink(missing_ok=True)
    if stop.is_alone.is_set():
        raise SystemExit(ALONE)
    if stop.was_given_up:
        raise SystemExit(FAILED)


async def _open_tls(
    config: Config,
    key: ClusterKey,
    session: aiohttp.ClientSession,
    answer: LastAnswer,
    stack: contextlib.AsyncExitStack,
) -> Tls | None:
    """Get a certificate; without an answer of sailord the agent ends after ``alone_s``."""
    limit_s = None if config.alone_s is None else answer.left_s(config.alone_s)
    try:
        async with asyncio.timeout(limit_s):
            return await open_tls(config, key, session, stack)
    except TimeoutError:
        answer.forget()
        log.error("no sailord gave a certificate", alone_s=config.alone_s)
        raise SystemExit(ALONE) from None


@dataclass(frozen=True, eq=False)
class AgentParts:
    """The loop, and what the loop itself does not need."""

    loop: AgentLoop
    preparation: Preparation
    fork_client: ForkClient

    def logs(self) -> list[Path]:
        """Return the files whose size is limited."""
        return [*self.loop.gang.outputs.values(), *filter(None, [self.preparation.log])]


def _assemble(
    config: Config,
    devices: Devices,
    catalogue: Catalogue,
    client: SignedClient,
    store: Store,
    clock: Clock,
    state: State,
    saved: SavedState,
    answer: LastAnswer,
) -> AgentParts:
    current, events = CurrentState(state), asyncio.Queue[Event]()
    feed = events.put_nowait
    memory = SnapshotMemory(
        config.memory or _default_memory(config, devices),
        has_worker_user=config.worker_folder is not None,
    )
    registration = Registration(
        store,
        Keys(config.cluster_name),
        config.lease_s,
        clock,
        feed,
        memory.jobs,
        heard_term=lambda: current.state.heard.term,
        keep_s=config.orphan_s,
    )
    fork_client = ForkClient(
        config.shared,
        config.worker,
        config.orphan_s,
        is_service=config.worker_folder is not None,
    )
    gang = WorkerGang(config.shared, fork_client, clock, feed, ended=memory.worker_ended)
    packages = PackageFetcher(
        config.shared / "work" / "packages", client, registration.package_sources
    )
    preparation = Preparation(
        folder=config.shared / "work",
        fetcher=packages,
        read_job=registration.job_text,
        agreed=registration.packages_agreed,
        feed=feed,
        clock=clock,
        secrets=config.secrets,
        allowed=config.mounts,
        commands=ForkedCommands(fork_client) if fork_client.is_service else None,
    )
    joiner = GenerationJoiner(
        _worker_settings(config, devices, catalogue, memory.folder, client.key, client.tls),
        lambda: current.state.node,
        registration.details_of,
        registration.nodes,
        gang,
        Rendezvous(client),
        preparation.view,
    )
    snapshots = SnapshotLifecycle(
        memory=memory,
        workers=gang,
        cluster=registration,
        client=client,
        clock=clock,
        feed=feed,
        state=lambda: current.state,
        rate_bytes_s=config.copy_mb_s * 1e6,
    )
    loop = AgentLoop(
        current=current,
        saved=saved,
        path=config.state / LIFE_FILE,
        clock=clock,
        events=events,
        registration=registration,
        gang=gang,
        joiner=joiner,
        snapshots=snapshots,
        sender=ReportSender(client, lambda: registration.leader, answer, registration.unreadable),
    )
    return AgentParts(loop, preparation, fork_client)


def _default_memory(config: Config, devices: Devices) -> Path:
    """Return the folder for snapshots; many emulated nodes may share a machine."""
    if devices.is_emulated:
        return config.shared / "memory"
    return Path("/dev/shm", f"sailor-{config.name}")


def _worker_settings(
    config: Config,
    devices: Devices,
    catalogue: Catalogue,
    memory: Path,
    key: ClusterKey,
    tls: Tls | None,
) -> WorkerSettings:
    files = None if config.tls is None else config.tls.files
    if files is not None and config.worker_folder is not None:
        files = copies_for_workers(files, config.shared / "tls")
    declared = round(catalogue.gpu(devices.gpu).usable_memory_bytes)
    return WorkerSettings(
        state=config.shared,
        memory=memory,
        key=key,
        data=config.data,
        orphan_s=config.orphan_s,
        threads=config.threads or max(1, (os.cpu_count() or 1) // devices.count),
        device_bytes=declared if devices.is_emulated else None,
        checkpoint_path=None
        if config.worker_folder is None
        else functools.partial(checkpoint_path, key),
        tls=None if files is None else worker_tls(files, config.cluster_name),
        own_tls=tls,
    )


async def _listen(config: Config, parts: AgentParts, stack: contextlib.AsyncExitStack) -> None:
    """Start the HTTP server, and put its address into the node's record."""
    loop, client = parts.loop, parts.loop.snapshots.client
    verifier = Verifier(client.key, lambda: loop.state.node.address, time.monotonic())
    readers = ReadAdmission(verifier, client.tls, loop.registration.shows_tickets)
    server = AgentServer(
        verifier=verifier,
        clock=loop.clock,
        state=lambda: loop.state,
        outputs=lambda: loop.gang.outputs,
        ended_before=loop.gang.ended_before,
        rank_folder=loop.gang.rank_folder,
        rendezvous=loop.joiner.rendezvous,
        preparation=parts.preparation,
        snapshots=SnapshotRoutes(loop.snapshots.memory, verifier, readers),
        checkpoints=CheckpointRoutes(readers),
        links=LinkRoutes(Receiver(config.host), Sender(client)),
        feed=loop.events.put_nowait,
        known=loop.known_generation,
        wake=loop.registration.woken.set,
        answered_s=lambda: loop.sender.last_answer.at_s,
        unreadable=loop.registration.unreadable,
        tls=client.tls,
    )
    try:
        runner, listener = await server.open(config.host, config.port)
    except OSError as error:
        place, what = f"{config.host}:{config.port}", f"cannot be listened on: {error.strerror}"
        raise InputError(Problem(place, what, "set another address under [listen]")) from None
    stack.push_async_callback(runner.cleanup)
    stack.push_async_callback(listener.close)
    node = replace(loop.state.node, address=config.address or f"{config.host}:{listener.port}")
    loop.current.state = replace(loop.state, node=node)


async def _run_until_stopped(
    loop: AgentLoop, stop: ServiceStop, *others: Coroutine[Any, Any, None]
) -> bool:
    """Run until SIGINT, until the loop exits after SIGTERM, or until ``alone_s`` without a leader.

    Return whether the node is over.
    """
    running, interrupted = asyncio.get_running_loop(), asyncio.Event()
    running.add_signal_handler(signal.SIGTERM, stop.terminated.set)
    running.add_signal_handler(signal.SIGPWR, stop.begin_shutdown)
    running.add_signal_handler(signal.SIGINT, interrupted.set)
    registration = loop.registration
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(work)
            for work in (
                loop.run(),
                registration.keep_registered(),
                registration.watch(),
                registration.store_orders(),
                loop.sender.run(),
                loop.snapshots.replicator.run(),
                loop.snapshots.uploader.run(),
                stop.drain(interrupted),
                stop.wait_alone(),
                *others,
            )
        ]
        ends = [group.create_task(end.wait()) for end in (loop.ended, interrupted, stop.is_alone)]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        notify("STOPPING=1")
        for task in (*tasks, *ends):
            task.cancel()
    return loop.ended.is_set() or stop.is_alone.is_set()


async def _monitor_devices(loop: AgentLoop, devices: Devices, state: Path) -> None:
    """Test the devices until they pass, then watch for faults; repeat forever."""
    with listen_for_xids(devices) as listener:
        while True:
            await _test_until_passed(loop, devices, state)
            fault = await wait_broken(devices, state, listener)
            loop.events.put_nowait(DeviceFailed(loop.clock.now(), fault))
            if listener is not None and listener.broken:
                return  # Nothing reports its recovery; the next agent process tests again.


async def _test_until_passed(loop: AgentLoop, devices: Devices, state: Path) -> None:
    """Repeat the self-test until it passes; report each new reason of a failure once."""
    reported: str | None = None
    while reported != "":
        is_working = loop.state.gang is not None or bool(loop.gang.members)
        why_not = await self_test(devices, state, is_working=is_working)
        if why_not != reported:
            loop.events.put_nowait(SelfTested(loop.clock.now(), why_not))
        reported = why_not
        await asyncio.sleep(RETEST_S if why_not else 0)


@dataclass(eq=False)
class ServiceStop:
    """The end of the service, or of the whole machine: a drain with a time limit."""

    loop: AgentLoop
    notices: Notices
    config: Config
    terminated: asyncio.Event = field(default_factory=asyncio.Event)
    is_shutdown: bool = False
    """The machine shuts down, and the workers with it."""
    was_given_up: bool = False
    """The drain did not end in time."""
    is_alone: asyncio.Event = field(default_factory=asyncio.Event)
    """No leader has received a report for ``alone_s``."""

    def begin_shutdown(self) -> None:
        """Handle SIGPWR."""
        self.is_shutdown = True
        self.terminated.set()

    async def drain(self, interrupted: asyncio.Event) -> None:
        """Drain after SIGTERM or SIGPWR, and interrupt the agent at the time limit."""
        await self.terminated.wait()
        notify("STOPPING=1")
        limit_s = self.config.drain_s
        if self.is_shutdown:
            self.notices.hear(SHUTDOWN, is_leaving=True)
            limit_s = max(1.0, min(limit_s, self.config.shutdown_s - SHUTDOWN_LEFT_S))
        self.loop.events.put_nowait(StopRequested(self.loop.clock.now()))
        await asyncio.sleep(limit_s)
        if self.loop.state.gang is None:
            log.warning("exiting, though other nodes may need its snapshots", waited_s=limit_s)
            self.loop.ended.set()
            return
        self.was_given_up = not self.is_shutdown
        then = "its workers end with the machine"
        if self.was_given_up:
            then = "its workers train on without an agent; start it again, or cancel the job"
        log.error("the drain did not end in time", drain_s=limit_s, consequence=then)
        interrupted.set()

    async def wait_alone(self) -> None:
        """End the agent once no leader has answered for ``alone_s``."""
        if self.config.alone_s is not None:
            await self.loop.sender.last_answer.wait(self.config.alone_s)
            log.error("no leader has answered", alone_s=self.config.alone_s)
            self.is_alone.set()
