"""The command ``sailor-agent``: runs one node's agent in the foreground, as systemd wants it.

SIGTERM drains the node and ends the agent once no worker needs it. SIGINT ends the agent alone:
its workers go on, and the next agent finds them. Exit codes: 0 it was told to end; 2 something
that it was given cannot be used.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import sys
from importlib.metadata import version
from pathlib import Path

import aiohttp
import click
import structlog

from agents.clock import Clock
from agents.config import Config, load_config
from agents.http import Door
from agents.metadata import read_machine, watch_notices
from agents.model import EndAsked, Event, SelfTested
from agents.probe import Devices, probe, read_emulated, self_test
from agents.protocol import NodeRecord
from agents.recall import Kept, first_state, recall
from agents.registration import Registration
from agents.shell import Shell, notify
from agents.signing import Verifier, read_key
from agents.store import StoreUnavailable, open_store
from agents.telling import Teller
from agents.workers import Workers
from simulator.catalogue import load_catalogue
from simulator.errors import InputError, Problem, Problems

UNUSABLE_INPUT = 2


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
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.dev.ConsoleRenderer(colors=True)
            if sys.stderr.isatty()
            else structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    try:
        loaded = load_config(config)
        devices = probe() if emulate is None else read_emulated(emulate)
        asyncio.run(run_agent(loaded, devices))
    except InputError as error:
        for problem in error.problems:
            click.echo(f"error: {problem}", err=True)
        sys.exit(UNUSABLE_INPUT)


async def run_agent(config: Config, devices: Devices) -> None:
    """Run until told to end."""
    key, clock = read_key(config.key), Clock()
    lock = _take_folder(config.state)
    events: asyncio.Queue[Event] = asyncio.Queue()
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(os.close, lock)
        session = await stack.enter_async_context(aiohttp.ClientSession(auto_decompress=False))
        kept = recall(config.state / "life.json")
        node = await _node(config, devices, kept, session)
        try:
            store = await open_store(config.store)
        except StoreUnavailable as error:
            raise InputError(Problem("store", str(error), "name its socket, unix://")) from None
        stack.push_async_callback(store.close)
        registration = Registration(
            store, config.cluster_name, config.lease_s, clock, events.put_nowait
        )
        workers = Workers(
            config.state, config.worker, node.gpus, config.orphan_s, clock, events.put_nowait
        )
        teller = Teller(session, key, lambda: registration.leader)
        state = first_state(kept, node, clock.now())
        path = config.state / "life.json"
        shell = Shell(state, kept, path, clock, events, registration, workers, teller)
        await workers.open(kept.generation)
        await _listen(config, key, shell, stack)
        why_not = await self_test(devices, config.state)
        shell.events.put_nowait(SelfTested(clock.now(), why_not))
        is_over = await _run_until_told(shell, session)
        await workers.close(is_over=is_over)
        if is_over:
            # The next start is another life; this one's node is gone from the store at once.
            await registration.leave()
            path.unlink(missing_ok=True)


async def _listen(
    config: Config, key: bytes, shell: Shell, stack: contextlib.AsyncExitStack
) -> None:
    door = Door(
        Verifier(key),
        shell.clock,
        lambda: shell.state,
        shell.workers.output,
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


async def _run_until_told(shell: Shell, session: aiohttp.ClientSession) -> bool:
    """Whether this life is over, and not only this process."""
    loop, left = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(
        signal.SIGTERM, lambda: shell.events.put_nowait(EndAsked(shell.clock.now()))
    )
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
                shell.teller.run(),
                watch_notices(session, node, shell.clock, shell.events.put_nowait),
            )
        ]
        ends = [group.create_task(end.wait()) for end in (shell.ended, left)]
        notify("READY=1")
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        notify("STOPPING=1")
        for task in (*tasks, *ends):
            task.cancel()
    return shell.ended.is_set()


async def _node(
    config: Config, devices: Devices, kept: Kept, session: aiohttp.ClientSession
) -> NodeRecord:
    """The node as it will register; what no metadata server says, the configuration must."""
    known = None
    if config.zone is None or config.machine is None:
        known = await read_machine(session)
    zone = config.zone or (known.zone if known else None)
    machine = config.machine or (known.machine if known else None)
    problems = Problems()
    if zone is None:
        problems.add("zone", "is not given, and no metadata server says it", "give the zone")
    if machine is None and devices.is_emulated:
        try:
            machine = load_catalogue().machine_for(devices.gpu, devices.count).name
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
    )


def _take_folder(folder: Path) -> int:
    """Make the folder ours alone for as long as this process lives."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        what = f"cannot be the state folder: {error.strerror}"
        raise InputError(Problem(str(folder), what, "name another one under state")) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        what = "another agent runs on this state folder"
        raise InputError(Problem(str(folder), what, "stop it first, or name another")) from None
    return lock


if __name__ == "__main__":
    main()
