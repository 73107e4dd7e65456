"""Backs up the embedded store, also while sailord runs."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

from agents.store.factory import open_store
from agents.store.interface import Snapshot, StoreError, StoreUnavailable
from agents.store.locations import Etcd, read_address
from agents.store.sqlite_file import write_backup
from sailord.config import Config
from simulator.documents.problems import InputError, Problem
from worker.atomic_file import OWNER_ONLY, replacing


async def back_up(config: Config, file: Path) -> int:
    """Write all entries that have no lease to a new file; return how many there are."""
    place = read_address(config.store)
    if isinstance(place, Etcd):
        cure = "back etcd up with `etcdctl snapshot save FILE` (docs/operations.md)"
        raise InputError(Problem("store", "is not embedded", cure))
    if place.kind == "embedded" and file.resolve() == place.path.resolve():
        # A running sailord would go on writing into the file that was replaced, and lose it all.
        raise InputError(Problem(str(file), "is the store itself", "name another file"))
    if place.kind == "embedded" and not place.path.exists():
        # To open it would make an empty one, which would replace the last good backup.
        cure = "check state and store in the configuration, or restore a backup first"
        raise InputError(Problem(str(place.path), "does not exist: nothing to back up", cure))
    try:
        world = await _read(config)
    except StoreError as error:
        raise InputError(Problem("store", str(error))) from None
    try:
        await asyncio.to_thread(_write, file, world)
    except (OSError, sqlite3.Error) as error:
        what = f"cannot be written: {getattr(error, 'strerror', None) or error}"
        raise InputError(Problem(str(file), what, "name a file in a folder of yours")) from None
    return sum(not entry.lease for entry in world.entries)


def _write(file: Path, world: Snapshot) -> None:
    with replacing(file, mode=OWNER_ONLY) as early:
        write_backup(Path(early.name), world)


async def _read(config: Config) -> Snapshot:
    """Read the whole store: from its owner, which runs, or else from the file."""
    try:
        store = await open_store(config.store)
    except StoreUnavailable:
        store = await open_store(f"unix://{config.store_socket}")
    try:
        return await store.snapshot("")
    finally:
        await store.close()
