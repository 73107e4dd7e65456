"""Commands about jobs: list, submit, explain, pause, resume, cancel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from sailord.cli.options import FILE, show
from sailord.cli.server import about_job, order_options, server_command
from sailord.client import Client, ServerProblem, part
from sailord.text import cluster_text as text
from simulator.documents.files import read_bytes
from simulator.documents.problems import InputError, Problem


@click.command()
@server_command
def jobs(client: Client, as_json: bool) -> None:
    """List all jobs."""
    show(client.ask("GET", "/v1/jobs"), as_json, lambda v: text.jobs_text(v["jobs"]))


@click.command()
@click.argument("job", metavar="FILE", type=FILE)
@click.option("--id", "id_", metavar="NAME", help="The job's name; default: a generated one.")
@click.option("--priority", type=int, default=0, show_default=True, help="Higher runs first.")
@click.option(
    "--resume", metavar="STEP", help='Start from the checkpoint of this step, or "newest".'
)
@server_command
def submit(
    client: Client, job: Path, id_: str | None, priority: int, resume: str | None, as_json: bool
) -> None:
    """Queue the job of FILE.

    FILE must be self-contained except for its data (docs/formats.md). Data files are read on the
    nodes.
    """
    try:
        spec = read_bytes(job, name=str(job)).decode()
    except UnicodeDecodeError:
        raise InputError(Problem(str(job), "is not UTF-8")) from None
    given = {"id": id_, "resume": resume}
    body = {"job": spec, "priority": priority, **{k: v for k, v in given.items() if v is not None}}
    try:
        queued = client.ask("POST", "/v1/jobs", body)
    except ServerProblem as problem:
        raise problem.about("job", str(job)) from None
    show(queued, as_json, lambda v: f"{v['id']} is queued")
    for warning in queued["warnings"]:
        click.echo(f"warning: {warning}", err=True)


@click.command()
@click.argument("job", required=False)
@server_command
def history(client: Client, job: str | None, as_json: bool) -> None:
    """Show a job's state transitions, each with its reason.

    Default JOB: the active one.
    """
    show(about_job(client, job, "history"), as_json, text.history_text)


@click.command()
@click.argument("job", required=False)
@server_command
def moves(client: Client, job: str | None, as_json: bool) -> None:
    """Show how long each reconfiguration took, measured and predicted.

    Default JOB: the active one.
    """
    show(about_job(client, job, "moves"), as_json, lambda v: text.moves_text(v["moves"]))


@click.command()
@click.argument("job", required=False)
@server_command
def why(client: Client, job: str | None, as_json: bool) -> None:
    """Explain a job's state, its generation and its plan.

    Default JOB: the active one.
    """
    show(about_job(client, job, "why"), as_json, text.why_text)


def _order_command(order_name: str, about: str) -> click.Command:
    @click.command(order_name, help=about)
    @click.argument("job")
    @order_options
    @server_command
    def command(client: Client, job: str, order: dict[str, Any], as_json: bool) -> None:
        answer = client.ask("POST", f"/v1/jobs/{part(job)}/{order_name}", order)
        show(answer, as_json, lambda _: f"{order_name} {job}: ordered")

    return command


pause = _order_command(
    "pause", "Pause a job at the end of its step; the next queued job gets the cluster."
)
resume = _order_command("resume", "Resume a job that is paused or held.")
cancel = _order_command("cancel", "End a job for good; its checkpoints stay in storage.")
