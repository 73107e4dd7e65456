"""Chooses the checkpoint from which a submitted job starts: none, or the requested one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from agents.object_store import of_file
from agents.protocol.records import (
    FIRST,
    Durable,
    GenerationRecord,
    Holding,
    JobId,
    JobRecord,
    Point,
    Saving,
    Uploaded,
)
from sailord.checkpoints.catalog import Unreadable, folders_at, look_at
from sailord.checkpoints.manifest import Manifest, folder_of, manifest_bytes, manifest_name
from sailord.checkpoints.object_storage import Storage, StorageError, open_storage
from sailord.checkpoints.verify import compose, faults_of
from sailord.core.model.commands import WriteManifest
from sailord.planning.job_spec import job_shape, read_job
from simulator.documents.problems import InputError, Problem
from simulator.spec.job import Job
from worker.checkpoint.compatibility import differences, model_of
from worker.checkpoint.snapshot_file import head_checksum, read_head, read_header

NEWEST = "newest"


@dataclass(frozen=True, slots=True)
class JobStart:
    """Where a submitted job begins."""

    durable: Durable | None = None
    """The checkpoint to start from; ``None``: the first step."""
    generations_before: int = 0
    """The highest generation in the job's storage."""


def job_start(job: Job, id_: JobId, uri: str | None, resume: str | None) -> JobStart:
    """Return where a job begins; raises ``InputError``.

    A job may not start from step 0 in a storage with checkpoints of a job of the same id, since the
    two histories could not be distinguished.
    """
    if uri is None:
        if resume is None:
            return JobStart()
        cure = "set uri under [checkpoint]"
        raise InputError(Problem("resume", "the job has no checkpoint storage", cure))
    try:
        storage = open_storage(uri)
        folders = folders_at(storage, id_)
        before = max((folder.point.generation for folder in folders), default=0)
        if resume is None:
            if any(folder.manifests for folder in folders):
                # Unreadable ones, too: a newer version may have written them.
                what = f"{uri} already has checkpoints of a job {id_}"
                cure = "use --resume newest, or another --id"
                raise InputError(Problem("checkpoint: uri", what, cure))
            storage.make_root()
            return JobStart(None, before)
        found, unreadable = look_at(storage, id_)
        manifest, durable = _choose(found, unreadable, resume, f"{uri}/{id_}")
        _check(storage, manifest, job, id_, found)
    except StorageError as error:
        raise InputError(Problem("checkpoint: uri", str(error))) from None
    return JobStart(durable, before)


def _choose(
    found: list[tuple[Manifest, Durable]], unreadable: list[Unreadable], resume: str, place: str
) -> tuple[Manifest, Durable]:
    """Choose the checkpoint of the step, or the newest: latest generation, then step, then term.

    An unreadable checkpoint that would be newer is an error; it is not skipped silently.
    """
    if resume == NEWEST:
        wanted = found
    else:
        wanted = [pair for pair in found if str(pair[0].point.step) == resume]
    best = max(wanted, key=_order, default=None)
    for each in unreadable:
        is_meant = best is None and str(each.point.step) == resume
        newest = (each.point.generation, each.point.step)
        if is_meant or (resume == NEWEST and (best is None or newest > _order(best)[:2])):
            steps = sorted({m.point.step for m, _ in found}, reverse=True)
            cure = f"use --resume {steps[0]} to start from there" if steps else "check that file"
            what = f"the checkpoint of step {each.point.step} is unreadable: {each.why}"
            raise InputError(Problem("resume", what, cure))
    if best is None:
        known = ", ".join(sorted({str(m.point.step) for m, _ in found}, key=int))
        if not found:
            cure = "use the job's former --id, or leave --resume out to start anew"
            raise InputError(Problem("resume", f"no checkpoint at {place}", cure))
        what = f"no checkpoint {resume[:20]!r} at {place}"
        raise InputError(Problem("resume", what, f"existing steps: {known}"))
    return best


def _order(pair: tuple[Manifest, Durable]) -> tuple[int, int, int]:
    manifest, _ = pair
    return manifest.point.generation, manifest.point.step, manifest.term


def _check(
    storage: Storage,
    manifest: Manifest,
    job: Job,
    id_: JobId,
    found: list[tuple[Manifest, Durable]],
) -> None:
    """Check that data and model match the job's, and that all objects exist."""
    step = manifest.point.step
    changed = differences(job, read_job(manifest.spec), step=step, place="resume")
    if changed:
        raise InputError(changed)
    if model_of(job) != manifest.model:
        what = f"the checkpoint of step {step} is of another model than its job"
        raise InputError(Problem("resume", what, "use another step, or another --id"))
    faults = faults_of(storage, manifest, job=id_, is_thorough=False)
    if faults:
        older = max((m.point.step for m, _ in found if m.point.step < step), default=None)
        cure = "there is no older one" if older is None else f"the next older one is step {older}"
        raise InputError([Problem("resume", fault, cure) for fault in faults[:9]])


def refuse_later(storage: Storage, id_: JobId) -> None:
    """Raise ``InputError`` where an import would not be a job's newest checkpoint."""
    found = [each.point for each in folders_at(storage, id_) if each.manifests]
    newest = max(found, key=lambda point: (point.generation, point.step), default=None)
    if newest is not None and newest.generation > 0:
        what = f"{storage.uri} has checkpoints of a job {id_} that trained, the newest of step"
        cure = "give another --name, or `submit` would resume that one"
        raise InputError(Problem("--name", f"{what} {newest.step}", cure))


def take_in(storage: Storage, id_: JobId, job: Job, spec: str, file: Path) -> Durable:
    """Import one file that contains every piece as a checkpoint of generation 0."""
    header, head = read_header(file), read_head(file)
    point = Point(header.step, 0)
    name = f"{folder_of(id_, point)}/{header.file_name}"
    content = of_file(file, head)
    storage.write_content(name, content)
    holds = tuple(Holding(layer, 0, header.atoms + 1) for layer in range(header.layers))
    part = Uploaded(point, storage.uri_of(name), content.size, head_checksum(head), holds)
    layers, atoms = job_shape(job)
    record = JobRecord(id_, "queued", layers=layers, atoms=atoms, saving=Saving(storage.uri))
    no_generation = GenerationRecord(id_, 0, "closed", "", (), FIRST, 0, "imported")
    order = WriteManifest(record, no_generation, (part,), point, None)
    described, sha256 = manifest_bytes(compose(storage, order, term=0, spec=spec))
    manifest = manifest_name(id_, point, 0)
    storage.write(manifest, described)
    return Durable(point, storage.uri_of(manifest), sha256)
