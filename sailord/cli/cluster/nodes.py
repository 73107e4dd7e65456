"""Commands about nodes: list, logs, drain, cordon, preemption notices."""

from __future__ import annotations

import sys
import time
from typing import Any
from urllib.parse import unquote

import click

from sailord.cli.shared.options import FiniteRange, json_line, show
from sailord.cli.shared.server import (
    ask_about,
    order_command,
    order_options,
    report_outage,
    server_command,
)
from sailord.client import Client, Reconnector
from sailord.text.log_text import log_text, whole_lines
from sailord.text.node_text import node_text, nodes_text
from sailord.text.pools_text import cluster_file_text
from sailord.text.printable import printable
from sailord.text.units import counted, duration
from simulator.documents.problems import InputError, Problem

FOLLOW_S = 1.0


@click.command()
@click.argument("node", required=False)
@click.option("--as-cluster", is_flag=True, help="Print a cluster file of the usable nodes.")
@server_command
def nodes(client: Client, node: str | None, as_cluster: bool, as_json: bool) -> None:
    """List all nodes, or show one: what would its loss cost?

    What would other nodes bring? `sailorctl nodes --as-cluster > now.toml`, change the counts, and
    `sailorctl plan JOB now.toml`. Where zones are your own, as of `sailorctl up`, the file
    says what to add to it.
    """
    if as_cluster and (node is not None or as_json):
        raise click.UsageError("--as-cluster prints all nodes, as TOML.")
    if as_cluster:
        click.echo(cluster_file_text(client.ask("GET", "/v1/nodes")["nodes"], *_known_places()))
    elif node is None:
        show(client.ask("GET", "/v1/nodes"), as_json, lambda v: nodes_text(v["nodes"]))
    else:
        path = "/v1/nodes/{}"
        _, found = ask_about(client, "node", node, lambda n: client.ask("GET", path.format(n)))
        show(found, as_json, lambda v: "\n\n".join(map(node_text, v["nodes"])))


def _known_places() -> tuple[dict[str, int], frozenset[str]]:
    """The GPUs of each machine type of the catalogue, and its zones."""
    from simulator.hardware.catalogue import load_catalogue  # noqa: PLC0415 - read for a file only

    catalogue = load_catalogue()
    sizes = {name: machine.gpus for name, machine in catalogue.machines.items()}
    return sizes, frozenset(catalogue.zones)


@click.command()
@click.argument("node")
@click.option("--rank", type=click.IntRange(0, 99_999), metavar="N", help="Only this rank.")
@click.option("--setup", "is_setup", is_flag=True, help="The job's setup commands instead.")
@click.option("--ended", "is_ended", is_flag=True, help="Those of workers that have ended.")
@click.option("-f", "--follow", is_flag=True, help="Keep printing new lines.")
@server_command
def logs(
    client: Client,
    node: str,
    rank: int | None,
    is_setup: bool,
    is_ended: bool,
    follow: bool,
    as_json: bool,
) -> None:
    """Show the last output of a node's workers.

    A step is one line; --json has the output as it was written.
    """
    if is_ended and (is_setup or follow or rank is not None):
        raise click.UsageError("--ended shows all that is kept, without --rank, --setup and -f.")
    which = "setup" if is_setup else "ended" if is_ended else ""
    mark, rest, reconnector = "", "", Reconnector(report_outage)

    def ask() -> tuple[str, str, int]:
        nonlocal node
        node, found = ask_about(client, "node", node, ask_log)
        return found

    def ask_log(name: str) -> tuple[str, str, int]:
        return client.log(unquote(name), rank, mark, which)

    while True:
        fresh, mark, ended = reconnector.insist(ask) if follow else ask()
        if is_ended and not ended:
            what = "is older than this command, and shows no logs of ended workers"
            raise InputError(Problem("sailord", what, "upgrade it"))
        if as_json:
            click.echo(json_line({"node": node, "text": fresh}) + "\n" if fresh else "", nl=False)
        else:
            lines, rest = whole_lines(rest + fresh) if follow else (fresh, "")
            click.echo(printable(log_text(lines)), nl=False)
        if not follow:
            if ended and not which and not as_json:
                said = f"logs of {counted(ended, 'worker')} that ended before are kept there"
                click.echo(f"{said}: sailorctl logs {node} --ended", err=True)
            return
        sys.stdout.flush()
        if not fresh:
            time.sleep(FOLLOW_S)


drain = order_command(
    "node",
    "drain",
    "Move the job off a node without losing a step.\n\n"
    "`nodes` says when the node is safe to stop; `withdraw` cancels the drain.",
)
cordon = order_command(
    "node",
    "cordon",
    "Exclude a node from new plans; what runs on it continues.\n\n"
    "A better plan moves the job off it, one after a loss may keep it; `drain` moves it now.",
)
uncordon = order_command("node", "uncordon", "Allow a node in new plans again.")
withdraw = order_command(
    "node", "withdraw", "Cancel a drain or a preemption notice: the node stays."
)


@click.command()
@click.argument("node")
@click.option(
    "--notice", "notice_s", type=FiniteRange(0.0, 86_400.0), help="Seconds until the node ends."
)
@order_options
@server_command
def preempt(
    client: Client, node: str, notice_s: float | None, order: dict[str, Any], as_json: bool
) -> None:
    """Announce that a node will be preempted, as a cloud's notice would.

    The job moves off it in time; `withdraw` cancels the notice.
    """
    body, text_of = dict(order), " will be preempted"
    if notice_s is not None:
        body["notice_s"] = notice_s
        text_of += f" in {duration(notice_s)}"
    full, answer = ask_about(
        client,
        "node",
        node,
        lambda name: client.order(f"/v1/nodes/{name}/preempt", body),
        is_order=True,
    )
    then = f"; {said}" if (said := answer.get("then")) else ""
    show(answer, as_json, lambda _: f"{full}{text_of}{then}")
