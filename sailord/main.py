"""The command ``sailord``: runs the controller in the foreground, for systemd.

Exit codes: 0 stopped by a signal; 1 failed, or the provider does not answer; 2 invalid
configuration.

Planner processes import this module too, so that it imports little at the top.
"""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import shutil
import sys
import time
from multiprocessing import util
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sailord.cli.shared.errors import Group
from simulator.documents.problems import InputError, Problem
from worker.version import own_version

if TYPE_CHECKING:
    from sailord.config import Config

SWITCH_S = 0.0005
"""How long a thread that decodes the store's answer may delay the event loop. With Python's 5 ms
the slowest decisions among 2,000 nodes took a sixth longer (one comparison)."""
CONFIG = click.option(
    "--config",
    type=click.Path(path_type=Path),
    default=Path("/etc/sailor/sailord.toml"),
    show_default=True,
    help="The configuration file (docs/operations.md).",
)


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(own_version(), prog_name="sailord")
def main() -> None:
    """Keep one training job running on whatever GPUs are available."""


@main.command()
@CONFIG
def run(config: Path) -> None:
    """Run the controller until SIGTERM."""
    # Imported modules are never garbage; collecting among them takes a tenth of the start.
    gc.disable()
    from agents.daemon.logs import begin_log, log_crash  # noqa: PLC0415 - see above
    from sailord.config import load_config  # noqa: PLC0415 - see above
    from sailord.controller.fair_event_loop import new_loop  # noqa: PLC0415 - see above
    from sailord.daemon import run_daemon  # noqa: PLC0415 - see above

    gc.freeze()
    gc.enable()
    loaded = load_config(config)
    begin_log(loaded.log_format)
    # Thousands of agents have a connection each; the default limit is often lower.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    sys.setswitchinterval(SWITCH_S)
    with log_crash(), asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(run_daemon(loaded))
    # This folder has the sockets of the planner processes; os._exit does not delete it.
    shutil.rmtree(util.get_temp_dir(), ignore_errors=True)
    # Everything of ours is closed. A planner process that was killed during a request leaves an
    # executor thread that would wait for it forever.
    sys.stderr.flush()
    os._exit(0)


@main.command()
@CONFIG
@click.option(
    "--provider",
    "asks_provider",
    is_flag=True,
    help="Also ask the provider whether instances can be rented as configured.",
)
def check(config: Path, *, asks_provider: bool) -> None:
    """Check the configuration and report its problems."""
    from sailord.config import load_config  # noqa: PLC0415 - see above
    from sailord.own_certificate import check_certificate  # noqa: PLC0415 - see above

    loaded = load_config(config)
    for place in loaded.unread:
        click.echo(f"warning: {place} is no longer read", err=True)
    check_certificate(loaded)
    if asks_provider:
        asyncio.run(_ask_provider(loaded))
    click.echo(f"{config} is valid")


@main.command()
@click.argument("file", type=click.Path(path_type=Path))
@CONFIG
def backup(file: Path, config: Path) -> None:
    """Write a backup of the embedded store to FILE, also while sailord runs.

    To restore it, copy it to store.db in the state folder while no sailord runs.
    """
    from sailord.backup import back_up  # noqa: PLC0415 - see above
    from sailord.config import load_config  # noqa: PLC0415 - see above

    entries = asyncio.run(back_up(load_config(config, reads_secrets=False), file))
    click.echo(f"{file}: {entries} entries")


@main.command("startup-script")
@click.argument("machine")
@CONFIG
def startup_script(machine: str, config: Path) -> None:
    """Print the start-up script of MACHINE, for the template of a group with a queue."""
    from sailord.config import load_config  # noqa: PLC0415 - see above
    from sailord.providers.gce.config import GceConfig  # noqa: PLC0415 - see above
    from sailord.providers.gce.requests import startup_script  # noqa: PLC0415 - see above

    provider = load_config(config, reads_secrets=False).provider
    pools = provider.pools if isinstance(provider, GceConfig) else ()
    fitting = [pool for pool in pools if pool.flex and pool.machine == machine]
    if not isinstance(provider, GceConfig) or not fitting:
        cure = "only [[provider.group]] with flex_start = true needs the script (docs/gce.md)"
        raise InputError(Problem("provider", f'has no flex start of "{machine}"', cure))
    click.echo(startup_script(fitting[0], provider))


async def _ask_provider(config: Config) -> None:
    from sailord.providers.config import open_provider  # noqa: PLC0415 - see above
    from sailord.providers.interface import ProviderError  # noqa: PLC0415 - see above

    if config.provider is None:
        cure = "leave --provider out, or add that table (docs/capacity.md)"
        raise InputError(Problem("provider", "is not configured", cure))
    provider = open_provider(config.provider, config.cluster, time.time)
    try:
        for problem in await provider.check():
            click.echo(f"warning: {problem}", err=True)
    except ProviderError as error:
        raise click.ClickException(f"the provider does not answer: {error}") from None
    finally:
        await provider.close()


if __name__ == "__main__":
    main()
