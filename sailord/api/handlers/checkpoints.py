"""Handlers of a job's checkpoints (list, pin, roll back) and of its reconfiguration timings."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from aiohttp import web

from agents.protocol.records import ENDED, Durable, JobId, Order, Point
from agents.store.interface import StoreError
from sailord.api.answers import types
from sailord.api.answers.responses import Refusal, answer, refusal
from sailord.api.handlers.bodies import check_id, read_object
from sailord.api.handlers.context import CONTEXT, ApiContext
from sailord.api.handlers.jobs import job_of
from sailord.api.handlers.orders import REASON_MAX, named, store_order, tell_given
from sailord.checkpoints.catalog import Checkpoints, Unreadable, folders_at, look_at
from sailord.checkpoints.manifest import Manifest, folder_of
from sailord.checkpoints.object_storage import Missing, StorageError
from sailord.checkpoints.retention import Folder, discarded
from sailord.checkpoints.verify import faults_of
from sailord.core.queries.reconfiguration_timing import ReconfigurationTiming
from sailord.core.queries.replan_triggers import pending_rollback
from sailord.core.queries.restore_choice import newer_in_memory, resume_point
from sailord.notify.outbox import committed_id
from sailord.text.units import counted
from simulator.documents.problems import InputError, Problem

MEND = "mend the storage, or reach it from this host, then ask again"
CheckpointRole = Literal["newest", "ordered", "older", "discarded"]


@dataclass(frozen=True, slots=True)
class CheckpointView:
    """One checkpoint in the storage."""

    step: int
    generation: int
    bytes: int
    manifest: str
    is_durable: bool
    """The one that the job would resume from if no node kept a newer step; older ones are usable,
    too."""
    is_pinned: bool
    samples: int
    label_tokens: int
    role: CheckpointRole
    """``discarded``: a rollback left its steps, and the job has gone another way since."""
    at: float | None
    """When it was committed; null: not known any more."""


@dataclass(frozen=True, slots=True)
class UnreadableView:
    """A checkpoint whose manifest cannot be read, and why."""

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
    """Of uploads that are in progress or were abandoned."""
    trouble: str
    """Why the last upload to the storage failed."""
    unreadable: tuple[UnreadableView, ...]
    """Checkpoints whose manifests cannot be read."""
    keep: int
    """How many of the last checkpoints are kept, besides pinned ones."""
    step_in_memory: int | None = None
    """A step after all checkpoints that nodes keep in memory: the job would resume from it as long
    as they live; null: there is none, or the job has ended."""
    durable_step: int | None = None
    """The step of the last checkpoint that was committed, whether or not the storage has it."""


@dataclass(frozen=True, slots=True)
class Pinned:
    """Whether a checkpoint is excluded from retention."""

    job: str
    step: int
    generation: int
    is_pinned: bool


@dataclass(frozen=True, slots=True)
class Moves:
    """Timings of a job's reconfigurations, oldest first."""

    job: str
    moves: tuple[ReconfigurationTiming, ...]
    store_away_since: float | None = None
    """If set, these come from memory: those of the last leaders, and of this one."""


async def list_moves(request: web.Request) -> web.Response:
    """List the reconfigurations of a job: measured and predicted seconds by phase."""
    api, job = request.app[CONTEXT], job_of(request)
    try:
        history = await api.gateway.read_history(JobId(job.id))
    except StoreError:
        since = api.cluster.store.unavailable_since or api.clock.now()
        return answer(Moves(job.id, api.cluster.moves_of(JobId(job.id)), since))
    return answer(Moves(job.id, tuple(line.move for line in history if line.move is not None)))


