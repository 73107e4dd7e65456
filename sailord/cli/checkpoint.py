"""``sailorctl checkpoint``: what is kept of a job, and what a person may do with it.

``ls``, ``now``, ``pin``, ``unpin`` and ``rollback`` ask the running sailord. ``verify`` and
``export`` need nothing but the storage: they work where all else is gone.
"""

from __future__ import annotations

import json
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
from sailord.cli.cluster import FAILED, active_job, online, show
from sailord.client import Client, ServerProblem, part
from sailord.planning.job_spec import read_job, saving_of
from sailord.text import cluster_text as text
from simulator.documents.files import read_bytes
from simulator.documents.problems import InputError, Problem

WAIT_S = 0.2


@click.group()
def checkpoint() -> None:
    """List, make, check, keep, export and go back to checkpoints."""


@checkpoint.command("ls")
@click.argument("job", required=False)
@online
def list_checkpoints(client: Client, job: str | None, as_json: bool) -> None:
    """List a job's checkpoints.

    Without JOB: of the job that has the cluster.
    """
    job = job or active_job(client)
    show(client.ask("GET", f"/v1/jobs/{part(job)}/checkpoints"), as_json, _listed)


def _listed(value: dict[str, Any]) -> str:
    if value["uri"] is None:
        return f"{value['job']} names no place for checkpoints"
    rows = [("step", "generation", "bytes", "samples", "")]
    for each in value["checkpoints"]:
        marks = [word for word in ("durable", "pinned") if each[f"is_{word}"]]
        numbers = (each["step"], each["generation"], each["bytes"], each["samples"])
        step, generation, size, samples = (f"{number:,}" for number in numbers)
        rows.append((step, generation, size, samples, ", ".join(marks)))
    # A sailord that is older than this command does not tell of those.
    unreadable = value.get("unreadable", ())
    for each in unreadable:
        step, generation = f"{each['step']:,}", f"{each['generation']:,}"
        rows.append((step, generation, "-", "-", f"unreadable: {each['why']}"))
    lines = text.table(rows) if len(rows) > 1 else ["no checkpoint yet"]
    if unreadable:
        lines.append("what is unreadable is never gone back to; an older one is taken instead")
    lines.append(f"at {value['uri']}/{value['job']}")
    if value["unfinished_bytes"]:
        lines.append(f"{value['unfinished_bytes']:,} bytes of uploads that are no checkpoint yet")
    return "\n".join([*lines, *([value["trouble"]] if value["trouble"] else [])])


@checkpoint.command("now")
@click.argument("job", required=False)
@click.option("--wait/--no-wait", default=True, help="Until it is durable.", show_default=True)
@online
def make_now(client: Client, job: str | None, wait: bool, as_json: bool) -> None:
    """Make what the job has come to durable, whatever the interval says.

    Without JOB: of the job that has the cluster.
    """
    job = job or active_job(client)
    before = _durable_step(client, job)
    ordered = client.ask("POST", f"/v1/jobs/{part(job)}/checkpoint", {})
    if not wait:
        show(ordered, as_json, lambda _: f"checkpoint {job}: ordered")
        return
    told: list[str] = []
    while (step := _durable_step(client, job)) is None or step == before:
        time.sleep(WAIT_S)
        state = client.ask("GET", f"/v1/jobs/{part(job)}/checkpoints")
        if state["trouble"] or state["uri"] is None:
            click.echo(f"error: {state['trouble'] or _listed(state)}", err=True)
            raise SystemExit(FAILED)
        _expect_running(client, job, step)
        if (troubles := _troubles(client, job)) != told:
            told = troubles
            click.echo("\n".join(["still waiting", *troubles]), err=True)
    show({"job": job, "step": step}, as_json, lambda _: f"step {step} is durable")


def _expect_running(client: Client, job: str, durable_step: int | None) -> None:
    """Nobody makes a checkpoint of a job that does not run; who waits for one hears it."""
    state = client.ask("GET", f"/v1/jobs/{part(job)}")["state"]
    if state == "running":
        return
    kept = "nothing of it is" if durable_step is None else f"step {durable_step} is"
    raise ServerProblem(f"{job} is {state}: no further checkpoint is made of it; {kept} durable")


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
    @online
    def command(client: Client, job: str, step: int, as_json: bool) -> None:
        value = client.ask("POST", f"/v1/jobs/{part(job)}/checkpoints/{step}/{order}", {})
        show(value, as_json, lambda _: f"step {step} of {job} is {order}ned")

    return command


checkpoint.add_command(_pinning("pin", "Keep a checkpoint whatever comes."))
checkpoint.add_command(_pinning("unpin", "Let a checkpoint go when it is old."))


