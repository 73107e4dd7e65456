"""The durable store as sailord uses it: manifests written, read, checked, and what is old removed.

Everything blocks on somebody else's disks, so it runs in threads; one thing of a job at a time, so
that nobody removes what another has just pinned.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from agents.protocol.records import Durable, JobId, Point
from sailord.checkpoints.manifest import (
    Manifest,
    ManifestError,
    folder_of,
    load_manifest,
    manifest_bytes,
    manifest_name,
)
from sailord.checkpoints.object_storage import Away, Missing, Storage, StorageError, open_storage
from sailord.checkpoints.retention import PIN, Folder, folders_of, garbage
from sailord.checkpoints.verify import compose, faults_of
from sailord.core.commands import CheckDurable, CollectGarbage, WriteManifest
from sailord.core.events import DurableChecked
from simulator.documents.problems import InputError

T = TypeVar("T")
FAULTS_TOLD = 3


@dataclass(eq=False)
class Checkpoints:
    """One sailord's way to where checkpoints are."""

    _locks: defaultdict[JobId, asyncio.Lock] = field(
        default_factory=lambda: defaultdict(asyncio.Lock)
    )

    async def write_manifest(self, order: WriteManifest, *, term: int, spec: str) -> Durable:
        """Write the manifest of a checkpoint; ``StorageError`` says why that cannot be."""
        return await self._alone(order.job.id, lambda: _describe(order, term, spec))

    async def check(self, order: CheckDurable) -> DurableChecked:
        """Find the newest checkpoint that can be read."""
        return await self._alone(order.job.id, lambda: _check(order))

    async def collect_garbage(self, order: CollectGarbage) -> int:
        """Remove what nobody will ask for again; how many objects that were."""
        return await self._alone(order.job.id, lambda: _sweep(order))

    async def folders(self, job: JobId, uri: str) -> list[Folder]:
        """Everything that stands there of a job."""
        return await asyncio.to_thread(lambda: folders_at(reach(uri), job))

    async def pin(self, job: JobId, uri: str, point: Point, *, is_pinned: bool) -> None:
        """Keep a checkpoint until it is unpinned, or no longer."""
        await self._alone(job, lambda: _pin(reach(uri), job, point, is_pinned))

    async def find(self, job: JobId, uri: str, step: int) -> tuple[Manifest, Durable]:
        """The committed or complete checkpoint of a step, of the latest generation that has one."""
        return await asyncio.to_thread(lambda: find(reach(uri), job, step))

    async def _alone(self, job: JobId, act: Callable[[], T]) -> T:
        async with self._locks[job]:
            return await asyncio.to_thread(act)


def reach(uri: str) -> Storage:
    """Open a place; what makes it none is told as what is wrong with the storage."""
    try:
        return open_storage(uri)
    except InputError as error:
        raise StorageError(str(error)) from None


def _describe(order: WriteManifest, term: int, spec: str) -> Durable:
    assert order.job.saving.uri is not None, "who uploads has a place"
    storage = reach(order.job.saving.uri)
    manifest = compose(storage, order, term=term, spec=spec)
    data, sha256 = manifest_bytes(manifest)
    name = manifest_name(order.job.id, order.point, term)
    storage.write(name, data)
    return Durable(order.point, storage.uri_of(name), sha256)


# ---- which can be read --------------------------------------------------------------------------


def _check(order: CheckDurable) -> DurableChecked:
    job, wanted = order.job.id, order.durable
    result = DurableChecked(0.0, job, wanted, None)
    told: list[str] = []
    try:
        storage = reach(order.job.saving.uri or wanted.manifest.rpartition(f"/{job}/")[0])
        for durable in candidates(storage, job, wanted):
            faults = _faults(storage, job, durable, is_thorough=order.is_thorough)
            if not faults:
                return replace(result, found=durable, why="; ".join(told))
            told += [f"step {durable.point.step} cannot be read: {_few(faults)}"]
    except Away as error:
        return replace(result, why=str(error), is_away=True)
    except StorageError as error:
        return replace(result, why=str(error))
    return replace(result, why="; ".join(told) or f"no checkpoint is left at {storage.uri}")


def _few(faults: list[str]) -> str:
    rest = len(faults) - FAULTS_TOLD
    more = f" and {rest} more" if rest > 0 else ""
    return ", ".join(faults[:FAULTS_TOLD]) + more


