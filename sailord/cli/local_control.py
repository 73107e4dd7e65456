"""The commands ``local ...``: add and kill nodes of ``sailorctl up``, and change its links."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from sailord.cli.shared.exit_codes import FAILED
from sailord.cli.shared.options import FILE, FiniteRange
from sailord.client import ServerProblem, default_folder
from sailord.local.control_client import CONTROL_SOCKET, ask
from simulator.documents.problems import InputError, Problem

FOLDER = click.option("--folder", type=FILE, help="Folder of the cluster's files.")


@click.group()
def local() -> None:
    """Add and kill nodes of `sailorctl up`, and change its links."""


@local.command()
@click.argument("machine", metavar="KIND@ZONE")
@FOLDER
def add(machine: str, folder: Path | None) -> None:
    """Add a node: KIND is large or small, ZONE is zone-a, zone-b or zone-c."""
    kind, at, zone = machine.partition("@")
    if not at:
        raise InputError(Problem(machine, "is not KIND@ZONE", "for example large@zone-a"))
    _ask(folder, {"ask": "add", "kind": kind, "zone": zone})


@local.command("kill")
@click.argument("node")
@FOLDER
def kill_(node: str, folder: Path | None) -> None:
    """Kill a node without notice, with all its processes."""
    _ask(folder, {"ask": "kill", "node": node})


@local.command()
@click.argument("one", metavar="ZONE")
@click.argument("other", metavar="ZONE")
@click.option("--delay-ms", type=FiniteRange(0.0, 10_000.0), default=0.0, help="One way.")
@click.option("--mbit-per-s", type=FiniteRange(0.001, 1e6), help="Rate; default: unlimited.")
@click.option("--down", is_flag=True, help="Carry nothing.")
@FOLDER
def link(
    one: str,
    other: str,
    delay_ms: float,
    mbit_per_s: float | None,
    down: bool,
    folder: Path | None,
) -> None:
    """Set the link between two zones of `up --zones`, both ways."""
    asked = {"one": one, "other": other, "delay_ms": delay_ms, "mbit_per_s": mbit_per_s}
    _ask(folder, {"ask": "link", **asked, "is_down": down})


def _ask(folder: Path | None, asked: dict[str, Any]) -> None:
    try:
        click.echo(ask((folder or default_folder()).absolute() / CONTROL_SOCKET, asked))
    except ServerProblem as problem:
        click.echo(f"error: {problem}", err=True)
        raise SystemExit(FAILED) from None
