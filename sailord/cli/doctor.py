"""The command ``doctor``: finds problems of a running cluster, and says what to do about them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from sailord.cli.exit_codes import FAILED
from sailord.cli.options import show
from sailord.cli.server import server_command
from sailord.client import Client
from sailord.text import cluster_text as text
from sailord.text.capacity_text import capacity_problems
from sailord.text.units import duration

REFUSALS_MANY = 10
"""Refused requests within an hour that are reported; fewer may be typing errors."""
OVERDUE_S = 60.0
"""Report a node that is still up so long after its notice ran out."""


@click.command()
@server_command
def doctor(client: Client, as_json: bool) -> None:
    """List the cluster's problems with their cures. Exits with 1 if there are any."""
    status, nodes = client.ask("GET", "/v1/status"), client.ask("GET", "/v1/nodes")["nodes"]
    found = [*_cluster_problems(status), *_node_problems(nodes, status["at"])]
    found += [f"webhook receiver does not answer: {each}" for each in status["unheard"]]
    found += [f"cannot be read: {each}" for each in text.unreadable_lines(status)]
    refused = text.refused_line(status)
    if refused and status["refusals"]["last_hour"] >= REFUSALS_MANY:
        found.append(f"refused: {refused}; see sailor_requests_refused_total, and docs/security.md")
    found += capacity_problems(status["capacity"])
    if not status["nodes"]:
        found.append("there is no node; start sailor-agent on one")
    show({"problems": found}, as_json, lambda v: "\n".join(v["problems"]) or "no problems found")
    if found:
        raise SystemExit(FAILED)


def _cluster_problems(status: dict[str, Any]) -> Iterator[str]:
    store, job = status["store"], status["job"]
    if not store["answers"]:
        trouble = f" ({store['trouble']})" if store["trouble"] else ""
        cure = "check that it runs and that the leader reaches it"
        yield f"the store does not answer{trouble}; {cure}"
    elif store["trouble"]:
        yield f"the store rejects writes and blocks the controller: {store['trouble']}"
    if status["leader"] is None:
        yield "no leader is elected; read the log of each sailord"
    if job is None:
        return
    if job["state"] == "held":
        cure = text.cure_of_hold(job["id"], job["spent"])
        yield f"{job['id']} is held: {job['phase']['reason']}; {cure}"
    elif job["phase"]["name"] == "waiting":
        yield f"{job['id']} waits: {job['phase']['reason']}"
    if job["storage_trouble"]:
        yield f"checkpoints fail: {job['storage_trouble']}"


def _node_problems(nodes: list[dict[str, Any]], now: float) -> Iterator[str]:
    for node in nodes:
        if node["state"] in ("suspect", "lost") or node["failure"]:
            why = node["failure"] or node["why_lost"]
            failure = f": {why}" if why else ""
            yield f"{node['name']} is {node['state']}{failure}"
    present = [node for node in nodes if node["state"] != "lost"]
    yield from (
        f"{node['name']} is not used: {node['unsound']}" for node in nodes if node["unsound"]
    )
    yield from (f"{node['name']}: {node['trouble']}" for node in present if node["trouble"])
    for node in present:
        overdue_s = 0.0 if node["leaves_at"] is None else now - node["leaves_at"]
        if overdue_s > OVERDUE_S:
            yield (
                f"{node['name']} is still up {duration(overdue_s)} after its notice ran out; "
                f"sailorctl withdraw {node['name']} lets plans use it again"
            )
