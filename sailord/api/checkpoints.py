"""What the API says of a job's checkpoints and moves, and does with them."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TypeVar

from aiohttp import web

from agents.protocol.records import Durable, Intent, JobId, Point
from sailord.api import types
from sailord.api.app import API, Api, answer, refusal
from sailord.api.jobs_and_nodes import ID, NAMES, give, job_of, read_object
from sailord.checkpoints.catalog import Unreadable, folders_at, look_at, reach
from sailord.checkpoints.manifest import Manifest, folder_of
from sailord.checkpoints.object_storage import Missing, StorageError
from sailord.checkpoints.retention import Folder
from sailord.checkpoints.verify import faults_of
from sailord.core.reconfiguration_timing import ReconfigurationTiming
from simulator.documents.problems import InputError, Problem

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CheckpointView:
    """One checkpoint in the durable store."""

    step: int
    generation: int
    bytes: int
    manifest: str
    is_durable: bool
    """The one from which the job would go on."""
    is_pinned: bool
    samples: int
    label_tokens: int


@dataclass(frozen=True, slots=True)
class UnreadableView:
    """A checkpoint of which not even the manifest can be read, and why."""

    step: int
    generation: int
    manifest: str
    why: str


@dataclass(frozen=True, slots=True)
class CheckpointsView:
    """A job's checkpoints, oldest first."""

    job: str
    uri: str | None
    checkpoints: tuple[CheckpointView, ...]
    unfinished_bytes: int
    """Of uploads that are under way, or came to nothing."""
    trouble: str
    """Why the durable store took nothing of late."""
    unreadable: tuple[UnreadableView, ...]
    """What stands among them and cannot be used."""


@dataclass(frozen=True, slots=True)
class Pinned:
    """Whether a checkpoint is kept whatever comes."""

    job: str
    step: int
    generation: int
    is_pinned: bool


@dataclass(frozen=True, slots=True)
class Moves:
    """What a job's moves to other generations took, oldest first."""

    job: str
    moves: tuple[ReconfigurationTiming, ...]


async def list_moves(request: web.Request) -> web.Response:
    """What each reconfiguration took, phase by phase, beside what was predicted."""
    job = job_of(request)
    history = await request.app[API].gateway.read_history(JobId(job.id))
    moves = tuple(line.move for line in history if line.move is not None)
    return answer(Moves(job.id, moves))


async def list_checkpoints(request: web.Request) -> web.Response:
    """All checkpoints of a job that the durable store holds."""
    api, job = request.app[API], job_of(request)
    active = api.shell.shown.active
    trouble = active.checkpointing.trouble if active is not None and active.job == job.id else ""
    if job.saving.uri is None:
        return answer(CheckpointsView(job.id, None, (), 0, trouble, ()))
    found = await _reached(asyncio.to_thread(_look, job.saving.uri, JobId(job.id)))
    if isinstance(found, web.Response):
        return found
    folders, complete, broken = found
    durable = api.shell.shown.durables.get(JobId(job.id))
    complete.sort(key=lambda pair: (pair[0].point, pair[0].term))
    shown = tuple(_view(m, d, folders.get(m.point), is_durable=d == durable) for m, d in complete)
    unfinished = sum(f.bytes for f in folders.values() if not f.manifests)
    unreadable = tuple(
        UnreadableView(each.point.step, each.point.generation, each.manifest, each.why)
        for each in broken
    )
    return answer(CheckpointsView(job.id, job.saving.uri, shown, unfinished, trouble, unreadable))


def _look(
    uri: str, job: JobId
) -> tuple[dict[Point, Folder], list[tuple[Manifest, Durable]], list[Unreadable]]:
    storage = reach(uri)
    folders = {folder.point: folder for folder in folders_at(storage, job)}
    return folders, *look_at(storage, job)


def _view(
    manifest: Manifest, durable: Durable, folder: Folder | None, *, is_durable: bool
) -> CheckpointView:
    point, progress = manifest.point, manifest.progress
    return CheckpointView(
        step=point.step,
        generation=point.generation,
        bytes=manifest.bytes,
        manifest=durable.manifest,
        is_durable=is_durable,
        is_pinned=folder is not None and folder.is_pinned,
        samples=progress.samples,
        label_tokens=progress.label_tokens,
    )


async def pin_checkpoint(request: web.Request) -> web.Response:
    """Keep a checkpoint whatever comes, or no longer."""
    api, job = request.app[API], job_of(request)
    is_pinned = request.match_info["order"] == "pin"
    found = await _found(api, job, request.match_info["step"])
    if isinstance(found, web.Response):
        return found
    manifest, _ = found
    assert job.saving.uri is not None, "what was found has a place"
    id_, point = JobId(job.id), manifest.point
    work = api.shell.checkpoints.pin(id_, job.saving.uri, point, is_pinned=is_pinned)
    failed = await _reached(work)
    if isinstance(failed, web.Response):
        return failed
    return answer(Pinned(job.id, point.step, point.generation, is_pinned))


async def roll_back(request: web.Request) -> web.Response:
    """Order a job to go back to an older checkpoint and to go on from there."""
    api, job = request.app[API], job_of(request)
    body = await read_object(request, {"id": str, "reason": str}, ())
    id_ = body.get("id") or uuid.uuid4().hex
    if not ID.match(id_):
        raise InputError(Problem("id", "is no name", NAMES))
    active = api.shell.shown.active
    if active is None or active.job != job.id:
        cure = "resume it first, or wait for its turn"
        return refusal(409, Problem(job.id, f"it is {job.state}: it has no cluster", cure))
    found = await _found(api, job, request.match_info["step"])
    if isinstance(found, web.Response):
        return found
    _, durable = found
    newest = api.shell.shown.durables.get(active.job)
    if newest is not None and durable.point.step > newest.point.step:
        what = f"step {durable.point.step} is beyond the durable step {newest.point.step}"
        return refusal(409, Problem("step", what, "one can only go back"))
    reason = body.get("reason", "")[:500] or f"back to step {durable.point.step}, as ordered"
    intent = Intent(id_, "rollback", job.id, None, reason, durable)
    return await give(api, intent)


async def _found(
    api: Api, job: types.JobView, step: str
) -> tuple[Manifest, Durable] | web.Response:
    """The checkpoint of a step, if it can be read; else what is said instead."""
    uri = job.saving.uri
    if uri is None:
        cure = "submit jobs with a uri under [checkpoint]"
        return refusal(409, Problem("job", "names no place for checkpoints", cure))
    if not step.isascii() or not step.isdecimal() or len(step) > 18:
        raise InputError(Problem("step", "is no step", "give its number"))
    id_ = JobId(job.id)
    try:
        found = await api.shell.checkpoints.find(id_, uri, int(step))
        faults = await asyncio.to_thread(
            lambda: faults_of(reach(uri), found[0], job=id_, is_thorough=False)
        )
    except Missing as error:
        return refusal(404, Problem("step", str(error), "sailorctl checkpoint ls lists all"))
    except StorageError as error:
        return _away(error)
    if faults:
        folder = folder_of(id_, found[0].point)
        return refusal(409, *(Problem(folder, fault, "take an older one") for fault in faults[:9]))
    return found


async def _reached(work: Awaitable[T]) -> T | web.Response:
    try:
        return await work
    except StorageError as error:
        return _away(error)


def _away(error: StorageError) -> web.Response:
    cure = "see that it can be reached from here, then try again"
    return refusal(502, Problem("the durable store", str(error), cure))
