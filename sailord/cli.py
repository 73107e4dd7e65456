"""The command line ``sailorctl``."""

from __future__ import annotations

from importlib.metadata import version

import click


@click.group()
@click.version_option(version("sailor"), prog_name="sailorctl")
def main() -> None:
    """Plan, simulate and run a training job on whatever GPUs can be had."""
