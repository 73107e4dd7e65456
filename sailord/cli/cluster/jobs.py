"""Commands about jobs: list, explain, pause, resume, cancel."""

from __future__ import annotations

import click

from sailord.cli.shared.options import show
from sailord.cli.shared.server import (
    ask_about,
    job_question,
    order_command,
    question,
    server_command,
)
from sailord.client import Client
from sailord.text import cluster_text as text

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
    lambda v: text.moves_text(v["moves"]),
    "Show how long each reconfiguration took, measured and predicted.",
)
why = job_question("why", text.why_text, "Explain a job's state, its generation and its plan.")
pause = order_command(
    "job", "pause", "Pause a job at the end of its step; the next queued job gets the cluster."
)
resume = order_command("job", "resume", "Resume a job that is paused or held.")
cancel = order_command("job", "cancel", "End a job for good; its checkpoints stay in storage.")