def _faults(storage: Storage, job: JobId, durable: Durable, *, is_thorough: bool) -> list[str]:
    try:
        manifest = load_manifest(storage, _name_of(storage, durable))
    except Missing as error:
        return [str(error)]
    except ManifestError as error:
        return [str(error)]
    if manifest.sha256 != durable.sha256:
        return [f"{durable.manifest} is not the manifest that was committed"]
    return faults_of(storage, manifest, job=job, is_thorough=is_thorough)


def candidates(storage: Storage, job: JobId, newest: Durable) -> list[Durable]:
    """The newest checkpoint and then older ones: its parents, and where their line breaks, all."""
    found = [newest]
    while True:
        try:
            parent = load_manifest(storage, _name_of(storage, found[-1])).parent
        except (Missing, ManifestError):
            break
        if parent is None:
            return found
        found.append(parent)
    older = [
        durable
        for _, durable in complete_at(storage, job)
        if durable.point.step < found[-1].point.step
    ]
    return found + sorted(older, key=lambda d: (d.point.generation, d.point.step), reverse=True)


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A checkpoint's manifest that is there and says nothing."""

    point: Point
    manifest: str
    why: str


def complete_at(storage: Storage, job: JobId) -> list[tuple[Manifest, Durable]]:
    """All checkpoints whose manifests can be read, by step."""
    return look_at(storage, job)[0]


def look_at(
    storage: Storage, job: JobId
) -> tuple[list[tuple[Manifest, Durable]], list[Unreadable]]:
    """All checkpoints by step: those whose manifests can be read, and those that cannot."""
    found: list[tuple[Manifest, Durable]] = []
    unreadable: list[Unreadable] = []
    for folder in folders_at(storage, job):
        for name in folder.manifests:
            full = f"{folder_of(job, folder.point)}/{name}"
            try:
                manifest = load_manifest(storage, full)
            except (Missing, ManifestError) as error:
                unreadable.append(Unreadable(folder.point, storage.uri_of(full), str(error)))
                continue
            durable = Durable(manifest.point, storage.uri_of(full), manifest.sha256)
            found.append((manifest, durable))
    return found, unreadable


def folders_at(storage: Storage, job: JobId) -> list[Folder]:
    """Everything that stands there of a job, sorted by points."""
    return folders_of(storage.entries(job))


def find(storage: Storage, job: JobId, step: int) -> tuple[Manifest, Durable]:
    """The checkpoint of a step; of several, the one of the latest generation and term."""
    complete, unreadable = look_at(storage, job)
    found = [pair for pair in complete if pair[0].point.step == step]
    if not found:
        known = ", ".join(map(str, sorted({m.point.step for m, _ in complete}))) or "none"
        what = f"{storage.uri} has no checkpoint of step {step} of {job}"
        whys = [each.why for each in unreadable if each.point.step == step]
        if whys:
            what = f"the checkpoint of step {step} cannot be read: {whys[-1]}"
        raise Missing(f"{what}; there are: {known}")
    return max(found, key=lambda pair: (pair[0].point.generation, pair[0].term))


def _name_of(storage: Storage, durable: Durable) -> str:
    prefix = f"{storage.uri.rstrip('/')}/"
    if not durable.manifest.startswith(prefix):
        raise StorageError(f"{durable.manifest} is not below {storage.uri}, where the job keeps")
    return durable.manifest.removeprefix(prefix)


# ---- what is old --------------------------------------------------------------------------------


def _sweep(order: CollectGarbage) -> int:
    uri = order.job.saving.uri
    if uri is None:
        return 0
    storage, job = reach(uri), order.job.id
    chain, keep = [order.durable], max(order.job.saving.keep, 1)
    referenced: dict[Point, frozenset[str]] = {}
    while len(chain) <= keep:
        try:
            manifest = load_manifest(storage, _name_of(storage, chain[-1]))
        except (Missing, ManifestError):
            return 0  # What cannot be read may name anything: nothing is removed.
        referenced[manifest.point] = frozenset(each.name for each in manifest.objects)
        if manifest.parent is None or len(chain) == keep:
            break
        chain.append(manifest.parent)
    names = garbage(
        job,
        folders_at(storage, job),
        chain,
        generation=order.record.number,
        restore=order.record.restore.point,
        keep=keep,
        referenced=referenced,
    )
    for name in names:
        storage.delete(name)
    return len(names)


def _pin(storage: Storage, job: JobId, point: Point, is_pinned: bool) -> None:
    name = f"{folder_of(job, point)}/{PIN}"
    if is_pinned:
        storage.write(name, b"")
    else:
        storage.delete(name)
