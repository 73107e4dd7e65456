"""Commands about the whole cluster: status, capacity and events."""

from __future__ import annotations

import sys
import time
from typing import Any

import click

from sailord.cli.options import json_line, show
from sailord.cli.server import report_outage, server_command
from sailord.client import Client, Patience, ServerProblem
from sailord.text import cluster_text as text
from sailord.text.capacity_text import capacity_text

WATCH_S = 1.0


@click.command()
@click.option(
    "-w", "--watch", is_flag=True, help="Repeat every second; with --json, one line each time."
)
@server_command
def status(client: Client, watch: bool, as_json: bool) -> None:
    """Show the job, its plan and the nodes."""
    if not watch:
        show(client.ask("GET", "/v1/status"), as_json, text.status_text)
        return

    def redraw(screen: str) -> None:
        if not as_json:
            click.clear()
        click.echo(screen)
        sys.stdout.flush()

    def report(problem: ServerProblem) -> None:
        redraw(json_line({"error": str(problem)}) if as_json else f"error: {problem}")

    patience = Patience(report)
    while True:
        value = patience.insist(lambda: client.ask("GET", "/v1/status"))
        redraw(json_line(value) if as_json else text.status_text(value))
        time.sleep(WATCH_S)


@click.command()
@click.option("--retry", is_flag=True, help="Rent again from pools that were stopped.")
@server_command
def capacity(client: Client, retry: bool, as_json: bool) -> None:
    """Show rented instances per pool, refused requests, quotas and cost."""
    method, path = ("POST", "/v1/capacity/retry") if retry else ("GET", "/v1/capacity")
    show(client.ask(method, path), as_json, capacity_text)


@click.command()
@click.option("-f", "--follow", is_flag=True, help="Keep printing new events.")
@server_command
def events(client: Client, follow: bool, as_json: bool) -> None:
    """Print recent events of the whole cluster."""
    line_of = json_line if as_json else text.event_text
    patience = Patience(report_outage)

    def ask() -> Any:
        return client.ask("GET", "/v1/events?follow=false")

    found = (patience.insist(ask) if follow else ask())["events"]
    for event in found:
        click.echo(line_of(event))
    if follow:
        sys.stdout.flush()
        for event in client.follow(found[-1]["id"] if found else 0, patience):
            click.echo(line_of(event))
            sys.stdout.flush()