async def list_checkpoints(request: web.Request) -> web.Response:
    """List the checkpoints of a job in its storage."""
    api, job = request.app[CONTEXT], job_of(request)
    led = api.cluster.led_of(job.id)
    active = led.active
    trouble = active.checkpointing.trouble if active is not None and active.job == job.id else ""
    if job.saving.uri is None:
        return answer(CheckpointsView(job.id, None, (), 0, trouble, (), job.saving.keep))
    storage = api.cluster.checkpoints
    durable = api.cluster.last_led.durables.get(JobId(job.id))
    step = None if job.state in ENDED else newer_in_memory(led, JobId(job.id))
    try:
        folders, complete, broken = await storage.threads.run(
            _look, storage, job.saving.uri, JobId(job.id)
        )
    except StorageError as error:
        what = f"cannot be read now: {error}; {_known_text(durable, step)}"
        return refusal(502, Problem(f"the checkpoints of {job.id}", what, MEND))
    complete.sort(key=lambda pair: (pair[0].point, pair[0].term))
    ordered = pending_rollback(led, JobId(job.id))
    at_of = api.cluster.outbox.at_of
    shown = _views(JobId(job.id), folders, complete, durable, ordered, at_of)
    unfinished = sum(f.bytes for f in folders.values() if not f.manifests)
    unreadable = tuple(
        UnreadableView(each.point.step, each.point.generation, each.manifest, each.why)
        for each in broken
    )
    uri, keep = job.saving.uri, max(job.saving.keep, 1)
    durable_step = None if durable is None else durable.point.step
    view = CheckpointsView(job.id, uri, shown, unfinished, trouble, unreadable, keep, step)
    return answer(replace(view, durable_step=durable_step))


def _known_text(durable: Durable | None, in_memory: int | None) -> str:
    """Return from which steps the job could go on, as far as sailord knows without the storage."""
    last = "no step is durable" if durable is None else f"step {durable.point.step} is durable"
    return last if in_memory is None else f"{last}, and nodes keep step {in_memory} in memory"


def _look(
    checkpoints: Checkpoints, uri: str, job: JobId
) -> tuple[dict[Point, Folder], list[tuple[Manifest, Durable]], list[Unreadable]]:
    storage = checkpoints.reach(uri)
    folders = {folder.point: folder for folder in folders_at(storage, job)}
    return folders, *look_at(storage, job)


def _views(
    job: JobId,
    folders: Mapping[Point, Folder],
    complete: Sequence[tuple[Manifest, Durable]],
    newest: Durable | None,
    ordered: Durable | None,
    at_of: Mapping[str, float],
) -> tuple[CheckpointView, ...]:
    parents = {m.point: None if m.parent is None else m.parent.point for m, _ in complete}
    left = frozenset[Point]() if newest is None else discarded(parents, newest.point)
    views = []
    for manifest, durable in complete:
        point, progress = manifest.point, manifest.progress
        folder = folders.get(point)
        role: CheckpointRole = "newest" if durable == newest else "older"
        if ordered is not None:
            role = "ordered" if point == ordered.point else "older"
        views.append(
            CheckpointView(
                step=point.step,
                generation=point.generation,
                bytes=manifest.bytes,
                manifest=durable.manifest,
                is_durable=durable == newest,
                is_pinned=folder is not None and folder.is_pinned,
                samples=progress.samples,
                label_tokens=progress.label_tokens,
                role="discarded" if point in left else role,
                at=at_of.get(committed_id(job, durable)),
            )
        )
    return tuple(views)


async def pin_checkpoint(request: web.Request) -> web.Response:
    """Exclude a checkpoint from retention, or include it again."""
    api, job = request.app[CONTEXT], job_of(request)
    is_pinned = request.match_info["order"] == "pin"
    manifest, _ = await _find_checkpoint(api, job, request.match_info["step"])
    assert job.saving.uri is not None, "a checkpoint was found, so the job has a uri"
    id_, point = JobId(job.id), manifest.point
    checkpoints = api.cluster.checkpoints
    try:
        await checkpoints.pin(id_, job.saving.uri, point, is_pinned=is_pinned)
    except Missing as error:
        raise _refuse_missing(id_, error) from None
    done = "pinned" if is_pinned else "unpinned"
    tell_given(request, f"the checkpoint of step {point.step} was {done}", id_)
    return answer(Pinned(job.id, point.step, point.generation, is_pinned))


