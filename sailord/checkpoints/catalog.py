"""The checkpoints of jobs in their storage: write manifests, find, check, pin and delete.

Operations block on the storage, so they run in threads; one at a time per job, so that a checkpoint
is not deleted while it is being pinned.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from agents.daemon.allowed_uris import CHECKPOINTS, check_uri
from agents.protocol.records import Durable, JobId, Point
from sailord.checkpoints.manifest import (
    Manifest,
    folder_of,
    load_manifest,
    manifest_bytes,
    manifest_name,
)
from sailord.checkpoints.object_storage import (
    Away,
    Damaged,
    Missing,
    Storage,
    StorageError,
    open_storage,
)
from sailord.checkpoints.retention import PIN, Folder, folders_of, names_to_delete
from sailord.checkpoints.storage_threads import StorageThreads
from sailord.checkpoints.verify import compose, faults_of
from sailord.core.model.commands import CheckDurable, CollectGarbage, WriteManifest
from sailord.core.model.events import DurableChecked
from simulator.documents.problems import InputError
from worker.checkpoint.manifest import PREFIX, ManifestError

T = TypeVar("T")
FAULTS_SHOWN = 3
WRITE_S = 300.0
"""How long storage may take for a manifest or a pin, and for what was asked of it before."""


@dataclass(eq=False)
class Checkpoints:
    """Access to the checkpoints of all jobs."""

    allowed: tuple[str, ...] = CHECKPOINTS.default
    """The prefixes that the operator allows."""
    threads: StorageThreads = field(default_factory=StorageThreads)
    """For what people ask; if all of these hang, jobs go on."""
    write_s: float = WRITE_S
    _own_threads: StorageThreads = field(
        default_factory=lambda: StorageThreads(patience_s=None, waiting_max=10_000)
    )
    _locks: defaultdict[JobId, asyncio.Lock] = field(
        default_factory=lambda: defaultdict(asyncio.Lock)
    )

    async def write_manifest(self, order: WriteManifest, *, term: int, spec: str) -> Durable:
        """Write the manifest of a checkpoint; raises ``StorageError``."""
        return await self._run_alone(
            order.job.id,
            order.job.saving.uri,
            lambda: _write_manifest(order, term, spec),
            patience_s=self.write_s,
        )

    async def check(self, order: CheckDurable) -> DurableChecked:
        """Find the newest readable checkpoint; a storage that cannot be used is an answer, too."""
        job = order.job
        try:
            return await self._run_alone(job.id, job.saving.uri, lambda: _check(order))
        except StorageError as error:
            is_away = isinstance(error, Away)
            missed = DurableChecked(0.0, job.id, order.durable, None, str(error), is_away)
            return replace(missed, step_max=order.step_max)

    async def collect_garbage(self, order: CollectGarbage) -> int:
        """Delete what retention allows; return the number of objects."""
        uri = order.job.saving.uri
        return await self._run_alone(order.job.id, uri, lambda: _collect_garbage(order))

    async def pin(self, job: JobId, uri: str, point: Point, *, is_pinned: bool) -> None:
        """Pin a checkpoint, which excludes it from retention, or unpin it.

        Raises ``Missing`` if retention has deleted it since it was found.
        """
        await self._run_alone(
            job, uri, lambda: _pin(reach(uri), job, point, is_pinned), patience_s=self.write_s
        )

    async def find(self, job: JobId, uri: str, step: int) -> tuple[Manifest, Durable]:
        """The checkpoint of a step; of several, the latest generation's."""
        return await self.threads.run(lambda: find(self.reach(uri), job, step))

    def reach(self, uri: str) -> Storage:
        """Open a storage where jobs may have checkpoints; raises ``StorageError``."""
        self._check(uri)
        return reach(uri)

    def _check(self, uri: str) -> None:
        try:
            check_uri(uri, self.allowed, CHECKPOINTS, "checkpoint: uri")
        except InputError as error:
            raise StorageError(str(error)) from None

    async def _run_alone(
        self, job: JobId, uri: str | None, act: Callable[[], T], patience_s: float | None = None
    ) -> T:
        """Act in a thread, after all that was asked before; ``Away`` if that takes too long.

        A hanging operation goes on, and nothing else is done for the job meanwhile.
        """

        def checked() -> T:
            if uri is not None:
                self._check(uri)
            return act()

        lock = self._locks[job]

        def end(acting: asyncio.Future[T]) -> None:
            lock.release()
            if not acting.cancelled():
                acting.exception()  # The caller may have left.

        try:
            async with asyncio.timeout(patience_s):
                await lock.acquire()
                acting = asyncio.ensure_future(self._own_threads.run(checked))
                acting.add_done_callback(end)
                return await asyncio.shield(acting)
        except TimeoutError:
            raise Away(f"checkpoint storage has not answered for {patience_s:g} s") from None


def reach(uri: str) -> Storage:
    """Open a storage; an invalid address raises ``StorageError`` too."""
    try:
        return open_storage(uri)
    except InputError as error:
        raise StorageError(str(error)) from None


def _write_manifest(order: WriteManifest, term: int, spec: str) -> Durable:
    assert order.job.saving.uri is not None, "a job that uploads has a uri"
    storage = reach(order.job.saving.uri)
    manifest = compose(storage, order, term=term, spec=spec)
    data, sha256 = manifest_bytes(manifest)
    name = manifest_name(order.job.id, order.point, term)
    storage.write(name, data)
    return Durable(order.point, storage.uri_of(name), sha256)


