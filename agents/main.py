"""The command ``sailor-agent``: runs the agent of one node in the foreground, under systemd.

SIGTERM drains the node and ends the agent once no worker needs it. If that takes too long the agent
ends alone, with 1. SIGPWR says that the machine shuts down: the same, but sooner, and then the
workers end too. SIGINT ends the agent alone: its workers go on, and the next agent takes them over.
Exit codes: 0 it was told to end; 1 it failed and may be restarted; 2 an input is invalid; 76 no
leader has answered for ``alone_s``.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import click

from agents.config import Config, load_config
from agents.daemon.logs import LogForm, begin_log, log_crash
from agents.devices.nvml import REBOOT, DriverError
from agents.devices.probe import Devices, probe, read_emulated
from agents.rpc.signing import read_keys
from agents.service import FAILED, run_agent
from agents.workers.fork_client import service_socket
from agents.workers.fork_server import serve_as_a_service
from simulator.documents.problems import InputError, Problems
from simulator.hardware.catalogue import Catalogue, load_catalogue
from worker.version import own_version

INVALID_INPUT, NOT_USED = 2, 3
ASK_DRIVER = f"look whether `nvidia-smi` answers; if a device is lost, {REBOOT}"

CONFIG = click.option(
    "--config",
    type=click.Path(path_type=Path),
    default=Path("/etc/sailor/agent.toml"),
    show_default=True,
    help="The configuration file (docs/agent.md).",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(own_version(), prog_name="sailor-agent")
def main() -> None:
    """Run one node: its devices, its workers, its registration in the cluster."""


@main.command()
@CONFIG
@click.option("--emulate", metavar="2xA100-40", help="Emulate these devices.")
def run(config: Path, emulate: str | None) -> None:
    """Run the agent until SIGTERM, which drains, or SIGINT, which leaves the workers running."""
    form: LogForm = "terminal" if sys.stderr.isatty() else "json"
    begin_log(form)
    try:
        loaded = load_config(config)
        catalogue = load_catalogue(loaded.catalogue)
        devices = _find_devices(loaded, catalogue, emulate)
        with log_crash():
            asyncio.run(run_agent(loaded, devices, catalogue, form))
    except InputError as error:
        for problem in error.problems:
            click.echo(f"error: {problem}", err=True)
        sys.exit(INVALID_INPUT)
    except DriverError as error:
        click.echo(f"error: devices: {error}; {ASK_DRIVER}", err=True)
        sys.exit(FAILED)  # A driver that is still being loaded answers the next start.


@main.command()
@CONFIG
def check(config: Path) -> None:
    """Check the configuration, the key and the devices; report all problems."""
    problems = Problems()
    loaded = None
    try:
        loaded = load_config(config)
    except InputError as error:
        problems.take(error)
    if loaded is not None:
        for place in loaded.unread:
            click.echo(f"warning: {place} is no longer read", err=True)
        try:
            read_keys(loaded.key)
        except InputError as error:
            problems.take(error)
        try:
            devices = _find_devices(loaded, load_catalogue(loaded.catalogue), None)
            found = f"{devices.count} x {devices.gpu}{', emulated' * devices.is_emulated}"
            click.echo(f"{found}; the store is {loaded.store}")
        except InputError as error:
            problems.take(error)
        except DriverError as error:
            problems.add("devices", str(error), ASK_DRIVER)
    for problem in problems.found:
        click.echo(f"error: {problem}", err=True)
    if problems.found:
        sys.exit(INVALID_INPUT)
    click.echo(f"{config} is valid")


@main.command()
@CONFIG
def workers(config: Path) -> None:
    """Run workers and setup commands for the agent, as a user of their own.

    Exits with 3 if the configuration has no worker_folder.
    """
    try:
        loaded = load_config(config, opens_store=False)
    except InputError as error:
        for problem in error.problems:
            click.echo(f"error: {problem}", err=True)
        sys.exit(INVALID_INPUT)
    if loaded.worker_folder is None:
        click.echo(f"{config} has no worker_folder: workers run as the agent's user")
        sys.exit(NOT_USED)
    serve_as_a_service(service_socket(loaded.worker_folder), loaded.worker)


def _find_devices(config: Config, catalogue: Catalogue, emulate: str | None) -> Devices:
    if emulate is not None:
        return read_emulated(emulate, catalogue, place="--emulate")
    if config.emulate is not None:
        return read_emulated(config.emulate, catalogue, place="emulate")
    return probe(catalogue)


if __name__ == "__main__":
    main()
