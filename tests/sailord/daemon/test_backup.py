"""`sailord backup` where there is no room."""

from __future__ import annotations

import asyncio
import sqlite3

import pytest

from sailord import backup
from sailord.config import load_config
from simulator.documents.problems import InputError
from tests.sailord.daemon.running import Place


def test_full_disk_is_told_and_leaves_no_part_of_a_backup(tmp_path, monkeypatch):
    def fill(file, _) -> None:
        file.write_bytes(b"a part")
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(backup, "write_backup", fill)
    config, target = load_config(Place(tmp_path).config), tmp_path / "backups" / "store.db"
    target.parent.mkdir()
    with pytest.raises(InputError, match="cannot be written: database or disk is full"):
        asyncio.run(backup.back_up(config, target))
    assert list(target.parent.iterdir()) == []