# ---- finding readable checkpoints ---------------------------------------------------------------


def _check(order: CheckDurable) -> DurableChecked:
    job, wanted = order.job.id, order.durable
    result = DurableChecked(0.0, job, wanted, None, step_max=order.step_max)
    faults_found: list[str] = []
    storage = reach(order.job.saving.uri or wanted.manifest.rpartition(f"/{job}/")[0])
    for durable in candidates(storage, job, wanted):
        if order.step_max is not None and durable.point.step > order.step_max:
            continue
        faults = _faults(storage, job, durable, is_thorough=order.is_thorough)
        if not faults:
            return replace(result, found=durable, why="; ".join(faults_found))
        faults_found += [f"step {durable.point.step} is unreadable: {_name_few(faults)}"]
    until = "" if order.step_max is None else f" of step {order.step_max} or before"
    why_none = f"no readable checkpoint{until} at {storage.uri}"
    return replace(result, why="; ".join(faults_found) or why_none)


def _name_few(faults: list[str]) -> str:
    rest = len(faults) - FAULTS_SHOWN
    more = f" and {rest} more" if rest > 0 else ""
    return ", ".join(faults[:FAULTS_SHOWN]) + more


def _faults(storage: Storage, job: JobId, durable: Durable, *, is_thorough: bool) -> list[str]:
    try:
        manifest = load_manifest(storage, _name_of(storage, durable))
    except (Missing, Damaged, ManifestError) as error:
        return [str(error)]
    if manifest.sha256 != durable.sha256:
        return [f"{durable.manifest} is not the committed manifest"]
    return faults_of(storage, manifest, job=job, is_thorough=is_thorough)


def candidates(storage: Storage, job: JobId, newest: Durable) -> list[Durable]:
    """The newest checkpoint, then its parents; if a parent is unreadable, all older checkpoints."""
    found = [newest]
    while True:
        try:
            parent = load_manifest(storage, _name_of(storage, found[-1])).parent
        except (Missing, Damaged, ManifestError):
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
    """A checkpoint whose manifest is unreadable."""

    point: Point
    manifest: str
    why: str


def complete_at(storage: Storage, job: JobId) -> list[tuple[Manifest, Durable]]:
    """All checkpoints with readable manifests, by step."""
    return look_at(storage, job)[0]


def look_at(
    storage: Storage, job: JobId
) -> tuple[list[tuple[Manifest, Durable]], list[Unreadable]]:
    """All checkpoints by step: those with readable manifests, and the others."""
    found: list[tuple[Manifest, Durable]] = []
    unreadable: list[Unreadable] = []
    for folder in folders_at(storage, job):
        for name in folder.manifests:
            full = f"{folder_of(job, folder.point)}/{name}"
            try:
                manifest = load_manifest(storage, full)
            except (Missing, Damaged, ManifestError) as error:
                unreadable.append(Unreadable(folder.point, storage.uri_of(full), str(error)))
                continue
            durable = Durable(manifest.point, storage.uri_of(full), manifest.sha256)
            found.append((manifest, durable))
    return found, unreadable


def folders_at(storage: Storage, job: JobId) -> list[Folder]:
    """All folders of a job's checkpoints, sorted by point."""
    return folders_of(storage.entries(job))


def find(storage: Storage, job: JobId, step: int) -> tuple[Manifest, Durable]:
    """The checkpoint of a step; of several, that of the latest generation and term."""
    complete, unreadable = look_at(storage, job)
    found = [pair for pair in complete if pair[0].point.step == step]
    if not found:
        known = ", ".join(map(str, sorted({m.point.step for m, _ in complete}))) or "none"
        what = f"{storage.uri} has no checkpoint of step {step} of {job}"
        whys = [each.why for each in unreadable if each.point.step == step]
        if whys:
            what = f"the checkpoint of step {step} is unreadable: {whys[-1]}"
        raise Missing(f"{what}; existing steps: {known}")
    return max(found, key=lambda pair: (pair[0].point.generation, pair[0].term))


def _name_of(storage: Storage, durable: Durable) -> str:
    prefix = f"{storage.uri.rstrip('/')}/"
    if not durable.manifest.startswith(prefix):
        raise StorageError(f"{durable.manifest} is not below {storage.uri}, the job's uri")
    return durable.manifest.removeprefix(prefix)


# ---- retention ----------------------------------------------------------------------------------


def _collect_garbage(order: CollectGarbage) -> int:
    uri = order.job.saving.uri
    if uri is None:
        return 0
    storage, job = reach(uri), order.job.id
    chain, keep = [order.durable], max(order.job.saving.keep, 1)
    referenced: dict[Point, frozenset[str]] = {}
    while len(chain) <= keep:
        try:
            manifest = load_manifest(storage, _name_of(storage, chain[-1]))
        except (Missing, Damaged, ManifestError):
            return 0  # An unreadable manifest may reference any object: delete nothing.
        referenced[manifest.point] = frozenset(each.name for each in manifest.objects)
        if manifest.parent is None or len(chain) == keep:
            break
        chain.append(manifest.parent)
    names = names_to_delete(
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
    folder = folder_of(job, point)
    if not is_pinned:
        storage.delete(f"{folder}/{PIN}")
    elif any(entry.name.startswith(PREFIX) for entry in storage.entries(folder)):
        storage.write(f"{folder}/{PIN}", b"")
    else:
        raise Missing(f"step {point.step} was deleted just now, since newer checkpoints exist")
