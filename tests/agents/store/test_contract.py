"""What every store must do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from random import Random

import pytest

from agents.store.interface import (
    Change,
    Changed,
    Compacted,
    CreatedAt,
    Delete,
    Entry,
    LeaseGone,
    LeaseIs,
    ModifiedAt,
    Put,
    ValueIs,
    WriteRejected,
)
from tests.agents.store.places import PATIENCE_S


async def next_of(news: AsyncGenerator[Changed | Compacted, None]) -> Changed | Compacted:
    """Return the next item of a watch."""
    return await asyncio.wait_for(anext(news), PATIENCE_S)


async def test_a_put_is_read_back_with_its_revisions(store, prefix):
    assert await store.get(prefix + "a") is None
    first = await store.put(prefix + "a", b"1")
    assert await store.get(prefix + "a") == Entry(prefix + "a", b"1", first, first)
    second = await store.put(prefix + "a", b"2")
    assert second == first + 1
    assert await store.get(prefix + "a") == Entry(prefix + "a", b"2", first, second)


async def test_keys_and_values_of_any_bytes_are_kept(store, prefix):
    value = bytes(range(256)) * 1000
    key = prefix + "größe/\N{GRINNING FACE} a b%2F"
    await store.put(key, value)
    await store.put(prefix + "empty", b"")
    assert (await store.get(key)).value == value
    assert (await store.get(prefix + "empty")).value == b""


async def test_a_snapshot_holds_all_keys_of_a_prefix_in_order(store, prefix):
    for name in ("b", "a", "a/x", "aa", "\U0010ffff", "\uffee"):
        await store.put(prefix + name, name.encode())
    await store.put(prefix[:-1] + "0", b"the next key behind the prefix")
    snapshot = await store.snapshot(prefix)
    names = [entry.key.removeprefix(prefix) for entry in snapshot.entries]
    assert names == ["a", "a/x", "aa", "b", "\uffee", "\U0010ffff"]
    assert snapshot.revision >= max(entry.modified for entry in snapshot.entries)
    assert (await store.snapshot(prefix + "nothing")).entries == ()
    everything = await store.snapshot("")
    assert {entry.key for entry in everything.entries} > {entry.key for entry in snapshot.entries}


async def test_a_transaction_is_applied_in_one_revision(store, prefix):
    await store.put(prefix + "old", b"")
    orders = [Put(prefix + "x", b"1"), Delete(prefix + "old"), Put(prefix + "y", b"2")]
    done = await store.transact([], orders)
    assert done.is_applied
    x, y = (await store.snapshot(prefix)).entries
    assert (x.modified, y.modified) == (done.revision, done.revision)
    assert (x.created, y.created) == (done.revision, done.revision)


async def test_a_transaction_without_changes_has_no_revision(store, prefix):
    revision = await store.put(prefix + "a", b"")
    assert (await store.transact([], [Delete(prefix + "none")])).revision == revision
    assert (await store.transact([], [])).is_applied
    assert await store.put(prefix + "a", b"") == revision + 1


async def test_a_transaction_is_applied_only_if_its_compares_hold(store, prefix):
    lease = await store.grant(60)
    made = await store.put(prefix + "a", b"1")
    changed = await store.put(prefix + "a", b"2", lease=lease.id)
    a, none = prefix + "a", prefix + "none"
    holding = [
        *(ModifiedAt(a, changed), CreatedAt(a, made), ValueIs(a, b"2"), LeaseIs(a, lease.id)),
        *(ModifiedAt(none, 0), CreatedAt(none, 0)),
    ]
    failing = [
        *(ModifiedAt(a, made), ModifiedAt(a, 0), CreatedAt(a, changed), CreatedAt(a, 0)),
        *(ValueIs(a, b"1"), ValueIs(a, b""), LeaseIs(a, 0), LeaseIs(a, lease.id + 1)),
        *(ModifiedAt(none, changed), CreatedAt(none, changed), ValueIs(none, b"")),
        LeaseIs(none, 0),
    ]
    for compare in failing:
        done = await store.transact([*holding, compare], [Delete(a), Put(none, b"")])
        assert not done.is_applied, compare
        assert await store.get(none) is None, compare
        assert (await store.get(a)).modified == changed, compare
    for compare in holding:
        assert (await store.transact([compare], [])).is_applied, compare
    assert (await store.transact(holding, [Delete(a)])).is_applied
    assert await store.get(a) is None


async def test_only_one_of_many_concurrent_creations_succeeds(place, store, prefix):
    others = [await place.open() for _ in range(3)]
    key = prefix + "leader"
    done = await asyncio.gather(
        *(
            each.transact([CreatedAt(key, 0)], [Put(key, str(i).encode())])
            for i, each in enumerate([store, *others] * 5)
        )
    )
    (winner,) = [i for i, each in enumerate(done) if each.is_applied]
    assert await store.get(key) == Entry(
        key, str(winner).encode(), done[winner].revision, done[winner].revision
    )
    for other in others:
        await other.close()


async def test_a_key_that_is_created_again_has_a_new_creation_revision(store, prefix):
    first = await store.put(prefix + "a", b"")
    await store.transact([], [Delete(prefix + "a")])
    again = await store.put(prefix + "a", b"")
    assert (await store.get(prefix + "a")).created == again > first


async def test_a_transaction_that_is_too_large_is_refused(store, prefix):
    with pytest.raises(WriteRejected, match="a transaction of"):
        await store.put(prefix + "a", b"x" * (1 << 20))
    with pytest.raises(WriteRejected, match="a transaction of 121 changes; the limit is 120"):
        await store.transact([], [Put(f"{prefix}{i}", b"") for i in range(121)])
    await store.put(prefix + "a", b"x" * ((1 << 20) - 100))
    assert (await store.transact([], [Put(f"{prefix}{i}", b"") for i in range(120)])).is_applied


async def test_an_expired_lease_deletes_its_keys(store, prefix):
    lease = await store.grant(1)
    assert lease.ttl_s >= 1
    orders = [Put(prefix + name, b"", lease.id) for name in ("a", "b")]
    put = await store.transact([], [*orders, Put(prefix + "c", b"")])
    async with aclosing(store.watch(prefix, after=put.revision)) as news:
        gone = await next_of(news)
    assert gone.changes == (Change(prefix + "a", None), Change(prefix + "b", None))
    assert [entry.key for entry in (await store.snapshot(prefix)).entries] == [prefix + "c"]
    assert not await store.keep(lease.id)


@pytest.mark.slow
async def test_a_renewed_lease_does_not_expire(store, prefix):
    lease = await store.grant(2)
    await store.put(prefix + "a", b"", lease=lease.id)
    for _ in range(12):
        assert await store.keep(lease.id)
        await asyncio.sleep(0.25)
    assert (await store.get(prefix + "a")).lease == lease.id
    await store.revoke(lease.id)


async def test_a_revoked_lease_deletes_its_keys(store, prefix):
    lease = await store.grant(60)
    await store.put(prefix + "a", b"", lease=lease.id)
    await store.put(prefix + "b", b"", lease=lease.id)
    await store.put(prefix + "b", b"")  # The key has no lease from now on.
    await store.revoke(lease.id)
    assert [entry.key for entry in (await store.snapshot(prefix)).entries] == [prefix + "b"]
    assert not await store.keep(lease.id)
    await store.revoke(lease.id)  # To revoke it again is no error.
    with pytest.raises(LeaseGone):
        await store.put(prefix + "a", b"", lease=lease.id)
    with pytest.raises(LeaseGone):
        await store.transact([], [Put(prefix + "c", b""), Put(prefix + "a", b"", lease.id)])
    assert await store.get(prefix + "c") is None
    assert not await store.keep(2**40 + 7)


async def test_a_watch_yields_each_revision_after_its_start_once(store, prefix):
    before = await store.put(prefix + "before", b"")
    first = await store.put(prefix + "a", b"1")
    await store.put("/elsewhere", b"")
    second = await store.transact([], [Put(prefix + "b", b"2"), Put(prefix + "a", b"3")])
    async with aclosing(store.watch(prefix, after=before)) as news:
        a = Entry(prefix + "a", b"1", first, first)
        assert await next_of(news) == Changed(first, (Change(a.key, a),))
        a = Entry(prefix + "a", b"3", first, second.revision)
        b = Entry(prefix + "b", b"2", second.revision, second.revision)
        told = await next_of(news)
        assert told == Changed(second.revision, (Change(a.key, a), Change(b.key, b)))
        gone = await store.transact([], [Delete(prefix + "a")])
        assert await next_of(news) == Changed(gone.revision, (Change(prefix + "a", None),))


async def test_a_watch_from_a_snapshot_misses_nothing(place, store, prefix):
    other = await place.open()
    counting = asyncio.create_task(_count(other, prefix + "n", 200))
    await asyncio.sleep(0.02)
    snapshot = await store.snapshot(prefix)
    seen = [int(entry.value) for entry in snapshot.entries] or [-1]
    async with aclosing(store.watch(prefix, after=snapshot.revision)) as news:
        while seen[-1] < 199:
            changed = await next_of(news)
            if isinstance(changed, Compacted):  # An embedded store may have compacted by now.
                assert seen[-1] == -1
                break
            seen.append(int(changed.changes[0].entry.value))
    assert seen == list(range(seen[0], seen[-1] + 1))
    await counting
    await other.close()


async def _count(store, key, end):
    for number in range(end):
        await store.put(key, str(number).encode())


async def test_a_watch_from_any_revision_sees_what_a_live_one_saw(store, prefix):
    random = Random(7)
    first = (await store.snapshot(prefix)).revision
    live = []
    async with aclosing(store.watch(prefix, after=first)) as news:
        for number in range(30):
            names = random.sample("abcd", random.randint(1, 3))
            orders = [
                Put(prefix + name, bytes([number] * random.randint(0, 2_000)))
                if random.random() < 0.8
                else Delete(prefix + name)
                for name in names
            ]
            orders.append(Put(prefix + "each", b""))
            await store.transact([], orders)
            live.append(await next_of(news))
    for seen in range(0, len(live), 7):
        async with aclosing(store.watch(prefix, after=live[seen].revision)) as news:
            assert [await next_of(news) for _ in live[seen + 1 :]] == live[seen + 1 :]


async def test_several_watches_see_the_same(place, store, prefix):
    other = await place.open()
    after = (await store.snapshot(prefix)).revision
    watches = [each.watch(prefix, after=after) for each in (store, other, store)]
    waiting = [asyncio.create_task(next_of(news)) for news in watches]
    await asyncio.sleep(0.05)
    revision = await store.put(prefix + "a", b"")
    told = await asyncio.gather(*waiting)
    assert [each.revision for each in told] == [revision] * 3
    for news in watches:
        await news.aclose()
    await other.close()


async def test_a_watch_of_compacted_revisions_ends_with_compacted(place, store, prefix):
    after = await store.put(prefix + "a", b"1")
    await store.put(prefix + "a", b"2")
    await store.put(prefix + "a", b"3")  # The last revision is never compacted.
    await place.compact(store)
    async with aclosing(store.watch(prefix, after=after)) as news:
        told = await next_of(news)
        assert isinstance(told, Compacted)
        with pytest.raises(StopAsyncIteration):
            await next_of(news)
    snapshot = await store.snapshot(prefix)
    assert told.revision <= snapshot.revision
    async with aclosing(store.watch(prefix, after=snapshot.revision)) as news:
        revision = await store.put(prefix + "a", b"3")
        assert (await next_of(news)).revision == revision


async def test_a_watch_survives_the_compaction_of_what_it_has_seen(place, store, prefix):
    after = await store.put(prefix + "a", b"1")
    async with aclosing(store.watch(prefix, after=after)) as news:
        second = await store.put(prefix + "a", b"2")
        assert (await next_of(news)).revision == second
        waiting = asyncio.create_task(next_of(news))
        await asyncio.sleep(0.05)
        await place.compact(store)
        third = await store.put(prefix + "a", b"3")
        assert (await waiting).revision == third


async def test_a_watch_from_a_future_revision_ends_with_compacted(store, prefix):
    revision = await store.put(prefix + "a", b"1")
    async with aclosing(store.watch(prefix, after=revision + 1000)) as news:
        assert isinstance(await next_of(news), Compacted)


async def test_closing_ends_the_watches(place, prefix):
    store = await place.open()
    after = (await store.snapshot(prefix)).revision
    news = store.watch(prefix, after=after)
    waiting = asyncio.create_task(anext(news, None))
    await asyncio.sleep(0.05)
    await store.close()
    assert await asyncio.wait_for(waiting, PATIENCE_S) is None
