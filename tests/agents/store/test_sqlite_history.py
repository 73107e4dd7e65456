"""The changes that the embedded store keeps for watches: how many, and how many bytes."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import aclosing

import pytest

from agents.store.interface import Changed, Compacted, Put
from agents.store.sqlite_file import READ_AT_ONCE, SqliteFile, Transaction
from agents.store.sqlite_store import EmbeddedStore
from tests.agents.store.places import HISTORY_MAX, PATIENCE_S

BYTES_MAX = 10_000
KEY = "/key"
LONG = b"x" * (1_000 - len(KEY))
KEPT = BYTES_MAX // 1_000
"""Changes of ``KEY`` to ``LONG`` that are kept."""


@pytest.fixture
def file(tmp_path):
    return tmp_path / "store.db"


async def open_store(file):
    return await EmbeddedStore.open(file, history_max=HISTORY_MAX, history_bytes_max=BYTES_MAX)


async def write(store, values):
    for value in values:
        last = await store.put(KEY, value)
    return last


async def resume(store, after, count):
    """Return the revisions that a watch sees, or ``Compacted``."""
    seen = []
    async with asyncio.timeout(PATIENCE_S), aclosing(store.watch("", after=after)) as news:
        while len(seen) < count:
            told = await anext(news)
            if isinstance(told, Compacted):
                return told
            seen.append(told.revision)
    return seen


def kept_in(file):
    """Return how many changes a closed file keeps, and their bytes."""
    base = sqlite3.connect(file)
    found = base.execute("SELECT count(*), sum(length(key) + length(value)) FROM changes")
    row = found.fetchone()
    base.close()
    return row


@pytest.mark.parametrize(
    ("value", "kept"), [(b"", HISTORY_MAX), (LONG, KEPT)], ids=["by number", "by bytes"]
)
async def test_a_watch_resumes_within_the_history_and_not_before_it(file, value, kept):
    store = await open_store(file)
    last = await write(store, [value] * 3 * HISTORY_MAX)
    for _ in range(2):
        assert await resume(store, last - kept, kept) == list(range(last - kept + 1, last + 1))
        assert await resume(store, last - kept - 1, 1) == Compacted(last)
        await store.close()
        assert kept_in(file) == (kept, kept * (len(KEY) + len(value)))
        store = await open_store(file)  # And the same after a restart.
    await store.close()


async def test_a_restarted_store_counts_what_the_file_keeps(file):
    store = await open_store(file)
    await write(store, [LONG] * KEPT)
    await store.close()
    store = await open_store(file)
    last = await write(store, [LONG] * 3)
    assert await resume(store, last - KEPT, KEPT) == list(range(last - KEPT + 1, last + 1))
    assert await resume(store, last - KEPT - 1, 1) == Compacted(last)
    await store.close()


async def test_a_longer_history_of_an_earlier_release_is_cut_at_the_next_write(file):
    store = await EmbeddedStore.open(file)
    await write(store, [LONG] * 3 * HISTORY_MAX)
    await store.close()
    store = await open_store(file)
    last = await write(store, [LONG])
    assert await resume(store, last - KEPT - 1, 1) == Compacted(last)
    await store.close()
    assert kept_in(file)[0] == KEPT


async def test_a_live_watch_sees_a_change_that_is_larger_than_the_history(file):
    store = await open_store(file)
    after = await write(store, [LONG])
    async with aclosing(store.watch(KEY, after=after)) as news:
        for size in (2 * BYTES_MAX, 1):
            waiting = asyncio.create_task(anext(news))
            revision = await store.put(KEY, b"x" * size)
            told = await asyncio.wait_for(waiting, PATIENCE_S)
            assert isinstance(told, Changed)
            assert told.revision == revision
            assert len(told.changes[0].entry.value) == size
    await store.close()


async def test_a_watch_far_behind_reads_the_file_in_parts_and_then_goes_on_live(file):
    store = await EmbeddedStore.open(file)
    count = 2 * READ_AT_ONCE + READ_AT_ONCE // 2
    await write(store, [b""] * count)
    watching = asyncio.create_task(resume(store, 0, count + 3))
    await write(store, [b""] * 3)
    assert await watching == list(range(1, count + 4))
    await store.close()


def test_a_batch_that_is_rolled_back_does_not_count(file):
    ledger = SqliteFile(file, history_max=HISTORY_MAX, history_bytes_max=BYTES_MAX)
    good = Transaction((), (Put(KEY, LONG),))
    ledger.apply([good] * (KEPT - 1))
    with pytest.raises(UnicodeEncodeError):  # As a bug would.
        ledger.apply([*[good] * KEPT, Transaction((), (Put("\ud800", b""),))])
    ledger.apply([good])
    assert ledger.compacted == 0
    ledger.apply([good])
    assert ledger.compacted == 1
    ledger.close()


def test_pages_of_deleted_changes_are_used_again(file):
    ledger = SqliteFile(file, history_max=HISTORY_MAX, history_bytes_max=1_000_000)
    sizes = []
    for _ in range(4):
        for number in range(200):
            ledger.apply([Transaction((), (Put(KEY, b"x" * (1 + number * 7_919 % 40_000)),))])
        sizes.append(ledger._number("PRAGMA page_count"))
    assert sizes[1:] == sizes[1:2] * 3
    ledger.close()
