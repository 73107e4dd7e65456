"""Stores that are killed, stopped or unreachable."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from agents.store.interface import CreatedAt, Put, StoreUnavailable, WriteUnknown
from tests.agents.store.places import PATIENCE_S, wait_answer

pytestmark = pytest.mark.slow


async def test_a_restarted_server_keeps_all_data(server, prefix):
    store = await server.open()
    await wait_answer(store)
    lease = await store.grant(60)
    await store.put(prefix + "a", b"1", lease=lease.id)
    before = await store.snapshot(prefix)
    server.kill()
    server.start()
    await wait_answer(store)
    assert await store.snapshot(prefix) == before
    assert await store.keep(lease.id)
    await store.close()


async def test_a_watch_survives_a_restart(server, prefix):
    store = await server.open()
    after = (await wait_answer(store)).revision
    async with aclosing(store.watch(prefix, after=after)) as news:
        first = await store.put(prefix + "a", b"1")
        assert (await asyncio.wait_for(anext(news), PATIENCE_S)).revision == first
        waiting = asyncio.create_task(anext(news))
        await asyncio.sleep(0.05)
        server.kill()
        server.start()
        await wait_answer(store)
        second = await store.put(prefix + "a", b"2")
        third = await store.put(prefix + "a", b"3")
        assert (await asyncio.wait_for(waiting, PATIENCE_S)).revision == second
        assert (await asyncio.wait_for(anext(news), PATIENCE_S)).revision == third
    await store.close()


async def test_a_store_that_is_down_is_reported_as_unavailable(server, prefix):
    store = await server.open()
    await wait_answer(store)
    revision = await store.put(prefix + "a", b"1")
    lease = await store.grant(60)
    server.kill()
    write = store.put(prefix + "a", b"2")
    questions = store.get(prefix + "a"), store.snapshot(prefix), store.keep(lease.id)
    written, *answers = await asyncio.gather(write, *questions, return_exceptions=True)
    # The connection may have looked healthy until the write failed.
    assert isinstance(written, StoreUnavailable | WriteUnknown)
    for answer in answers:
        assert isinstance(answer, StoreUnavailable)
    with pytest.raises(StoreUnavailable):
        await store.put(prefix + "a", b"2")
    server.start()
    await wait_answer(store)
    assert (await store.get(prefix + "a")).modified == revision
    await store.close()


async def test_an_unknown_write_is_settled_by_a_compare(server, prefix):
    store = await server.open()
    await wait_answer(store)
    count = 0
    in_doubt = False
    killing = asyncio.create_task(_kill_at_times(server))
    while not killing.done():
        key = f"{prefix}{count:06}"
        try:
            done = await store.transact([CreatedAt(key, 0)], [Put(key, b"")])
        except StoreUnavailable:
            continue  # Not applied.
        except WriteUnknown:
            in_doubt = True  # The same compare settles it.
            continue
        assert done.is_applied or in_doubt, "applied before without an acknowledgement"
        count += 1
        in_doubt = False
    await killing
    await wait_answer(store)
    names = [entry.key for entry in (await store.snapshot(prefix)).entries]
    assert names[:count] == [f"{prefix}{i:06}" for i in range(count)]
    assert len(names) <= count + in_doubt
    await store.close()


async def _kill_at_times(server):
    for pause_s in (0.31, 0.57, 0.43):
        await asyncio.sleep(pause_s)
        server.kill()
        server.start()
        other = await server.open()
        await wait_answer(other)
        await other.close()
