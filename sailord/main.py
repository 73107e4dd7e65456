"""The command ``sailord``: runs the controller in the foreground, as systemd wants it.

Exit codes: 0 it was told to end; 1 it failed and may be started again, or the provider could not
be asked; 2 its configuration cannot be used.

The planner's processes import this module anew, so that it imports little before it is told what
to do.
"""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import shutil
import sys
import time
from importlib.metadata import version
from multiprocessing import util
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sailord.cli.errors import Group
from simulator.documents.problems import InputError, Problem

if TYPE_CHECKING:
    from sailord.config import Config

SWITCH_S = 0.0005
"""How long a thread that reads what the store answered may keep the loop waiting; with Python's
own 5 ms the slowest decisions among 2,000 nodes took a sixth longer, side by side once."""
CONFIG = click.option(
    "--config",
    type=click.Path(path_type=Path),
    default=Path("/etc/sailor/sailord.toml"),
    show_default=True,
    help="The configuration file (docs/operations.md).",
)


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("sailor"), prog_name="sailord")
def main() -> None:
    """Keep one training job running on whatever GPUs can be had."""


@main.command()
@CONFIG
def run(config: Path) -> None:
    """Run the controller until SIGTERM."""
    # What is read once and kept is no garbage: to look through it takes a tenth of the start.
    gc.disable()
    from agents.daemon.logs import begin_log, log_crash  # noqa: PLC0415 - see above
    from sailord.config import load_config  # noqa: PLC0415 - see above
    from sailord.controller.fair_event_loop import new_loop  # noqa: PLC0415 - see above
    from sailord.daemon import run_daemon  # noqa: PLC0415 - see above

    gc.freeze()
    gc.enable()
    loaded = load_config(config)
    begin_log(loaded.log_format)
    # Thousands of agents hold a connection each; a shell's own limit is often lower.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    sys.setswitchinterval(SWITCH_S)
    with log_crash(), asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(run_daemon(loaded))
    # What Python's own end would do; a planner's processes listen there.
    shutil.rmtree(util.get_temp_dir(), ignore_errors=True)
    # Everything of ours is closed. A planner's process that was killed in the middle of a
    # question leaves a thread of Python's behind that waits for it for ever.
    sys.stderr.flush()
    os._exit(0)


@main.command()
@CONFIG
@click.option(
    "--provider",
    "asks_provider",
    is_flag=True,
    help="Have the provider say, too, whether machines could be rented as the file wants.",
)
def check(config: Path, *, asks_provider: bool) -> None:
    """Read the configuration, and say what is wrong with it."""
    from sailord.config import load_config  # noqa: PLC0415 - see above

    loaded = load_config(config)
    if asks_provider:
        asyncio.run(_ask_provider(loaded))
    click.echo(f"{config} can be used")


async def _ask_provider(config: Config) -> None:
    from sailord.providers.config import open_provider  # noqa: PLC0415 - see above
    from sailord.providers.interface import ProviderError  # noqa: PLC0415 - see above

    if config.provider is None:
        cure = "leave --provider out, or write that table (docs/capacity.md)"
        raise InputError(Problem("provider", "is not in the file", cure))
    provider = open_provider(config.provider, config.cluster, time.time)
    try:
        for problem in await provider.check():
            click.echo(f"warning: {problem}", err=True)
    except ProviderError as error:
        raise click.ClickException(f"the provider cannot be asked now: {error}") from None
    finally:
        await provider.close()


if __name__ == "__main__":
    main()
