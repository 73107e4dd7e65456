"""Prepares the node for the job that runs: fetches its work folder, before a generation needs it.

A node that is not prepared in time, or cannot be, is reported as unfit for the job, so that plans
leave it out; others go on. It is prepared in the background and tries again.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from agents.core.model import Event, UnfitChanged
from agents.daemon.allowed_uris import MOUNTS
from agents.daemon.backoff import Backoff
from agents.daemon.clock import Clock
from agents.daemon.error_text import describe_error
from agents.daemon.failpoints import failpoint
from agents.daemon.tasks import Tasks
from agents.protocol.records import LIVE, PREPARING, JobId, JobRecord, JobState
from agents.work.agreement import PackagesDifferError, as_text, check_agreed, installed
from agents.work.archive import ArchiveError, unpack
from agents.work.environment import Commands, SetupError, in_thread, set_up
from agents.work.fetch import FetchError, PackageFetcher
from agents.work.mounts import MountError, check_paths, copy_data, delete_unfinished, link, targets
from agents.work.package import Package
from agents.work.secrets import SecretsError, check_group_reads, find_secrets, read_secrets
from agents.work.work_folder import (
    WorkFolder,
    delete_old,
    packages_of,
    work_folder,
    worker_view,
)
from simulator.documents.files import parse_document
from simulator.documents.problems import InputError
from simulator.inputs.work_section import work_of
from simulator.spec.job import Work

log = structlog.get_logger("sailor-agent")

PATIENCE_S = 2.0
"""A preparation that takes longer makes the node unfit until it is done."""
RETRY_S = 60.0
RETRY_S_MAX = 3600.0
FETCH_AGAIN_S = 2.0
FETCH_AGAIN_S_MAX = 60.0
"""The longest pause between attempts to fetch a package, since sailord may be restarting."""
READ_AGAIN_S = 0.3
EXPECTED = (
    ArchiveError,
    FetchError,
    MountError,
    PackagesDifferError,
    SecretsError,
    SetupError,
    OSError,
)
"""Failures that are logged without a trace."""


@dataclass(eq=False, kw_only=True)
class Preparation:
    """The preparation of this node for one job at a time."""

    folder: Path
    fetcher: PackageFetcher
    read_job: Callable[[JobId], Awaitable[str | None]]
    """Reads a job's text from the store; ``None``: not available now."""
    agreed: Callable[[JobId, str | None], Awaitable[str | None]]
    """Returns the packages of the job's first node, which may be this one; ``None``: not known
    now."""
    feed: Callable[[Event], None]
    clock: Clock
    secrets: Path | None = None
    """The folder with the values of secrets, each a file."""
    commands: Commands | None = None
    """Runs setup commands as the workers' user; ``None``: that is the agent's user."""
    allowed: Sequence[str] = MOUNTS.default
    """Prefixes of URIs where jobs may have data."""
    retry_s: float = RETRY_S
    job: JobId | None = None
    """The job that the node is prepared for."""
    log: Path | None = None
    """What the setup commands of the last job have written."""
    _view: dict[str, Any] | None = None
    """For workers, once it is prepared; empty: there is nothing to prepare."""
    _mounts: Mapping[str, str] = field(default_factory=dict)
    _unfit: str = ""
    _state: JobState | None = None
    """The state of ``job`` when it was last read."""
    _awaited: JobId | None = None
    """The job of a generation that waits for ``view``."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _work: asyncio.Task[None] | None = None
    _one: asyncio.Lock = field(default_factory=asyncio.Lock)
    """One preparation at a time: one that was cancelled still waits for its threads."""
    _tasks: Tasks = field(default_factory=Tasks)

    def __post_init__(self) -> None:
        delete_unfinished(self.folder / "data")

    def look(self, jobs: Mapping[JobId, JobRecord], own: JobId | None = None) -> None:
        """Prepare for the job that runs, or that runs next; for the node's own if jobs share."""
        waiting = [job for job in jobs.values() if job.state == "queued"]
        waiting.sort(key=lambda job: (-job.priority, job.submitted_at, job.id))
        live = [job for job in jobs.values() if job.state in LIVE]
        chosen = next(iter((*live, *waiting)), None) if own is None else jobs[own]
        was, self._state = self._state, None if chosen is None else chosen.state
        awaited = None if self._awaited is None else jobs.get(self._awaited)
        if self._awaited is not None and (awaited is None or awaited.state in (*LIVE, "queued")):
            return  # A newer generation, not read yet, may wait for it.
        if chosen is None or chosen.id != self.job:
            self._begin(None if chosen is None else chosen.id)
        elif (was, chosen.state) == ("held", "running") and self._unfit not in ("", PREPARING):
            self._begin(chosen.id, PREPARING)  # An operator has mended what failed.

    async def view(self, job: JobId) -> Mapping[str, Any] | str:
        """Return the work folder as workers need it; a text: why the node has none."""
        self._awaited = job
        try:
            if job != self.job or not await asyncio.to_thread(self._has_data):
                self._begin(job)
            while job == self.job and self._view is None and not self._unfit:
                self._changed.clear()
                await self._changed.wait()
        finally:
            if self._awaited == job:
                self._awaited = None
        if job != self.job:
            return "the node is prepared for another job by now"
        return self._unfit if self._view is None else self._view

    def _has_data(self) -> bool:
        """Return whether the job's data is still there, if it was."""
        try:
            check_paths(self._mounts if self._view is not None else {})
        except MountError:
            return False
        return True

    def _begin(self, job: JobId | None, unfit: str = "") -> None:
        if self._work is not None:
            self._work.cancel()
        self.job, self._view, self._work = job, None, None
        self._set_unfit(unfit)
        if job is not None:
            self.log = None  # Without a next job, the log of the last one can still be read.
            self._work = self._tasks.start(self._prepare(job))

    def _set_unfit(self, why: str) -> None:
        if why != self._unfit:
            self._unfit = why
            self.feed(UnfitChanged(self.clock.now(), why, self.job))
        self._changed.set()

    async def _prepare(self, job: JobId) -> None:
        """Prepare the node; after a failure try again, forever."""
        backoff, failure = Backoff(self.retry_s, RETRY_S_MAX), ""
        last: tuple[object, ...] = ()
        fetch_backoff = Backoff(min(self.retry_s, FETCH_AGAIN_S), FETCH_AGAIN_S_MAX)
        while self._view is None:
            late: asyncio.Task[None] | None = None
            try:
                work = await self._read(job)
                late = self._tasks.start(self._report_late())
                async with self._one:
                    self._view = {} if work is None else await self._set_up_folder(job, work)
                self._set_unfit("")
            except Exception as error:
                # Whatever a job contains must not end the agent or make it wait forever.
                if late is not None:
                    late.cancel()
                message = describe_error(error, self.folder)
                if (kind := _kind_of(error, message)) != last:  # Report each kind of failure once.
                    last, failure = kind, message
                trace = None if isinstance(error, EXPECTED) else error
                why = str(error)
                log.warning("cannot prepare the work folder", job=job, error=why, exc_info=trace)
                self._set_unfit(failure)
                again = fetch_backoff if isinstance(error, FetchError) else backoff
                await asyncio.sleep(again.next_s())
            finally:
                if late is not None:
                    late.cancel()

    async def _read(self, job: JobId) -> Work | None:
        """Read what the job needs; ``None``: nothing."""
        while (text := await self.read_job(job)) is None:
            await asyncio.sleep(READ_AGAIN_S)
        try:
            return work_of(parse_document(text.encode(), name="job", flaws_raise=False))
        except InputError:
            return None  # The generation that trains the job reports it.

    async def _report_late(self) -> None:
        await asyncio.sleep(PATIENCE_S)
        # A retry after a failure counts as preparing, too: the job is not held meanwhile.
        self._set_unfit(PREPARING)

    async def _set_up_folder(self, job: JobId, work: Work) -> dict[str, Any]:
        folder = work_folder(self.folder / "folders", work)
        self.log = folder.log
        secrets = find_secrets(self.secrets, work.secrets)
        if self.commands is not None:
            check_group_reads(secrets, os.getegid())
        self._mounts = dict(work.mounts)
        await in_thread(check_paths, self._mounts)
        data = self.folder / "data"
        await copy_data(self._mounts, data, self.allowed)
        leads_to = targets(self._mounts, data)
        copies = [path for path in leads_to.values() if path.parent == data]
        if copies:
            await in_thread(delete_old, data, copies)
        if folder.is_ready:
            os.utime(folder.home)  # The oldest are deleted first.
        else:
            await self._make(job, folder, work, read_secrets(secrets), leads_to)
        if work.setup:
            versions = await in_thread(installed, packages_of(folder.environment))
            try:
                check_agreed(versions, await self._wait_agreed(job, as_text(versions)))
            except PackagesDifferError:
                await in_thread(folder.reject)
                raise
        return worker_view(folder, secrets)

    async def _wait_agreed(self, job: JobId, mine: str | None) -> str:
        while (found := await self.agreed(job, mine)) is None:
            await asyncio.sleep(READ_AGAIN_S)
        return found

    async def _make(
        self,
        job: JobId,
        folder: WorkFolder,
        work: Work,
        secrets: Mapping[str, str],
        leads_to: Mapping[str, Path],
    ) -> None:
        packed = await self._fetch(work.package) if work.package else None
        if self.commands is not None:
            await self.commands.end_all()
        await in_thread(folder.begin)
        if packed is None:
            folder.files.mkdir()
        else:
            await in_thread(unpack, packed, folder.files)
        await in_thread(link, folder, leads_to)
        if self.commands is not None:
            await in_thread(folder.share, with_environment=bool(work.setup))
        if work.setup:
            first = await self._wait_agreed(job, None)
            if first:
                folder.constraints.write_text(first, encoding="utf-8")
            await set_up(folder, work.setup, secrets, self.commands)
        failpoint("prepared")
        await in_thread(folder.finish)
        await in_thread(delete_old, folder.home.parent, [folder.home])
        if packed is not None:
            await in_thread(delete_old, packed.parent, [packed])

    async def _fetch(self, name: str) -> Path:
        package = Package.named(name)
        if package is None:
            raise FetchError(f"{name} names no package")
        return await self.fetcher.fetch(package)

    def close(self) -> None:
        """End the preparation."""
        self._tasks.cancel()


def _kind_of(error: Exception, message: str) -> tuple[object, ...]:
    """Return the kind of a failure: without its details, which follow a colon."""
    return type(error), getattr(error, "errno", None), message.partition(": ")[0]
