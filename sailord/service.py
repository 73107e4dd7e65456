"""The command ``sailord``: runs the controller in the foreground, as systemd wants it.

Exit codes: 0 it was told to end; 1 it failed and may be started again; 2 its configuration
cannot be used.
"""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from pathlib import Path

import click

from sailord.config import load_config
from sailord.console import Group
from sailord.daemon import run_daemon
from sailord.logs import begin_log

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
    loaded = load_config(config)
    begin_log(loaded.log_format)
    asyncio.run(run_daemon(loaded))


@main.command()
@CONFIG
def check(config: Path) -> None:
    """Read the configuration, and say what is wrong with it."""
    load_config(config)
    click.echo(f"{config} can be used")


if __name__ == "__main__":
    main()
