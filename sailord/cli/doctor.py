"""The command ``doctor``: lists the problems of a running cluster, and what to do about them."""

from __future__ import annotations

import click

from sailord.cli.exit_codes import FAILED
from sailord.cli.options import show
from sailord.cli.server import server_command
from sailord.client import Client

OLDER = "this sailord is older than sailorctl and lists no problems; upgrade it, or see `status`"


@click.command()
@server_command
def doctor(client: Client, as_json: bool) -> None:
    """List the cluster's problems with their cures. Exits with 1 if there are any."""
    found = client.ask("GET", "/v1/status").get("problems", [OLDER])
    show({"problems": found}, as_json, lambda v: "\n".join(v["problems"]) or "no problems found")
    if found:
        raise SystemExit(FAILED)
