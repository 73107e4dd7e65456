"""The commands ``checkpoint ...``: list, make, pin, verify, export, import and roll back.

``ls``, ``now``, ``pin``, ``unpin`` and ``rollback`` ask the running sailord. ``verify``, ``export``
and ``import`` need only the storage, so they work without a cluster.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from agents.protocol.records import JobId
from sailord.checkpoints.catalog import complete_at, folders_at
from sailord.checkpoints.manifest import PREFIX, ManifestError, folder_of, load_manifest
from sailord.checkpoints.object_storage import Storage, StorageError, open_storage
from sailord.checkpoints.resume import take_in
from sailord.checkpoints.retention import Folder
from sailord.checkpoints.verify import faults_of
from sailord.cli.described_job import JobFile, describe_script, described_text
from sailord.cli.exit_codes import FAILED
from sailord.cli.options import FILE, JSON, show
from sailord.cli.scripts import section
from sailord.cli.server import active_job, job_question, order_options, server_command
from sailord.client import Client, ServerProblem, part
from sailord.planning.job_spec import read_job, saving_of
from sailord.text.table import table
from simulator.documents.problems import InputError, Problem

WAIT_S = 0.2
FORMS = {
    "huggingface": "Hugging Face's safetensors (weights only)",
    "deepspeed": "DeepSpeed's universal checkpoint",
    "dcp": "torch's DCP",
    "megatron": "Megatron-Core's torch_dist",
}


@click.group()
def checkpoint() -> None:
    """List, make, verify, pin and export checkpoints, and roll back."""


def _list_text(value: dict[str, Any]) -> str:
    if value["uri"] is None:
        return f"{value['job']} has no [checkpoint] uri"
    rows = []
    for each in value["checkpoints"]:
        marks = [word for word in ("durable", "pinned") if each[f"is_{word}"]]
        numbers = (each["step"], each["generation"], each["bytes"], each["samples"])
        step, generation, size, samples = (f"{number:,}" for number in numbers)
        rows.append((step, generation, size, samples, ", ".join(marks)))
    for each in value["unreadable"]:
        step, generation = f"{each['step']:,}", f"{each['generation']:,}"
        rows.append((step, generation, "-", "-", f"unreadable: {each['why']}"))
    header = ("step", "generation", "bytes", "samples", "")
    lines = [table(header, rows) if rows else "no checkpoint yet"]
    if value["unreadable"]:
        lines.append("unreadable checkpoints are skipped when the job is restored")
    lines.append(f"at {value['uri']}/{value['job']}")
    if value["unfinished_bytes"]:
        lines.append(f"{value['unfinished_bytes']:,} bytes of unfinished uploads")
    return "\n".join([*lines, *([value["trouble"]] if value["trouble"] else [])])


checkpoint.add_command(
    job_question("checkpoints", _list_text, "List a job's checkpoints.", name="ls")
)


@checkpoint.command("now")
@click.argument("job", required=False)
@click.option("--wait/--no-wait", default=True, help="Wait until it is durable.", show_default=True)
@server_command
def make_now(client: Client, job: str | None, wait: bool, as_json: bool) -> None:
    """Make a durable checkpoint now, regardless of the interval.

    Default JOB: the active one.
    """
    job = job or active_job(client)
    before = _durable_step(client, job)
    ordered = client.ask("POST", f"/v1/jobs/{part(job)}/checkpoint", {})
    if not wait:
        show(ordered, as_json, lambda _: f"checkpoint {job}: ordered")
        return
    reported: list[str] = []
    while (step := _durable_step(client, job)) is None or step == before:
        time.sleep(WAIT_S)
        state = client.ask("GET", f"/v1/jobs/{part(job)}/checkpoints")
        if state["trouble"] or state["uri"] is None:
            click.echo(f"error: {state['trouble'] or _list_text(state)}", err=True)
            raise SystemExit(FAILED)
        _expect_running(client, job, step)
        if (troubles := _troubles(client, job)) != reported:
            reported = troubles
            click.echo("\n".join(["still waiting", *troubles]), err=True)
    show({"job": job, "step": step}, as_json, lambda _: f"step {step} is durable")


def _expect_running(client: Client, job: str, durable_step: int | None) -> None:
    """Raise if the job does not run, since no further checkpoint of it will come."""
    state = client.ask("GET", f"/v1/jobs/{part(job)}")["state"]
    if state == "running":
        return
    newest = "none is durable" if durable_step is None else f"the newest is of step {durable_step}"
    raise ServerProblem(f"{job} is {state}, so no further checkpoint is made; {newest}")


def _troubles(client: Client, job: str) -> list[str]:
    active = client.ask("GET", "/v1/status")["job"]
    return active["troubles"] if active is not None and active["id"] == job else []


def _durable_step(client: Client, job: str) -> int | None:
    durable = client.ask("GET", f"/v1/jobs/{part(job)}")["durable"]
    return None if durable is None else int(durable["point"]["step"])


def _pinning(order: str, about: str) -> click.Command:
    @click.command(order, help=about)
    @click.argument("job")
    @click.argument("step", type=click.IntRange(0))
    @server_command
    def command(client: Client, job: str, step: int, as_json: bool) -> None:
        value = client.ask("POST", f"/v1/jobs/{part(job)}/checkpoints/{step}/{order}", {})
        show(value, as_json, lambda _: f"step {step} of {job} is {order}ned")

    return command


checkpoint.add_command(_pinning("pin", "Keep a checkpoint, whatever the retention says."))
checkpoint.add_command(_pinning("unpin", "Leave a checkpoint to the retention again."))


@checkpoint.command()
@click.argument("job")
@click.argument("step", type=click.IntRange(0))
@order_options
@server_command
def rollback(client: Client, job: str, step: int, order: dict[str, Any], as_json: bool) -> None:
    """Roll a job back to an older checkpoint; later steps are discarded."""
    value = client.ask("POST", f"/v1/jobs/{part(job)}/checkpoints/{step}/rollback", order)
    show(value, as_json, lambda _: f"rollback of {job} to step {step}: ordered")


# ---- without sailord, on the storage ------------------------------------------------------------


@checkpoint.command()
@click.argument("uri")
@JSON
def verify(uri: str, as_json: bool) -> None:
    """Verify every byte of a checkpoint. Exits with 1 if it is damaged.

    URI is a manifest, or a job's folder: then its newest checkpoint is verified.
    """
    storage, job, name = _located(uri)
    faults = _all_faults(storage, job, name)
    older = _next_older(storage, job, name) if faults else None
    uri = storage.uri_of(name)
    value = {"manifest": uri, "is_whole": not faults, "faults": faults, "next_older": older}
    show(value, as_json, _verdict)
    if faults:
        raise SystemExit(FAILED)


def _verdict(value: dict[str, Any]) -> str:
    if value["is_whole"]:
        return f"{value['manifest']}: intact"
    lines = [f"{value['manifest']}: damaged", *(f"  {each}" for each in value["faults"])]
    older = value["next_older"]
    lines.append(f"the next older intact one: {older}" if older else "no older one is intact")
    return "\n".join(lines)


def _located(uri: str) -> tuple[Storage, JobId, str]:
    """Return the storage, the job and the manifest that a URI names."""
    base, _, last = uri.rstrip("/").rpartition("/")
    try:
        if last.startswith(PREFIX):
            base, _, point = base.rpartition("/")
            base, _, job = base.rpartition("/")
            return open_storage(base), JobId(job), f"{job}/{point}/{last}"
        storage, job = open_storage(base), last
        folders = folders_at(storage, JobId(job))
    except StorageError as error:
        raise InputError(Problem(uri, str(error))) from None
    found = [folder for folder in folders if folder.manifests]
    if not found:
        what = _why_none(folders)
        raise InputError(Problem(uri, what, "name a job's folder, or a manifest in it"))
    newest = max(found, key=lambda folder: (folder.point.generation, folder.point.step))
    return storage, JobId(job), f"{folder_of(JobId(job), newest.point)}/{newest.manifests[-1]}"


def _why_none(folders: list[Folder]) -> str:
    if not folders:
        return "holds no checkpoint"
    points = ", ".join(str(folder.point.step) for folder in folders[:5])
    return f"holds unfinished uploads of step {points}, and no checkpoint"


def _all_faults(storage: Storage, job: JobId, name: str) -> list[str]:
    try:
        manifest = load_manifest(storage, name)
        return faults_of(storage, manifest, job=job, is_thorough=True)
    except (ManifestError, StorageError) as error:
        return [str(error)]


def _next_older(storage: Storage, job: JobId, name: str) -> str | None:
    """Return the manifest of the next older checkpoint that is intact."""
    generation, _, step = name.split("/")[1].partition("-")
    found = [(m, d) for m, d in complete_at(storage, job) if m.point.step < int(step)]
    found.sort(key=lambda pair: (pair[0].point.generation, pair[0].point.step), reverse=True)
    for manifest, durable in found:
        is_before = manifest.point.generation <= int(generation)
        if is_before and not faults_of(storage, manifest, job=job, is_thorough=True):
            return durable.manifest
    return None


@checkpoint.command()
@click.argument("uri")
@click.option("--to", "out", required=True, type=FILE, help="A new folder.")
@click.option(
    "--form",
    type=click.Choice(list(FORMS)),
    default="huggingface",
    show_default=True,
    help=f"{', '.join(FORMS.values())}.",
)
@click.option("--job", "job_file", type=FILE, help="Script or job file of the model.")
def export(uri: str, out: Path, form: str, job_file: Path | None) -> None:
    """Convert a checkpoint for other programs.

    URI is a manifest, or a job's folder: then its newest checkpoint is taken. With the script or
    job file of a model of transformers, config and tokenizer come along; Megatron's form needs it
    for such a model.
    """
    storage, _, name = _located(uri)
    if out.exists():
        raise InputError(Problem(str(out), "exists", "name a new folder"))
    command = [sys.executable, "-m", "worker", "export-checkpoint", storage.uri_of(name)]
    # A process of its own, since it imports torch.
    command += ["--to", str(out), "--form", form]
    command += [] if job_file is None else ["--job", str(job_file)]
    done = subprocess.run(command, check=False, env=os.environ)
    if done.returncode:
        raise SystemExit(done.returncode)


@checkpoint.command("import")
@click.argument("folder", type=FILE)
@click.option("--job", "job_file", required=True, type=FILE, help="Job file or script.")
@click.option("--name", required=True, help="The job's name in the cluster.")
@click.option(
    "--form",
    type=click.Choice(list(FORMS)),
    default="deepspeed",
    show_default=True,
    help=f"{', '.join(FORMS.values())}.",
)
@click.option("--checkpoint", "place", metavar="URI", help="Where a script's checkpoints go.")
@click.argument("arguments", nargs=-1)
def import_checkpoint(
    folder: Path,
    job_file: Path,
    name: str,
    form: str,
    place: str | None,
    arguments: tuple[str, ...],
) -> None:
    """Import a checkpoint of another program into the storage of a job.

    ARGUMENTS, after --, are those of a script.
    Then: sailorctl submit JOB --id NAME --resume newest
    """
    given = JobFile(job_file, arguments)
    root = given.root() if given.is_script else None
    if root is not None:
        spec = describe_script(job_file, root, arguments)
        spec += "" if place is None else section("checkpoint", {"uri": place})
    elif place is not None or arguments:
        cure = "leave them out, and write [checkpoint] into the file"
        what = "is a job file; only a script takes ARGUMENTS and --checkpoint"
        raise InputError(Problem(str(job_file), what, cure))
    else:
        spec = described_text(job_file)
    job = read_job(spec)
    uri = saving_of(job).uri
    if uri is None:
        cure = "give --checkpoint URI" if given.is_script else "set uri under [checkpoint]"
        raise InputError(Problem(str(job_file), "has no place for checkpoints", cure))
    command = [sys.executable, "-m", "worker", "import-checkpoint", str(folder.absolute())]
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "whole.snap"
        words = {"--job": job_file.absolute(), "--name": name, "--to": file, "--form": form}
        command += [str(word) for pair in words.items() for word in pair]
        command += ["--", *arguments]
        done = subprocess.run(command, check=False, stdout=subprocess.PIPE, cwd=root)
        if done.returncode:
            raise SystemExit(done.returncode)
        try:
            durable = take_in(open_storage(uri), JobId(name), job, spec, file)
        except StorageError as error:
            raise InputError(Problem(uri, str(error))) from None
    click.echo(f"step {durable.point.step} of {name} is at {durable.manifest}")
