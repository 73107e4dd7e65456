"""The command ``doctor``: lists the problems of a running cluster, and what to do about them."""

from __future__ import annotations

import click

from sailord.cli.shared.exit_codes import FAILED
from sailord.cli.shared.options import show
from sailord.cli.shared.server import server_command
from sailord.client import Client
from sailord.text.problem_text import doctor_text


@click.command()
@server_command
def doctor(client: Client, as_json: bool) -> None:
    """List the cluster's problems with their cures. Exits with 1 if there are any.

    It also exits with 1 if sailord does not answer.
    """
    status = client.ask("GET", "/v1/status")
    keys = ("problems", "problems_since", "receivers")
    found = {key: status[key] for key in keys if key in status}
    show(found, as_json, lambda _: doctor_text(status))
    if found["problems"]:
        raise SystemExit(FAILED)
