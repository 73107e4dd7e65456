"""Commands about jobs: list, submit, explain, pause, resume, cancel."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import click

from sailord.cli.options import FILE, show
from sailord.cli.server import job_question, order_command, question, server_command
from sailord.client import Client, ServerProblem
from sailord.text import cluster_text as text
from simulator.documents.files import read_bytes
from simulator.documents.problems import InputError, Problem


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

    FILE is a job file, self-contained except for its data (docs/formats.md), or a Python script
    that calls sailor.Trainer(...).train(). Data files and scripts are read on the nodes.
    """
    spec = _described(job) if job.suffix == ".py" else _read(job)
    given = {"id": id_, "resume": resume}
    body = {"job": spec, "priority": priority, **{k: v for k, v in given.items() if v is not None}}
    try:
        queued = client.ask("POST", "/v1/jobs", body)
    except ServerProblem as problem:
        raise problem.about("job", str(job)) from None
    show(queued, as_json, lambda v: f"{v['id']} is queued")
    for warning in queued["warnings"]:
        click.echo(f"warning: {warning}", err=True)


def _read(job: Path) -> str:
    try:
        return read_bytes(job, name=str(job)).decode()
    except UnicodeDecodeError:
        raise InputError(Problem(str(job), "is not UTF-8")) from None


def _described(script: Path) -> str:
    """Run a script up to its ``train()`` in a process of its own, and return its job."""
    if importlib.util.find_spec("torch") is None:
        what = "is a script, and torch is not installed here to describe its model"
        raise InputError(Problem(str(script), what, "submit it where torch is installed"))
    words = [sys.executable, "-m", "worker", "describe", str(script)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = done.stderr.strip().rpartition("\n")[2].removeprefix("error: ")
        raise InputError(Problem("", last or f"describing {script} failed"))
    for line in done.stderr.splitlines():
        if line.startswith("note: "):
            click.echo(line, err=True)
    return done.stdout


jobs = question("jobs", lambda v: text.jobs_text(v["jobs"]), "List all jobs.")
history = job_question(
    "history", text.history_text, "Show a job's state transitions, each with its reason."
)
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
