"""Commands about the whole cluster: status, capacity and events."""

from __future__ import annotations

import shutil
import sys
import time
from typing import Any

import click

from sailord.cli.shared.options import json_line, show
from sailord.cli.shared.server import ask_about, report_outage, server_command
from sailord.client import Client, Reconnector, ServerProblem, status_path
from sailord.text import cluster_text as text
from sailord.text.capacity_text import capacity_text
from sailord.text.event_lines import EndsOnce, fold, line_text
from sailord.text.printable import printable

WATCH_S = 1.0
COLUMNS_SMALL, LINES_SMALL = 80, 24
"""On a terminal that is smaller, ``status`` cuts its problem short."""


@click.command()
@click.option(
    "-w", "--watch", is_flag=True, help="Stay and redraw; with --json, one line each second."
)
@click.option("--job", help="Of jobs that share the cluster: the one to show, not the first.")
@server_command
def status(client: Client, watch: bool, job: str | None, as_json: bool) -> None:
    """Show the job, its plan and the nodes."""
    if job is not None:
        path = "/v1/status?job={}"
        job, _ = ask_about(client, "job", job, lambda name: client.ask("GET", path.format(name)))
    if not watch:
        answer = client.ask("GET", status_path(job))
        show(answer, as_json, lambda each: text.status_text(each, _small_columns()))
    elif not as_json and _has_screen():
        from sailord.screen.watch import watch as watch_on_screen  # noqa: PLC0415 - see ADR 87

        click.echo(watch_on_screen(client, job))
    else:
        _print_repeatedly(client, job, as_json)


def _small_columns() -> int | None:
    """Return the width of a terminal with few columns or lines; ``None``: of any other output."""
    size = shutil.get_terminal_size()
    is_small = size.columns < COLUMNS_SMALL or size.lines < LINES_SMALL
    return size.columns if is_small and sys.stdout.isatty() else None


def _has_screen() -> bool:
    """Return whether the output is a terminal that can be drawn on."""
    if not sys.stdout.isatty():
        return False
    from sailord.screen.terminal import is_usable  # noqa: PLC0415 - see ADR 87

    return is_usable()


def _print_repeatedly(client: Client, job: str | None, as_json: bool) -> None:
    """Print the status every second, for a pipe or a terminal without cursor keys."""

    def report(problem: ServerProblem) -> None:
        click.echo(json_line({"error": str(problem)}) if as_json else f"error: {problem}")
        sys.stdout.flush()

    reconnector = Reconnector(report)
    while True:
        value = reconnector.insist(lambda: client.ask("GET", status_path(job)))
        click.echo(json_line(value) if as_json else printable(text.status_text(value)))
        sys.stdout.flush()
        time.sleep(WATCH_S)


@click.command()
@click.option("--retry", is_flag=True, help="Rent again from pools that were stopped.")
@server_command
def capacity(client: Client, retry: bool, as_json: bool) -> None:
    """Show rented instances per pool, refused requests, quotas and cost."""
    method, path = ("POST", "/v1/capacity/retry") if retry else ("GET", "/v1/capacity")
    show(client.ask(method, path), as_json, capacity_text)


@click.command()
@click.option("-f", "--follow", is_flag=True, help="Keep printing new events, one line each.")
@click.option("--all", "is_whole", is_flag=True, help="Each step of a reconfiguration, too.")
@server_command
def events(client: Client, follow: bool, is_whole: bool, as_json: bool) -> None:
    """Print recent events of the whole cluster.

    A reconfiguration is one line, and what repeats is shown once; --json prints every event.
    """
    line_of = json_line if as_json else text.event_text
    reconnector = Reconnector(report_outage)

    def ask() -> Any:
        return client.ask("GET", "/v1/events?follow=false")

    found = (reconnector.insist(ask) if follow else ask())["events"]
    is_whole |= as_json
    for line in map(line_of, found) if is_whole else map(line_text, fold(found)):
        click.echo(line if as_json else printable(line))
    if follow:
        sys.stdout.flush()
        ends = EndsOnce()
        for event in found:
            ends.is_second(event)
        for event in client.follow(found[-1]["id"] if found else 0, reconnector):
            if is_whole or not (event.get("is_detail") or ends.is_second(event)):
                line = line_of(event)
                click.echo(line if as_json else printable(line))
                sys.stdout.flush()
