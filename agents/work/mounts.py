"""Data in a script's work folder: links to folders of the node, or to copies of buckets.

A copy is made once on each node for each address; a change in the bucket is not noticed.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from agents.daemon.allowed_uris import MOUNTS, check_uri
from agents.work.public_https import open_allowed
from agents.work.work_folder import UNFINISHED, WorkFolder
from simulator.documents.problems import InputError


class MountError(Exception):
    """Data is missing on the node; the message says which, and where it should be."""


def copy_of(cache: Path, uri: str) -> Path:
    """Return where the copy of a bucket's file or folder lies on the node."""
    return cache / hashlib.sha256(uri.encode()).hexdigest()[:24]


def targets(mounts: Mapping[str, str], cache: Path) -> dict[str, Path]:
    """Return where each mount leads to on the node."""
    return {
        name: copy_of(cache, where) if "://" in where else Path(where)
        for name, where in mounts.items()
    }


def check_paths(mounts: Mapping[str, str]) -> None:
    """Raise ``MountError`` unless the folders and files of the node are there."""
    missing = []
    for name, where in mounts.items():
        if "://" in where:
            continue
        try:
            os.stat(where)
        except OSError as error:  # A dead mount has errors of its own.
            why = "" if isinstance(error, FileNotFoundError) else f": {error.strerror}"
            missing.append(f"{name} ({where}{why})")
    if missing:
        raise MountError(f"data is missing on this node: {', '.join(missing)}; mount it there")


async def copy_data(mounts: Mapping[str, str], cache: Path, allowed: Sequence[str]) -> None:
    """Copy data from allowed buckets, unless it is already here.

    A copy stays in use after the operator has shortened the list, so that a running job goes on;
    sailord checks new jobs by its present list.

    A thread cannot be cancelled, so each attempt copies into a folder of its own, which is renamed
    at the end unless the attempt was cancelled.
    """
    for name, uri in mounts.items():
        target = copy_of(cache, uri)
        if "://" not in uri:
            continue
        if target.exists():
            os.utime(target)  # The oldest are deleted first.
            continue
        _check(name, uri, allowed)
        cache.mkdir(parents=True, exist_ok=True)
        early = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=cache))
        copying = asyncio.ensure_future(
            asyncio.to_thread(_copy, name, uri, early / "copy", allowed)
        )
        try:
            await asyncio.shield(copying)
            (early / "copy").rename(target)
        finally:
            copying.add_done_callback(functools.partial(_delete, early))


def _check(name: str, uri: str, allowed: Sequence[str]) -> None:
    try:
        check_uri(uri, allowed, MOUNTS, f"data {name}")
    except InputError as error:
        raise MountError(str(error)) from None


def _copy(name: str, uri: str, target: Path, allowed: Sequence[str]) -> None:
    try:
        files, path = open_allowed(uri, allowed)
        if files.isdir(path):
            files.get(f"{path.rstrip('/')}/", f"{target}/", recursive=True)
        else:
            files.get_file(path, str(target))
        if not target.exists():
            raise FileNotFoundError("it is empty")
        os.sync()
    except Exception as error:
        # Each backend of fsspec raises errors of its own; none of them may end the agent.
        why = str(error).partition("\n")[0] or type(error).__name__
        raise MountError(f"data {name} cannot be copied from {uri}: {why}") from None


def _delete(early: Path, _: object) -> None:
    asyncio.get_running_loop().run_in_executor(None, shutil.rmtree, early, True)


def delete_unfinished(cache: Path) -> None:
    """Delete what an agent that was killed has copied in part."""
    for early in cache.glob(f"{UNFINISHED}*"):
        shutil.rmtree(early, ignore_errors=True)


def link(folder: WorkFolder, leads_to: Mapping[str, Path]) -> None:
    """Put the links into the work folder."""
    for name, target in leads_to.items():
        place = folder.files / name
        above = next((each for each in _above(place, folder.files) if each.is_symlink()), None)
        if above is not None:
            what = f"lies below {above.relative_to(folder.files)}, a link of the work folder"
            raise MountError(f"data {name} {what}; mount it elsewhere")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)
        place.symlink_to(target)


def _above(place: Path, root: Path) -> Iterator[Path]:
    return (each for each in place.parents if each != root and each.is_relative_to(root))