@checkpoint.command()
@click.argument("job")
@click.argument("step", type=click.IntRange(0))
@click.option("--reason", default="", help="Stands in the history.")
@click.option("--id", "id_", help="The same id has one effect only.")
@online
def rollback(
    client: Client, job: str, step: int, reason: str, id_: str | None, as_json: bool
) -> None:
    """Go back to an older checkpoint, and on from there; what came after is given up."""
    body = {"reason": reason} | ({} if id_ is None else {"id": id_})
    value = client.ask("POST", f"/v1/jobs/{part(job)}/checkpoints/{step}/rollback", body)
    show(value, as_json, lambda _: f"{job} goes back to step {step}: ordered")


# ---- on the storage alone -----------------------------------------------------------------------


@checkpoint.command()
@click.argument("uri")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def verify(uri: str, as_json: bool) -> None:
    """Read every byte of a checkpoint. Exits with 1 if it cannot be used.

    URI is a manifest, or a job's folder, of which the newest checkpoint is checked.
    """
    storage, job, name = _located(uri)
    faults = _all_faults(storage, job, name)
    older = _next_older(storage, job, name) if faults else None
    value = {
        "manifest": storage.uri_of(name),
        "is_whole": not faults,
        "faults": faults,
        "next_older": older,
    }
    click.echo(json.dumps(value, indent=1) if as_json else _verdict(value))
    if faults:
        raise SystemExit(FAILED)


def _verdict(value: dict[str, Any]) -> str:
    if value["is_whole"]:
        return f"{value['manifest']}: every byte is as it was written"
    lines = [f"{value['manifest']}: cannot be used", *(f"  {each}" for each in value["faults"])]
    older = value["next_older"]
    lines.append(f"the next older one is whole: {older}" if older else "no older one is whole")
    return "\n".join(lines)


def _located(uri: str) -> tuple[Storage, JobId, str]:
    """The storage, the job and the manifest that an address means."""
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
    return f"holds uploads of step {points}, none of which became a checkpoint"


def _all_faults(storage: Storage, job: JobId, name: str) -> list[str]:
    try:
        manifest = load_manifest(storage, name)
        return faults_of(storage, manifest, job=job, is_thorough=True)
    except (ManifestError, StorageError) as error:
        return [str(error)]


def _next_older(storage: Storage, job: JobId, name: str) -> str | None:
    """The next older checkpoint of which every byte is as it was written."""
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
@click.option("--to", "out", required=True, type=click.Path(path_type=Path), help="A new folder.")
@click.option(
    "--form",
    type=click.Choice(["huggingface", "deepspeed"]),
    default="huggingface",
    show_default=True,
    help="Hugging Face's safetensors, or DeepSpeed's universal checkpoint.",
)
def export(uri: str, out: Path, form: str) -> None:
    """Write a checkpoint in a form that others read.

    URI is a manifest, or a job's folder, of which the newest checkpoint is taken.
    """
    storage, _, name = _located(uri)
    if out.exists():
        raise InputError(Problem(str(out), "is there already", "name a new folder"))
    command = [sys.executable, "-m", "worker", "export-checkpoint", storage.uri_of(name)]
    # It needs torch, which is not loaded here.
    done = subprocess.run([*command, "--to", str(out), "--form", form], check=False, env=os.environ)
    if done.returncode:
        raise SystemExit(done.returncode)


@checkpoint.command("import")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--job", "job_file", required=True, type=click.Path(path_type=Path), help="Job file.")
@click.option("--name", required=True, help="The job's name in the cluster.")
def import_checkpoint(folder: Path, job_file: Path, name: str) -> None:
    """Turn a universal checkpoint of DeepSpeed into one at the job's place.

    Then: sailorctl submit JOB --id NAME --resume newest
    """
    spec = read_bytes(job_file, name=str(job_file)).decode("utf-8", "replace")
    job = read_job(spec)
    uri = saving_of(job).uri
    if uri is None:
        cure = "name it under [checkpoint] uri"
        raise InputError(Problem(str(job_file), "names no place for checkpoints", cure))
    command = [sys.executable, "-m", "worker", "import-checkpoint", str(folder)]
    with tempfile.TemporaryDirectory() as early:
        file = Path(early) / "whole.snap"
        options = ["--job", str(job_file), "--name", name, "--to", str(file)]
        done = subprocess.run([*command, *options], check=False, stdout=subprocess.PIPE)
        if done.returncode:
            raise SystemExit(done.returncode)
        try:
            durable = take_in(open_storage(uri), JobId(name), job, spec, file)
        except StorageError as error:
            raise InputError(Problem(uri, str(error))) from None
    click.echo(f"step {durable.point.step} of {name} stands at {durable.manifest}")