async def roll_back(request: web.Request) -> web.Response:
    """Order a job to roll back to an older checkpoint and to continue from there."""
    api, job = request.app[CONTEXT], job_of(request)
    body = await read_object(request, {"id": str, "reason": str}, ())
    id_ = body.get("id") or uuid.uuid4().hex
    check_id(id_, "id")
    active = api.cluster.led_of(job.id).active
    is_active = active is not None and active.job == job.id
    if not is_active and job.state not in ("paused", "queued"):
        cure = "a job that has the cluster, waits for it or is paused can be rolled back"
        return refusal(409, Problem(job.id, f"is {job.state}", cure))
    _, durable = await _find_checkpoint(api, job, request.match_info["step"])
    newest = api.cluster.last_led.durables.get(JobId(job.id))
    if newest is not None and durable.point.step > newest.point.step:
        what = f"step {durable.point.step} is beyond the durable step {newest.point.step}"
        return refusal(409, Problem("step", what, "give an older step"))
    reason = (
        body.get("reason", "")[:REASON_MAX]
        or f"rolled back to step {durable.point.step} by an operator"
    )
    order = Order(id_, "rollback", job.id, None, reason, durable)
    led = api.cluster.led_of(job.id)
    step = active.progress.step if active and is_active else resume_point(led, JobId(job.id)).step
    storage = api.cluster.checkpoints
    assert job.saving.uri is not None, "a checkpoint was found, so the job has a uri"
    known: list[Manifest] = []
    with contextlib.suppress(StorageError):  # The order needs only what was read above.
        _, complete, _ = await storage.threads.run(_look, storage, job.saving.uri, JobId(job.id))
        known = [manifest for manifest, _ in complete]
    then = given_up_text(step, durable, newest, known)
    return await store_order(api, named(request, order), then)


def given_up_text(
    reached: int, to: Durable, newest: Durable | None, known: Sequence[Manifest]
) -> str:
    """Return what a rollback costs: the steps that were done since, and their checkpoints."""
    parents = {m.point: None if m.parent is None else m.parent.point for m in known}
    before = frozenset[Point]() if newest is None else discarded(parents, newest.point)
    steps = sorted({point.step for point in discarded(parents, to.point) - before})
    lost = counted(max(reached - to.point.step, 0), "step")
    said = f"it goes back from step {reached} to step {to.point.step}, {lost} lost"
    if not steps:
        return said
    of = "the checkpoint of step" if len(steps) == 1 else "the checkpoints of steps"
    return f"{said}; {of} {', '.join(map(str, steps))} will be discarded"


async def _find_checkpoint(
    api: ApiContext, job: types.JobView, step: str
) -> tuple[Manifest, Durable]:
    """Find the readable checkpoint of a step; raises ``Refusal`` or ``StorageError``."""
    uri = job.saving.uri
    if uri is None:
        cure = "submit the job with a uri under [checkpoint]"
        raise Refusal(409, Problem("job", "has no checkpoint storage", cure))
    if not step.isascii() or not step.isdecimal() or len(step) > 18:
        raise InputError(Problem("step", "invalid step", "give an integer"))
    id_ = JobId(job.id)
    try:
        checkpoints = api.cluster.checkpoints
        found = await checkpoints.find(id_, uri, int(step))
        faults = await checkpoints.threads.run(
            lambda: faults_of(checkpoints.reach(uri), found[0], job=id_, is_thorough=False)
        )
    except Missing as error:
        raise _refuse_missing(id_, error) from None
    if faults:
        folder = folder_of(id_, found[0].point)
        raise Refusal(409, *(Problem(folder, fault, "use an older one") for fault in faults[:9]))
    return found


def _refuse_missing(job: JobId, error: Missing) -> Refusal:
    cure = f"sailorctl checkpoint ls {job} lists all"
    return Refusal(404, Problem(f"job {job}", str(error), cure))
