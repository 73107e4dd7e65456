"""Data in a script's work folder: links to folders of the node, or to copies of buckets.

A copy is made once on each node for each address; a change in the bucket is not noticed.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path

import fsspec

from agents.work.work_folder import WorkFolder


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
    missing = [
        f"{name} ({where})"
        for name, where in mounts.items()
        if "://" not in where and not Path(where).exists()
    ]
    if missing:
        raise MountError(f"data is missing on this node: {', '.join(missing)}; mount it there")


def copy_data(mounts: Mapping[str, str], cache: Path) -> None:
    """Copy what lies in buckets, unless it is there."""
    for name, uri in mounts.items():
        target = copy_of(cache, uri)
        if "://" not in uri or target.exists():
            continue
        early = target.with_suffix(".new")
        shutil.rmtree(early, ignore_errors=True)
        early.unlink(missing_ok=True)
        try:
            cache.mkdir(parents=True, exist_ok=True)
            files, path = fsspec.core.url_to_fs(uri)
            if files.isdir(path):
                files.get(f"{path.rstrip('/')}/", f"{early}/", recursive=True)
            else:
                files.get_file(path, str(early))
            early.rename(target)
        except Exception as error:
            # Each backend of fsspec raises errors of its own; none of them may end the agent.
            why = str(error).partition("\n")[0] or type(error).__name__
            raise MountError(f"data {name} cannot be copied from {uri}: {why}") from None


def link(folder: WorkFolder, leads_to: Mapping[str, Path]) -> None:
    """Put the links into the work folder."""
    for name, target in leads_to.items():
        place = folder.files / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)
        place.symlink_to(target)
