"""The commands ``checkpoint verify``, ``export`` and ``import``, which read and write the storage.

They ask sailord where a job's checkpoints are; with ``--at`` they need no cluster.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click

from agents.protocol.names import JOB_ID
from agents.protocol.records import JobId
from sailord.checkpoints.catalog import complete_at, folders_at
from sailord.checkpoints.manifest import folder_of, load_manifest
from sailord.checkpoints.object_storage import (
    Damaged,
    Missing,
    Storage,
    StorageError,
    open_storage,
)
from sailord.checkpoints.resume import refuse_later, take_in
from sailord.checkpoints.retention import Folder
from sailord.checkpoints.verify import faults_of
from sailord.cli.shared.child_process import expect_success
from sailord.cli.shared.described_job import JobFile, takes_script
from sailord.cli.shared.exit_codes import FAILED
from sailord.cli.shared.options import FILE, show
from sailord.cli.shared.server import ask_about, server_command
from sailord.cli.submit.scripts import section
from sailord.client import Client, ServerProblem
from sailord.planning.job_spec import read_job, saving_of
from simulator.documents.problems import InputError, Problem
from worker.checkpoint.manifest import ManifestError, older
from worker.checkpoint.snapshot_file import point_of

FORMS = {
    "huggingface": "Hugging Face's safetensors (weights only)",
    "deepspeed": "DeepSpeed's universal checkpoint",
    "dcp": "torch's DCP",
    "megatron": "Megatron-Core's torch_dist",
}
_WORKER = ("-P", "-m", "worker")
"""It runs in a script's folder, whose modules must not take the place of ours."""


def names_checkpoint(command: Callable[..., None]) -> Callable[..., None]:
    """Add JOB, STEP and ``--at``; pass the storage, the job and the manifest that they name."""

    @click.argument("job", required=False)
    @click.argument("step", type=click.IntRange(0), required=False)
    @click.option(
        "--at",
        "place",
        metavar="URI",
        help="The job's [checkpoint] uri; default: sailord is asked for it.",
    )
    @server_command
    @wraps(command)
    def wrapped(
        client: Client, job: str | None, step: int | None, place: str | None, **kwargs: Any
    ) -> None:
        if job is not None and "/" in job:
            base, _, last = job.rstrip("/").rpartition("/")
            cure = f"give {last} --at {base}"
            raise InputError(Problem(job, "is not the name of a job", cure))
        if place is None:
            job, place = _ask_place(client, job)
        elif job is None:
            raise InputError(Problem("JOB", "is missing", "name the job whose checkpoint is meant"))
        command(*_locate(place, JobId(job), step), **kwargs)

    return wrapped


def _ask_place(client: Client, job: str | None) -> tuple[str, str]:
    """Return a job's name and the place of its checkpoints, as sailord knows them."""
    job, record = ask_about(client, "job", job, lambda name: client.ask("GET", f"/v1/jobs/{name}"))
    place = record["saving"]["uri"]
    if place is None:
        raise ServerProblem(f"{job} has no [checkpoint] uri, so none of its checkpoints is stored")
    return job, str(place)


def _locate(uri: str, job: JobId, step: int | None) -> tuple[Storage, JobId, str]:
    """Return the storage, the job and the newest manifest, or that of a step."""
    place = f"{uri.rstrip('/')}/{job}"
    try:
        storage = open_storage(uri)
        folders = folders_at(storage, job)
    except StorageError as error:
        raise InputError(Problem(place, str(error))) from None
    found = [folder for folder in folders if folder.manifests]
    if not found:
        cure = "sailorctl jobs lists the jobs, --at URI looks elsewhere"
        raise InputError(Problem(place, _why_none(folders), cure))
    meant = [folder for folder in found if step in (None, folder.point.step)]
    if not meant:
        steps = ", ".join(str(n) for n in sorted({folder.point.step for folder in found}))
        raise InputError(Problem(place, f"has no checkpoint of step {step}", f"there are {steps}"))
    newest = max(meant, key=lambda folder: (folder.point.generation, folder.point.step))
    return storage, job, f"{folder_of(job, newest.point)}/{newest.manifests[-1]}"


@click.command()
@names_checkpoint
def verify(storage: Storage, job: JobId, name: str, as_json: bool) -> None:
    """Verify every byte of a checkpoint. Exits with 1 if it is damaged.

    Default JOB: the active one; default STEP: the newest.
    """
    uri = storage.uri_of(name)
    try:
        faults = _all_faults(storage, job, name)
        if faults and not _is_there(storage, name):
            cure = f"verify again, or pin one first: sailorctl checkpoint pin {job} STEP"
            raise InputError(Problem(uri, "was deleted while it was read", cure))
        next_older = _next_older(storage, job, name) if faults else None
    except StorageError as error:
        what = "the storage failed, which says nothing about the checkpoint; verify it again"
        raise ServerProblem(f"{uri} could not be read: {error}; {what}") from None
    value = {"job": job, "step": _place_of(name)[1], "manifest": uri}
    value |= {"is_whole": not faults, "faults": faults, "next_older": next_older}
    show(value, as_json, _verdict)
    if faults:
        raise SystemExit(FAILED)


def _verdict(value: dict[str, Any]) -> str:
    if value["is_whole"]:
        return f"{value['manifest']}: intact"
    lines = [f"{value['manifest']}: damaged", *(f"  {each}" for each in value["faults"])]
    step = value["next_older"]
    found = f"the next older intact one: step {step}"
    lines.append("no older one is intact" if step is None else found)
    return "\n".join(lines)


