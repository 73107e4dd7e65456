"""The command ``submit``: queues the job of a file or a script."""

from __future__ import annotations

import re
import uuid
from pathlib import Path

import click

from sailord.cli.shared.described_job import JobFile, takes_script
from sailord.cli.shared.options import FILE, FiniteRange, show
from sailord.cli.shared.server import server_command
from sailord.client import Client, ServerProblem, part
from sailord.text import cluster_text as text
from simulator.documents.files import parse_document
from simulator.documents.problems import InputError

_NAME_MAX = 60


@click.command()
@click.argument("job", metavar="FILE", type=FILE)
@click.option(
    "--id",
    "id_",
    metavar="NAME",
    help="The job's name; default: the name that FILE gives, or its file name, and six hex digits.",
)
@click.option("--priority", type=int, default=0, show_default=True, help="Higher runs first.")
@click.option(
    "--weight",
    type=FiniteRange(0.001, 1000.0),
    help="How large its part is beside other jobs that share the cluster; default: 1.",
)
@click.option(
    "--resume", metavar="STEP", help='Start from the checkpoint of this step, or "newest".'
)
@takes_script
@click.option(
    "--setup", metavar="COMMAND", multiple=True, help="Run once on each node, in the folder."
)
@click.option(
    "--secret", metavar="NAME", multiple=True, help="A variable whose value the nodes have."
)
@click.option(
    "--mount",
    metavar="NAME=WHERE",
    multiple=True,
    help="Data: a link NAME in the folder, to a path on the nodes or a copy of a bucket's folder.",
)
@click.option(
    "--checkpoint",
    metavar="URI",
    help="Where a script's checkpoints go: a shared folder or bucket.",
)
@click.option(
    "--allow",
    type=click.Choice(("interleaved", "micro-batch-per-pipeline")),
    multiple=True,
    help="interleaved: a script's ranks may hold several chunks of layers in turn."
    " micro-batch-per-pipeline: its pipelines may have a micro batch size of their own.",
)
@server_command
def submit(
    client: Client,
    job: JobFile,
    id_: str | None,
    priority: int,
    weight: float | None,
    resume: str | None,
    setup: tuple[str, ...],
    secret: tuple[str, ...],
    mount: tuple[str, ...],
    checkpoint: str | None,
    allow: tuple[str, ...],
    as_json: bool,
) -> None:
    """Queue the job of FILE.

    FILE is a job file, self-contained except for its data and model (docs/formats.md; a small one
    is examples/small.toml), or a script that calls sailor.Trainer(...).train(), with its ARGUMENTS
    after --. The script's folder is packed, except for what .gitignore names, and runs on the
    nodes from there. Data files are read on the nodes.
    """
    names = "ARGUMENTS, --workdir, --setup, --secret, --mount, --checkpoint and --allow"
    cure = "leave them out, and write what they say into the file"
    job.refuse_options(names, setup, secret, mount, checkpoint, allow, cure=cure)
    if job.is_script:
        from sailord.cli.submit.scripts import (  # noqa: PLC0415 - a job file needs none of it
            ScriptOptions,
            submitted_script,
        )

        options = ScriptOptions(setup, secret, mount, checkpoint, allow)
        spec = submitted_script(client, job, options)
    else:
        spec = job.text()
    given = {"id": id_ or _generated_id(spec, job.path), "resume": resume, "weight": weight}
    body = {"job": spec, "priority": priority, **{k: v for k, v in given.items() if v is not None}}
    try:
        queued = client.order("/v1/jobs", body)
    except ServerProblem as problem:
        if problem.status != 409 or not problem.is_repeated:
            raise problem.about("job", str(job.path)) from None
        if id_ is not None:
            what = f"the first answer was lost, and job {id_} exists: it may be this one"
            raise ServerProblem(f"{what}; look at sailorctl why {id_}", 409) from None
        found = client.ask("GET", f"/v1/jobs/{part(str(given['id']))}")  # Our id is new.
        show(found, as_json, lambda _: f"{given['id']} is {found['state']}")
        return
    show(queued, as_json, text.submitted_text)
    for warning in queued["warnings"]:
        click.echo(f"warning: {warning}", err=True)


def _generated_id(spec: str, job: Path) -> str:
    """Return a new id that begins with the job's name, or with that of its file."""
    try:
        named = parse_document(spec.encode(), name="job", flaws_raise=False).data.get("job")
    except InputError:
        named = None  # sailord reports its mistakes.
    name = named.get("name") if isinstance(named, dict) else None
    name = name if isinstance(name, str) else job.stem
    beginning = re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:_NAME_MAX].strip("._-")
    return f"{beginning or 'job'}-{uuid.uuid4().hex[:6]}"
