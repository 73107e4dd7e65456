"""`sailord backup` where there is no room or no store, and beside a sailord that starts."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest
from click.testing import CliRunner

from agents.store.locations import read_address
from agents.store.sqlite_file import SqliteFile
from sailord import backup, daemon
from sailord.config import load_config
from sailord.main import main
from simulator.documents.problems import InputError
from tests.sailord.daemon.running import Place


def test_full_disk_is_reported_and_leaves_no_part_of_a_backup(tmp_path, monkeypatch):
    def fill(file, _) -> None:
        file.write_bytes(b"a part")
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(backup, "write_backup", fill)
    config, target = load_config(Place(tmp_path).config), tmp_path / "backups" / "store.db"
    config.state.mkdir()
    SqliteFile(Path(read_address(config.store).path)).close()
    target.parent.mkdir()
    with pytest.raises(InputError, match="cannot be written: database or disk is full"):
        asyncio.run(backup.back_up(config, target))
    assert list(target.parent.iterdir()) == []


def test_a_missing_store_does_not_replace_a_backup(tmp_path):
    """The head's disk may have been replaced, and the timer may run before the restore."""
    config, target = load_config(Place(tmp_path).config), tmp_path / "store.backup"
    target.write_text("the last one")
    with pytest.raises(InputError, match="does not exist: nothing to back up"):
        asyncio.run(backup.back_up(config, target))
    assert target.read_text() == "the last one"
    assert not Path(read_address(config.store).path).exists()


def test_a_backup_needs_no_secret(tmp_path):
    """They may lie in systemd's credential store, where the unit alone gets them."""
    place = Place(tmp_path)
    config, target = load_config(place.config), tmp_path / "copy.db"
    config.state.mkdir()
    SqliteFile(Path(read_address(config.store).path)).close()
    for name in ("key", "token"):
        (place.folder / name).unlink()
    done = CliRunner().invoke(main, ["backup", str(target), "--config", str(place.config)])
    assert (done.exit_code, done.output) == (0, f"{target}: 0 entries\n")


def test_a_backup_does_not_replace_the_store_itself(tmp_path):
    """A running sailord would write into a file that has no name any more."""
    config = load_config(Place(tmp_path).config)
    config.state.mkdir()
    place = Path(read_address(config.store).path)
    SqliteFile(place).close()
    (tmp_path / "link").symlink_to(place.parent)
    for named in (place, tmp_path / "link" / place.name):
        with pytest.raises(InputError, match="is the store itself"):
            asyncio.run(backup.back_up(config, named))


async def test_sailord_waits_for_a_backup_that_reads_the_store(tmp_path, monkeypatch):
    """Otherwise it would exit with the code after which systemd starts it no more."""
    config = load_config(Place(tmp_path).config)
    config.state.mkdir()
    held = SqliteFile(Path(read_address(config.store).path))
    monkeypatch.setattr(daemon, "STORE_WAIT_S", 0.0)
    with pytest.raises(InputError, match="stop the process that uses it"):
        await daemon.open_store_of(config)
    monkeypatch.setattr(daemon, "STORE_WAIT_S", 60.0)
    asyncio.get_running_loop().call_later(0.3, held.close)
    store = await daemon.open_store_of(config)
    assert (await store.snapshot("")).entries == ()
    await store.close()