def _why_none(folders: list[Folder]) -> str:
    if not folders:
        return "holds no checkpoint"
    points = ", ".join(str(folder.point.step) for folder in folders[:5])
    return f"holds unfinished uploads of step {points}, and no checkpoint"


def _all_faults(storage: Storage, job: JobId, name: str) -> list[str]:
    try:
        manifest = load_manifest(storage, name)
        return faults_of(storage, manifest, job=job, is_thorough=True)
    except (Damaged, ManifestError, Missing) as error:
        return [str(error)]


def _is_there(storage: Storage, name: str) -> bool:
    """Return whether a manifest still exists: retention deletes it before the objects."""
    folder, _, file = name.rpartition("/")
    return any(entry.name == file for entry in storage.entries(folder))


def _place_of(name: str) -> tuple[int, int]:
    """Return generation and step of a manifest, by its name in the storage."""
    found = point_of(name.split("/")[1])
    assert found is not None, name
    return found


def _next_older(storage: Storage, job: JobId, name: str) -> int | None:
    """Return the step of the next older checkpoint that is intact."""
    found = [((m.point.generation, m.point.step), m) for m, _ in complete_at(storage, job)]
    for (_, step), manifest in older(found, _place_of(name)):
        if not faults_of(storage, manifest, job=job, is_thorough=True):
            return step
    return None


@click.command()
@click.option("--to", "out", required=True, type=FILE, help="A new folder.")
@click.option(
    "--form",
    type=click.Choice(list(FORMS)),
    default="huggingface",
    show_default=True,
    help=f"{', '.join(FORMS.values())}.",
)
@click.option("--job", "job_file", type=FILE, help="Script or job file of the model.")
@click.option(
    "--workdir", metavar="DIR", type=FILE, help="A script's folder; default: where it lies."
)
@names_checkpoint
def export(
    storage: Storage,
    job: JobId,
    name: str,
    out: Path,
    form: str,
    job_file: Path | None,
    workdir: Path | None,
    as_json: bool,
) -> None:
    """Convert a checkpoint for other programs.

    Default JOB: the active one; default STEP: the newest. With the script or job file of a model
    its frozen parameters come along, and of a model of transformers its config and tokenizer;
    Megatron's form needs it for such a model. Other forms cannot use it.
    """
    if out.exists():
        raise InputError(Problem(str(out), "exists", "name a new folder"))
    # In its own process, since it imports torch.
    command = [sys.executable, *_WORKER, "export-checkpoint", storage.uri_of(name)]
    root = None
    if job_file is not None:
        given = JobFile(job_file, workdir=workdir)
        given.refuse_options("--workdir")
        command += ["--job", str(job_file.absolute())]
        # Where `submit` has run it, so that its relative paths are right.
        root = given.root() if given.is_script else None
    elif workdir is not None:
        raise InputError(Problem("--workdir", "is the folder of a script", "name it by --job"))
    command += ["--to", str(out if root is None else out.absolute()), "--form", form]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True, cwd=root)
    expect_success(done.returncode)
    value = {"job": job, "step": _place_of(name)[1], "folder": str(out)}
    show(value, as_json, lambda _: done.stdout.rstrip())


@click.command("import")
@click.argument("folder", type=FILE)
@click.option("--job", required=True, type=FILE, help="Job file or script.")
@click.option("--name", required=True, help="The job's name in the cluster.")
@click.option(
    "--form",
    type=click.Choice(list(FORMS)),
    default="deepspeed",
    show_default=True,
    help=f"{', '.join(FORMS.values())}.",
)
@click.option("--checkpoint", "place", metavar="URI", help="Where a script's checkpoints go.")
@click.option(
    "--step", type=click.IntRange(0), help="Of a DCP that does not say its own, as one of SGD."
)
@takes_script
def import_checkpoint(
    folder: Path, job: JobFile, name: str, form: str, place: str | None, step: int | None
) -> None:
    """Import a checkpoint of another program into the storage of a job.

    ARGUMENTS, after --, are those of a script, and --workdir is its folder, as in `submit`.
    Then: sailorctl submit JOB --id NAME --resume newest
    """
    if not JOB_ID.match(name):
        cure = "use letters, digits, dots and hyphens: submit will take it as --id"
        raise InputError(Problem("--name", f"{name!r} is not the name of a job", cure))
    cure = "leave them out, and write [checkpoint] into the file"
    job.refuse_options("ARGUMENTS, --workdir and --checkpoint", place, cure=cure)
    spec = job.text() + ("" if place is None else section("checkpoint", {"uri": place}))
    read = read_job(spec)
    uri = saving_of(read).uri
    if uri is None:
        cure = "give --checkpoint URI" if job.is_script else "set uri under [checkpoint]"
        raise InputError(Problem(str(job.path), "has no place for checkpoints", cure))
    try:
        storage = open_storage(uri)
        refuse_later(storage, JobId(name))  # First, since a conversion takes hours.
    except StorageError as error:
        raise InputError(Problem(uri, str(error))) from None
    command = [sys.executable, *_WORKER, "import-checkpoint", str(folder.absolute())]
    root = job.root() if job.is_script else None
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "whole.snap"
        words = {"--job": job.path.absolute(), "--name": name, "--to": file, "--form": form}
        command += [str(word) for pair in words.items() for word in pair]
        command += [] if step is None else ["--step", str(step)]
        command += ["--", *job.arguments]
        done = subprocess.run(command, check=False, stdout=subprocess.PIPE, cwd=root)
        expect_success(done.returncode)
        try:
            durable = take_in(storage, JobId(name), read, spec, file)
        except StorageError as error:
            raise InputError(Problem(uri, str(error))) from None
    click.echo(f"step {durable.point.step} of {name} is at {durable.manifest}")
