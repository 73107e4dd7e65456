"""The command ``doctor``: lists the problems of a running cluster, and what to do about them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from sailord.cli.shared.exit_codes import FAILED
from sailord.cli.shared.options import show
from sailord.cli.shared.server import server_command
from sailord.client import Client


@click.command()
@server_command
def doctor(client: Client, as_json: bool) -> None:
    """List the cluster's problems with their cures. Exits with 1 if there are any.

    It also exits with 1 if sailord does not answer.
    """
    status = client.ask("GET", "/v1/status")
    found = status.get("problems")
    if found is None:  # During an upgrade the leader may be older, and lists none itself.
        found = [*_main_problems(status, client.ask("GET", "/v1/nodes")["nodes"])]
    show({"problems": found}, as_json, lambda v: "\n".join(v["problems"]) or "no problems found")
    if found:
        raise SystemExit(FAILED)


def _main_problems(status: dict[str, Any], nodes: list[dict[str, Any]]) -> Iterator[str]:
    if status["leader"] is None:
        yield "no leader is elected; read the log of each sailord"
    if not status["store"]["answers"]:
        yield "the store does not answer; check that it runs and that the leader reaches it"
    job = status["job"]
    if job is not None and job["phase"]["name"] in ("held", "waiting"):
        yield f"{job['id']} is {job['phase']['name']}: {job['phase']['reason']}"
    for node in nodes:
        if node["state"] in ("suspect", "lost") or node["failure"]:
            why = node["failure"] or node["why_lost"]
            yield f"{node['name']} is {node['state']}{f': {why}' if why else ''}"
