"""Commands about jobs: list, explain, pause, resume, cancel."""

from __future__ import annotations

from typing import Any

import click

from sailord.cli.shared.options import FiniteRange, show
from sailord.cli.shared.server import (
    ask_about,
    job_question,
    order_command,
    order_options,
    ordered_text,
    question,
    server_command,
)
from sailord.client import Client
from sailord.text import cluster_text as text
from sailord.text.schedule_text import schedule_text
from sailord.text.units import dollars

jobs = question("jobs", lambda v: text.jobs_text(v["jobs"]), "List all jobs.")


@click.command()
@click.argument("job", required=False)
@click.option("--all", "is_whole", is_flag=True, help="Each step of a reconfiguration, too.")
@server_command
def history(client: Client, job: str | None, is_whole: bool, as_json: bool) -> None:
    """Show a job's state transitions, each with its reason.

    A reconfiguration is one line. Default JOB: the active one.
    """
    path = "/v1/jobs/{}/history"
    _, answer = ask_about(client, "job", job, lambda name: client.ask("GET", path.format(name)))
    show(answer, as_json, lambda value: text.history_text(value, is_whole=is_whole))


moves = job_question(
    "moves",
    text.moves_text,
    "Show how long each reconfiguration took, measured and predicted.",
)
timeline = job_question(
    "timeline",
    schedule_text,
    "Show one step of the plan, pass by pass, as predicted and as measured.",
)
why = job_question("why", text.why_text, "Explain a job's state, its generation and its plan.")
pause = order_command(
    "job", "pause", "Pause a job at the end of its step; the next queued job gets the cluster."
)
resume = order_command("job", "resume", "Resume a job that is paused or held.")


@click.command(context_settings={"ignore_unknown_options": True})  # `-5` is no option.
@click.argument("job")
@click.argument("usd", type=FiniteRange(0.0, min_open=True))
@order_options
@server_command
def budget(client: Client, job: str, usd: float, order: dict[str, Any], as_json: bool) -> None:
    """Set the most that a job may cost in all, with what it has cost so far.

    It replaces max_usd_total of its job file. A job that is held as its budget is spent goes on
    with `sailorctl resume` after that.
    """
    body = {**order, "max_usd_total": usd}
    path = "/v1/jobs/{}/budget"
    full, answer = ask_about(
        client, "job", job, lambda each: client.order(path.format(each), body), is_order=True
    )
    show(answer, as_json, lambda _: f"budget {full}: ordered, at most {dollars(usd)} in all")


@click.command(context_settings={"ignore_unknown_options": True})  # `-5` is no option.
@click.argument("job")
@click.argument("number", type=int)
@order_options
@server_command
def priority(client: Client, job: str, number: int, order: dict[str, Any], as_json: bool) -> None:
    """Set a job's priority in the queue.

    Of the queued jobs the one with the highest NUMBER runs first. The job that has the cluster
    keeps it; pause it to let the next one run. Where jobs share the cluster, those with the lowest
    yield first if there are too few nodes.
    """
    body = {**order, "priority": number}
    path = "/v1/jobs/{}/priority"
    full, answer = ask_about(
        client, "job", job, lambda each: client.order(path.format(each), body), is_order=True
    )
    show(answer, as_json, lambda value: ordered_text(f"priority {full} {number}", value))


cancel = order_command("job", "cancel", "End a job for good; its checkpoints stay in storage.")
