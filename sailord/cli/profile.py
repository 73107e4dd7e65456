"""The commands ``profile ...``: measure a model's layers and a cluster's links."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import click

from sailord.cli.profile_network import network
from sailord.cli.shared.child_process import expect_success
from sailord.cli.shared.options import FILE
from simulator.documents.problems import InputError, Problem


@click.group()
def profile() -> None:
    """Measure a model's layers and a cluster's links."""


@profile.command()
@click.argument("job", type=FILE)
@click.option("--tp", metavar="LIST", help="TP degrees, such as 1,2; default: up to max_tp.")
@click.option(
    "--micro-batches", metavar="LIST", help="Such as 1,2,4; default: powers of two that fit."
)
@click.option(
    "--out",
    type=FILE,
    metavar="DIR",
    default=Path("profiles"),
    show_default=True,
    help="Folder of profiles; a file there is merged with.",
)
@click.option("--name", help="Of the profile; default: the job's [model] profile, or its model.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Default: a GPU if any.")
@click.option("--kind", help="GPU kind to measure for, if its name does not say it.")
@click.option("--catalogue", type=FILE, metavar="FILE", help="Your own facts of GPUs.")
@click.option(
    "--budget",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="For all rounds; default: 100.",
)
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    help="CPU threads, as many as a worker has; default: torch's.",
)
@click.option("--force", is_flag=True, help="Measure although the device is in use.")
@click.argument("arguments", nargs=-1)
def model(job: Path, arguments: tuple[str, ...], **options: Any) -> None:
    """Measure the layers of JOB on one device of this machine.

    JOB is a job file or a script; ARGUMENTS, after --, are those of a script. Run it once on a
    machine of each GPU kind, with the same --out: what is measured is added to the file there.
    """
    if importlib.util.find_spec("torch") is None:
        what = "needs torch, which is not installed here, to compute its layers"
        raise InputError(Problem(str(job), what, "run it on a node that trains"))
    words = [sys.executable, "-P", "-m", "worker", "profile"]
    for name, value in options.items():
        if value is True:
            words.append(f"--{name}")
        elif value is not None and value is not False:
            words += [f"--{name.replace('_', '-')}", str(value)]
    done = subprocess.run([*words, "--", str(job), *arguments], check=False)
    expect_success(done.returncode)


profile.add_command(network)
