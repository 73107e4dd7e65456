"""The command ``profile network``: has the agents measure the links between them."""

from __future__ import annotations

import json
import time
from pathlib import Path

import click

from sailord.cli.shared.options import FILE, show
from sailord.cli.shared.server import server_command
from sailord.client import Client, ServerProblem
from sailord.text.network_text import network_text
from sailord.text.units import counted

LOOK_S = 1.0


@click.command("network")
@click.option("--show", "is_shown", is_flag=True, help="Measure nothing; show what is known.")
@click.option("--out", type=FILE, help="Write the links to this file, for --profiles of `plan`.")
@server_command
def network(client: Client, is_shown: bool, out: Path | None, as_json: bool) -> None:
    """Measure the links between the cluster's nodes.

    Agents send each other messages of 1 KiB to 64 MiB between each two zones and kinds of GPU, one
    way and both ways. sailord plans with the result. Nodes that carry other traffic, a job's for
    example, are left out and tried again; after Ctrl-C the round goes on.
    """
    unmeasured = 0
    if not is_shown:
        left = None
        view = client.ask("POST", "/v1/network")
        while view["is_measuring"]:
            if not as_json and view["open"] != left:
                left = view["open"]
                click.echo(f"{counted(left, 'curve')} to measure", err=True)
            time.sleep(LOOK_S)
            view = client.ask("GET", "/v1/network")
        unmeasured = view["unmeasured"]
    view = client.ask("GET", "/v1/network")
    if out is not None:
        document = client.ask("GET", "/v1/network/file")
        if not document["curves"]:
            raise ServerProblem(f"no link was measured, so {out} was not written")
        out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    show(view, as_json, network_text)
    if unmeasured:
        what = "its nodes were busy or did not answer within 15 minutes"
        raise ServerProblem(f"{counted(unmeasured, 'curve')} could not be measured: {what}")
