"""Handlers of ``/v1/packages``: the packed work folders of scripts, uploaded and read in slices."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from aiohttp import web

from agents.daemon.failpoints import failpoint
from agents.rpc.server import answer_signed
from agents.rpc.unsigned_bodies import read_in_time
from agents.work.package import BYTES_MAX, PART_BYTES, Package, hash_of
from sailord.api.answers.responses import Refusal, answer, refusal
from sailord.api.handlers.agent_reports import refuse_signature
from sailord.api.handlers.context import CONTEXT, ApiContext
from sailord.checkpoints.object_storage import Missing, Storage, open_storage
from simulator.documents.files import parse_document
from simulator.documents.problems import InputError, Problem
from simulator.inputs.work_section import work_of


@dataclass(frozen=True, slots=True)
class PackageView:
    """A package: the work folder of a script, packed."""

    package: str
    """``HASH-BYTES``."""
    part_bytes: int
    """The size of each slice but the last."""
    missing: tuple[int, ...]
    """The slices that are still to be uploaded."""


def package_storage(api: ApiContext) -> Storage:
    """Where packages are kept."""
    storage = open_storage(api.config.packages)
    storage.make_root()
    return storage


async def show_package(request: web.Request) -> web.Response:
    """Show which slices of a package are missing."""
    package, api = _package(request), request.app[CONTEXT]
    api.use_package(str(package))
    storage = package_storage(api)
    missing = await asyncio.to_thread(missing_parts, storage, package)
    return answer(PackageView(str(package), PART_BYTES, missing))


async def put_part(request: web.Request) -> web.Response:
    """Store one slice of a package."""
    package, part = _package(request), _part(request)
    body = await read_in_time(request)
    if not 0 <= part < package.parts or len(body) != package.part_bytes(part):
        what = f"slice {part} of {package.parts} has {len(body)} bytes"
        raise InputError(Problem("body", what, f"send {PART_BYTES} bytes, the rest in the last"))
    failpoint("StorePart")
    api = request.app[CONTEXT]
    api.use_package(str(package))
    storage = package_storage(api)
    if not await asyncio.to_thread(_is_written, storage, _name(package, part), body):
        what, cure = "is stored with other content", "submit again, which checks and deletes it"
        raise Refusal(409, Problem(f"{package}: slice {part}", what, cure))
    return answer(PackageView(str(package), PART_BYTES, ()), status=201)


async def read_part(request: web.Request) -> web.StreamResponse:
    """Return one slice of a package to an agent; the request and the answer are signed."""
    verifier = request.app[CONTEXT].verifier
    return await answer_signed(request, verifier, _read_part, refuse=refuse_signature)


async def _read_part(request: web.Request) -> web.Response:
    package, part = _package(request), _part(request)
    failpoint("ServePart")
    storage = package_storage(request.app[CONTEXT])
    try:
        body = await asyncio.to_thread(storage.read, _name(package, part))
    except Missing:
        return refusal(404, Problem(str(package), "no such slice here"))
    return web.Response(body=body, content_type="application/octet-stream")


def _is_written(storage: Storage, name: str, body: bytes) -> bool:
    """Write a slice, unless the name holds other content."""
    try:
        return storage.read(name) == body
    except Missing:
        storage.write(name, body)
        return True


def missing_parts(storage: Storage, package: Package) -> tuple[int, ...]:
    """The slices of a package that are not stored."""
    there = {entry.name for entry in storage.entries(str(package))}
    return tuple(part for part in range(package.parts) if _file(part) not in there)


def check_package(storage: Storage, name: str) -> None:
    """Raise ``InputError`` unless the whole package is stored and is what its name says."""
    package = Package.named(name)
    place, cure = "job: [work] package", "submit the script itself: sailorctl submit train.py"
    if package is None:
        raise InputError(Problem(place, f"is larger than {BYTES_MAX} bytes", cure))
    if missing_parts(storage, package):
        raise InputError(Problem(place, "was not uploaded here", cure))
    parts = (storage.read(_name(package, part)) for part in range(package.parts))
    if hash_of(parts) != package.sha256:
        for part in range(package.parts):
            storage.delete(_name(package, part))
        raise InputError(Problem(place, "differs from its name; it is deleted", "submit again"))


async def delete_unused(api: ApiContext, storage: Storage, submitted: str) -> None:
    """Delete the packages that no job needs any more; one that failed may be resumed.

    Those that were uploaded or asked for lately stay: another submission may be under way. Only the
    leader knows all jobs. While a record of a job cannot be read, nothing is deleted: another
    version may read it, and let the job go on.
    """
    of_jobs, unreadable = api.own_gateway.keys.jobs, api.own_gateway.unreadable.found
    if api.cluster.state.term is None or any(key.startswith(of_jobs) for key in unreadable):
        return
    needed = {submitted, *api.lately_used_packages()}
    for job in api.cluster.last_led.jobs.values():
        if job.state not in ("done", "cancelled"):
            text = await api.gateway.read_spec(job.id) or ""
            try:
                work = work_of(parse_document(text.encode(), name="job", flaws_raise=False))
            except InputError:
                return  # A newer version wrote it: which package it needs is not known.
            needed.add("" if work is None else work.package)
    needed |= api.lately_used_packages()  # Another may have come while jobs were read.

    def delete() -> None:
        for entry in storage.entries(""):
            if entry.name.partition("/")[0] not in needed:
                storage.delete(entry.name)

    await asyncio.to_thread(delete)


def _package(request: web.Request) -> Package:
    name = request.match_info["package"]
    package = Package.named(name)
    if package is None:
        raise Refusal(404, Problem(name[:80], "names no package", "give HASH-BYTES"))
    return package


def _part(request: web.Request) -> int:
    text = request.match_info["part"]
    if not (text.isascii() and text.isdecimal() and len(text) <= 4):
        raise Refusal(
            404, Problem(text[:20], "is not a slice of the package", "give a whole number")
        )
    return int(text)


def _name(package: Package, part: int) -> str:
    return f"{package}/{_file(part)}"


def _file(part: int) -> str:
    return f"{part:04}"
