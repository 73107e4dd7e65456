"""A write that the store will never take: whoever asks is told, and nothing overtakes it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from agents.daemon.clock import Clock
from agents.protocol.records import JobId, JobRecord
from agents.protocol.store_keys import Keys
from agents.store import Put
from agents.store.interface import TRANSACTION_BYTES_MAX
from agents.store.sqlite_store import EmbeddedStore
from sailord.cluster_records import Gateway
from sailord.config import load_config
from sailord.controller.agent_client import Calls
from sailord.controller.loop import Shell
from sailord.core.commands import WriteJob
from sailord.notify.feed import Feed
from sailord.text.cluster_text import status_text
from tests.sailord.daemon.running import Place

JOB = JobRecord(JobId("j"), "queued", 0, 1.0, "its turn")


async def until(holds: Callable[[], bool]) -> None:
    """Wait for it."""
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.01)


def test_a_write_that_is_refused_is_told_until_it_is_settled(tmp_path):
    async def play() -> None:
        store = await EmbeddedStore.open(tmp_path / "store")
        keys, config = Keys("test"), load_config(Place(tmp_path).config)
        await store.transact([], [Put(keys.leader, b"{}")])
        leader = await store.get(keys.leader)
        assert leader is not None
        shell = Shell(config, Gateway(store, keys), Calls(b"k" * 64), Clock(), Feed())
        shell.state = replace(shell.state, term=leader.created)
        writing = asyncio.create_task(shell._write_all())
        too_long = replace(JOB, reason="r" * TRANSACTION_BYTES_MAX)
        for job in (too_long, JOB):
            shell._writes.put_nowait((leader.created, WriteJob(job)))
        await until(lambda: "a transaction takes" in shell.store.refused_write)
        assert await store.get(keys.state(JOB.id)) is None, "nothing overtakes it"
        # Who leads no more has nothing to write, and says nothing of it.
        shell.state = replace(shell.state, term=None)
        await until(lambda: not shell.store.refused_write)
        writing.cancel()
        await store.close()

    asyncio.run(play())


@pytest.mark.parametrize("trouble", ["", "1139012 bytes at once; a transaction takes 1048576"])
def test_status_says_so(trouble):
    status = {
        "cluster": "c", "at": 9.0, "leader": None, "job": None, "queued": 0, "nodes": {},
        "store": {"answers": True, "away_since": None, "trouble": trouble}, "leaving": [],
        "capacity": None, "unheard": [],
    }  # fmt: skip
    assert ("rejects writes" in status_text(status)) == bool(trouble)
    assert trouble in status_text(status)
