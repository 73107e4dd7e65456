"""A store of its own for a test, and a leader in it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from agents.protocol.store_keys import Keys
from agents.store.factory import open_store
from agents.store.interface import Put
from sailord.cluster_records import Gateway

TEST = Keys("test")


def in_a_store(tmp_path: Path, play: Callable[[Gateway], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        store = await open_store(f"embedded://{tmp_path}/store.db")
        try:
            return await play(Gateway(store, TEST))
        finally:
            await store.close()

    return asyncio.run(run())


async def lead(gateway: Gateway) -> int:
    await gateway.store.transact([], [Put(TEST.leader, b"me")])
    entry = await gateway.store.get(TEST.leader)
    assert entry is not None
    return entry.created
