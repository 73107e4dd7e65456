"""The command ``sailor-agent``: runs one node's agent in the foreground, as systemd wants it.

SIGTERM drains the node and ends the agent once no worker needs it. SIGINT ends the agent alone:
its workers go on, and the next agent finds them. Exit codes: 0 it was told to end; 1 it failed
and may be started again; 2 something that it was given cannot be used.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Coroutine
from importlib.metadata import version
from pathlib import Path
from typing import Any

import aiohttp
import click
import structlog

from agents.cloud.gce_metadata import MACHINE_S, read_machine
from agents.cloud.notices import SHUTDOWN, Notices
from agents.config import Config, load_config
from agents.core.model import DeviceBroke, EndAsked, Event, SelfTested
from agents.daemon.clock import Clock
from agents.daemon.logs import Form, begin_log, failures_are_told
from agents.daemon.state_folder import lock_folder
from agents.daemon.systemd import is_shutting_down, notify
from agents.devices.monitor import listening, until_broken
from agents.devices.probe import Devices, probe, read_emulated, self_test
from agents.loop import Shell
from agents.protocol.records import NodeRecord
from agents.protocol.store_keys import Keys
from agents.registration import Registration
from agents.report_sender import Teller
from agents.rpc.client import Peers
from agents.rpc.signing import Verifier, read_key
from agents.saved_state import Kept, first_state, recall
from agents.server import Door
from agents.snapshots.http import MemoryDoor
from agents.snapshots.lifecycle import new_keeper
from agents.store import StoreUnavailable, open_store
from agents.workers.fork_client import WarmParent
from agents.workers.gang import Workers
from agents.workers.join import Joining
from agents.workers.rendezvous import Meeting
from agents.workers.specs import Site
from simulator.documents.problems import InputError, Problem, Problems
from simulator.hardware.catalogue import Catalogue, load_catalogue

log = structlog.get_logger("sailor-agent")

KNOWN_S = 1.0
"""The metadata server has so long where the file would do: elsewhere there is none."""

UNUSABLE_INPUT = 2
RETEST_S = 5.0


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("sailor"), prog_name="sailor-agent")
def main() -> None:
    """Look after one machine: its devices, its workers, its place in the cluster."""


@main.command()
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    default=Path("/etc/sailor/agent.toml"),
    show_default=True,
    help="The configuration file (docs/agent.md).",
)
@click.option("--emulate", metavar="2xA100-40", help="Have devices that are not there.")
def run(config: Path, emulate: str | None) -> None:
    """Run the agent until SIGTERM, which drains, or SIGINT, which leaves the workers alone."""
    form: Form = "terminal" if sys.stderr.isatty() else "json"
    begin_log(form)
    try:
        loaded = load_config(config)
        catalogue = load_catalogue(loaded.catalogue)
        devices = probe(catalogue) if emulate is None else read_emulated(emulate, catalogue)
        with failures_are_told():
            asyncio.run(run_agent(loaded, devices, catalogue, form))
    except InputError as error:
        for problem in error.problems:
            click.echo(f"error: {problem}", err=True)
        sys.exit(UNUSABLE_INPUT)


async def run_agent(config: Config, devices: Devices, catalogue: Catalogue, form: Form) -> None:
    """Run until told to end."""
    key, clock = read_key(config.key), Clock()
    lock = lock_folder(config.state, service="agent")
    events: asyncio.Queue[Event] = asyncio.Queue()
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(os.close, lock)
        session = await stack.enter_async_context(aiohttp.ClientSession(auto_decompress=False))
        kept = recall(config.state / "life.json")
        node = await this_node(config, devices, catalogue, kept, session)
        try:
            store = await open_store(config.store)
        except StoreUnavailable as error:
            raise InputError(Problem("store", str(error), "name its socket, unix://")) from None
        stack.push_async_callback(store.close)
        registration = Registration(
            store, Keys(config.cluster_name), config.lease_s, clock, events.put_nowait
        )
        peers = Peers(session, key)
        warm = WarmParent(config.state, config.worker, config.orphan_s)
        workers = Workers(config.state, warm, clock, events.put_nowait)
        meeting = Meeting(peers)
        threads = config.threads or max(1, (os.cpu_count() or 1) // node.gpus)
        memory = config.memory or _memory_of(config, devices)
        declared = round(catalogue.gpu(devices.gpu).usable_memory_bytes)
        device_bytes = declared if devices.is_emulated else None
        site = Site(config.state, memory, key, config.data, config.orphan_s, threads, device_bytes)
        joining = Joining(site, lambda: shell.state.node, registration, workers, meeting)
        keeper = new_keeper(memory, peers, workers, registration, config.copy_mb_s * 1e6)
        teller = Teller(peers, lambda: registration.leader)
        state = first_state(kept, node, config.options, clock.now())
        path = config.state / "life.json"
        shell = Shell(
            state, kept, path, clock, events, registration, workers, joining, keeper, teller
        )
        keeper.open()
        await _listen(config, key, shell, stack)
        await joining.resume(kept.job, kept.generation)
        keeper.resume()
        begin_log(form, shell.standing)
        notices = Notices(node.id, config.notice_s, config.shutdown_s, clock, events.put_nowait)
        notices.recall(kept.notices)
        looking = _look_after(shell, devices, config.state)
        is_over = await _run_until_told(shell, notices, notices.watch(session), looking)
        await workers.close(is_over=is_over)
        if is_over:
            # The next start is another life; this one's node is gone from the store at once.
            await registration.leave()
            path.unlink(missing_ok=True)


def _memory_of(config: Config, devices: Devices) -> Path:
    """Where snapshots are kept if nobody says: many emulated nodes may share a machine."""
    if devices.is_emulated:
        return config.state / "memory"
    return Path("/dev/shm", f"sailor-{config.name}")


async def _listen(
    config: Config, key: bytes, shell: Shell, stack: contextlib.AsyncExitStack
) -> None:
    verifier = Verifier(key)
    door = Door(
        verifier,
        shell.clock,
        lambda: shell.state,
        lambda: shell.workers.outputs,
        shell.joining.meeting,
        MemoryDoor(shell.keeper.memory, verifier),
        shell.events.put_nowait,
        shell.registration.woken.set,
    )
    try:
        runner, port = await door.open(config.host, config.port)
    except OSError as error:
        place, what = f"{config.host}:{config.port}", f"cannot be listened on: {error.strerror}"
        raise InputError(Problem(place, what, "give another under [listen]")) from None
    stack.push_async_callback(runner.cleanup)
    shell.locate(config.address or f"{config.host}:{port}")


async def _run_until_told(
    shell: Shell, notices: Notices, *others: Coroutine[Any, Any, None]
) -> bool:
    """Whether this life is over, and not only this process."""
    loop, left, told = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, told.set)
    loop.add_signal_handler(signal.SIGINT, left.set)
    node, registration = shell.state.node.id, shell.registration
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(work)
            for work in (
                shell.run(),
                registration.stay(),
                registration.look(node, shell.held),
                registration.watch(),
                registration.raise_all(),
                shell.teller.run(),
                shell.keeper.buddies.run(),
                shell.keeper.uploading.run(),
                _end_when(told, shell, notices),
                *others,
            )
        ]
        ends = [group.create_task(end.wait()) for end in (shell.ended, left)]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        notify("STOPPING=1")
        for task in (*tasks, *ends):
            task.cancel()
    return shell.ended.is_set()


async def _look_after(shell: Shell, devices: Devices, state: Path) -> None:
    """Try the devices before their first use, and see it when one breaks; for ever."""
    with listening(devices) as alarms:
        while True:
            await _test_until_sound(shell, devices, state)
            fault = await until_broken(devices, state, alarms)
            notify(f"STATUS=not ready: {fault}")
            shell.events.put_nowait(DeviceBroke(shell.clock.now(), fault))
            if alarms is not None and alarms.broken:
                return  # Nothing would tell that it is sound again; the next agent tries anew.


async def _test_until_sound(shell: Shell, devices: Devices, state: Path) -> None:
    """Somebody may put right what is wrong; each reason is told once."""
    said: str | None = None
    while said != "":
        is_working = shell.state.gang is not None or bool(shell.workers.members)
        why_not = await self_test(devices, state, is_working=is_working)
        if why_not != said:
            notify(f"STATUS=not ready: {why_not}" if why_not else "STATUS=ready for work")
            shell.events.put_nowait(SelfTested(shell.clock.now(), why_not))
        said = why_not
        await asyncio.sleep(RETEST_S if why_not else 0)


async def _end_when(told: asyncio.Event, shell: Shell, notices: Notices) -> None:
    """Drain; a shutdown of the whole machine is a notice too, and has little time."""
    await told.wait()
    notify("STOPPING=1\nSTATUS=draining: it ends when no worker needs it")
    if await is_shutting_down():
        notices.hear(SHUTDOWN, is_going=True)
    shell.events.put_nowait(EndAsked(shell.clock.now()))


async def this_node(
    config: Config,
    devices: Devices,
    catalogue: Catalogue,
    kept: Kept,
    session: aiohttp.ClientSession,
) -> NodeRecord:
    """The node as it will register: what no metadata server says, the configuration must.

    A file may have come with a machine's image, and speak of another machine. Only devices that
    are emulated may stand wherever the file says. Of a type that has these devices it is believed:
    Google has no names for machines with attached GPUs, and catalogues have names of their own.
    """
    says = None
    if config.zone is None or not devices.is_emulated:
        is_said = config.zone is not None and config.machine is not None
        says = await read_machine(session, KNOWN_S if is_said else MACHINE_S)
    zone, machine = config.zone, config.machine
    if says is not None and (zone is None or not devices.is_emulated):
        zone = _known("zone", zone, says.zone)
    if says is not None and not devices.is_emulated:
        machine = _machine(machine, says.machine, devices, catalogue)
    emulated = {"is_emulated": devices.is_emulated, "tflops": devices.tflops}
    log.info("found devices", gpu=devices.gpu, gpus=devices.count, **emulated)
    problems = Problems()
    if zone is None:
        problems.add("zone", "is not given, and no metadata server says it", "give the zone")
    if machine is None and devices.is_emulated:
        try:
            machine = catalogue.machine_for(devices.gpu, devices.count).name
        except InputError as error:
            problems.take(error, place="machine")
    elif machine is None:
        problems.add("machine", "is not given, and no metadata server says it", "give its type")
    problems.raise_if_any()
    assert zone is not None
    assert machine is not None
    return NodeRecord(
        id=kept.node_id(config.name),
        name=config.name,
        zone=zone,
        machine=machine,
        gpu=devices.gpu,
        gpus=devices.count,
        address="",
        spot=config.spot,
        lease_s=config.lease_s,
    )


def _machine(by_file: str | None, by_server: str, devices: Devices, catalogue: Catalogue) -> str:
    def has_them(name: str) -> bool:
        with contextlib.suppress(InputError):
            machine = catalogue.machine(name)
            return (machine.gpu, machine.gpus) == (devices.gpu, devices.count)
        return False

    if by_file is None or (has_them(by_server) and not has_them(by_file)):
        return _known("machine", by_file, by_server)
    return by_file


def _known(what: str, by_file: str | None, by_server: str) -> str:
    if by_file not in (None, by_server):
        told = {"file": by_file, "metadata_server": by_server}
        log.warning(f"the metadata server's word for the {what} is taken, not the file's", **told)
    return by_server


if __name__ == "__main__":
    main()
