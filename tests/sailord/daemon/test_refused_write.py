"""A write that the store always refuses is reported, and no later write overtakes it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from agents.daemon.clock import Clock
from agents.protocol.records import JobId, JobRecord
from agents.protocol.store_keys import Keys
from agents.store.interface import TRANSACTION_BYTES_MAX, Put
from agents.store.sqlite_store import EmbeddedStore
from sailord.cluster_records import Gateway
from sailord.config import load_config
from sailord.controller.loop import build_controller
from sailord.core.model.commands import WriteJob
from sailord.text.cluster_text import status_text
from tests.sailord.daemon.running import Place

JOB = JobRecord(JobId("j"), "queued", 0, 1.0, "its turn")


async def until(holds: Callable[[], bool]) -> None:
    """Wait until it holds."""
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.01)


def test_refused_write_is_reported_until_it_is_settled(tmp_path):
    async def play() -> None:
        store = await EmbeddedStore.open(tmp_path / "store")
        keys, config = Keys("test"), load_config(Place(tmp_path).config)
        await store.transact([], [Put(keys.leader, b"{}")])
        leader = await store.get(keys.leader)
        assert leader is not None
        gateway = Gateway(store, keys)
        controller = build_controller(config, gateway, Clock(), b"k" * 64)
        writer, cluster = controller.writer, controller.cluster
        cluster.state = replace(cluster.state, term=leader.created)
        writing = asyncio.create_task(writer.run())
        too_long = replace(JOB, reason="r" * TRANSACTION_BYTES_MAX)
        for job in (too_long, JOB):
            writer.put(leader.created, WriteJob(job))
        await until(lambda: "a transaction of" in cluster.store.refused_write)
        assert await store.get(keys.state(JOB.id)) is None, "no later write overtakes it"
        # After its term the write is dropped and no longer reported.
        cluster.state = replace(cluster.state, term=None)
        await until(lambda: not cluster.store.refused_write)
        writing.cancel()
        await store.close()

    asyncio.run(play())


@pytest.mark.parametrize("trouble", ["", "a transaction of 1139012 bytes; the limit is 1048576"])
def test_status_shows_a_refused_write(trouble):
    status = {
        "cluster": "c", "at": 9.0, "leader": None, "job": None, "queued": 0, "nodes": {},
        "store": {"answers": True, "away_since": None, "trouble": trouble}, "leaving": [],
        "capacity": None, "unheard": [], "unsound": {},
    }  # fmt: skip
    assert ("rejects writes" in status_text(status)) == bool(trouble)
    assert trouble in status_text(status)
