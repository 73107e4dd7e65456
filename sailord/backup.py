"""Backs up the embedded store, also while sailord runs."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from pathlib import Path

from agents.store.factory import open_store
from agents.store.interface import Snapshot, StoreError, StoreUnavailable
from agents.store.locations import Etcd, read_address
from agents.store.sqlite_file import write_backup
from sailord.config import Config
from simulator.documents.problems import InputError, Problem


async def back_up(config: Config, file: Path) -> int:
    """Write all entries that have no lease to a new file; return how many there are."""
    place = read_address(config.store)
    if isinstance(place, Etcd):
        cure = "back etcd up with `etcdctl snapshot save FILE` (docs/operations.md)"
        raise InputError(Problem("store", "is not embedded", cure))
    if place.kind == "embedded" and not place.path.exists():
        # To open it would make an empty one, which would replace the last good backup.
        cure = "check state and store in the configuration, or restore a backup first"
        raise InputError(Problem(str(place.path), "does not exist: nothing to back up", cure))
    try:
        world = await _read(config)
    except StoreError as error:
        raise InputError(Problem("store", str(error))) from None
    early = file.with_name(f".{file.name}.new")
    early.unlink(missing_ok=True)
    try:
        await asyncio.to_thread(write_backup, early, world)
        os.replace(early, file)
    except (OSError, sqlite3.Error) as error:
        early.unlink(missing_ok=True)
        what = f"cannot be written: {getattr(error, 'strerror', None) or error}"
        raise InputError(Problem(str(file), what, "name a file in a folder of yours")) from None
    return sum(not entry.lease for entry in world.entries)


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
