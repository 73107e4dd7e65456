"""The ledger is stored for the next leader, by the leader alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from agents.protocol.codec import encode
from agents.store.interface import Delete, Put
from sailord.capacity.core.model import CapacityState, PendingRequest
from sailord.cluster_records import Gateway
from sailord.goodput.bookkeeper import Bookkeeper
from sailord.goodput.core.shares import Share, rest_of
from sailord.providers.interface import InstanceRequest, Pool
from tests.sailord.core.states import NOW, TERM, state
from tests.sailord.led_store import TEST, in_a_store, lead


async def booked(gateway: Gateway, *moments: float, term: int = TERM) -> Bookkeeper:
    books = Bookkeeper(gateway, lambda _: 2.0)
    await books.load(term)
    for at in moments:
        books.observe(replace(state(None), now=at, term=term))
    return books


def test_the_next_leader_continues_from_the_stored_ledger(tmp_path: Path) -> None:
    async def play(gateway: Gateway) -> Bookkeeper:
        term = await lead(gateway)
        await (await booked(gateway, NOW, NOW + 10, term=term)).save(term)
        return await booked(gateway, NOW + 30)

    (account,) = in_a_store(tmp_path, play).ledger.accounts
    assert account.gpu_us == 2 * 30e6


def test_a_former_leader_does_not_overwrite_the_ledger(tmp_path: Path) -> None:
    async def play(gateway: Gateway) -> Bookkeeper:
        term = await lead(gateway)
        await (await booked(gateway, NOW, NOW + 10, term=term)).save(term)
        await (await booked(gateway, term=term - 1)).save(term - 1)
        return await booked(gateway)

    assert in_a_store(tmp_path, play).ledger.until_us == (NOW + 10) * 1e6


def test_an_unreadable_ledger_is_left_alone(tmp_path: Path) -> None:
    async def play(gateway: Gateway) -> tuple[object, dict[str, str]]:
        term = await lead(gateway)
        await gateway.store.transact([], [Put(TEST.goodput, b"{]")])
        await (await booked(gateway, NOW, NOW + 10, term=term)).save(term)
        entry = await gateway.store.get(TEST.goodput)
        assert entry is not None
        return entry.value, gateway.unreadable.found

    value, unreadable = in_a_store(tmp_path, play)
    assert value == b"{]"
    assert TEST.goodput in unreadable


def test_only_the_leader_books(tmp_path: Path) -> None:
    async def play(gateway: Gateway) -> Bookkeeper:
        books = await booked(gateway, NOW)
        books.observe(replace(state(None), now=NOW + 5, term=None))
        books.observe(replace(state(None), now=NOW + 500, term=TERM + 1))
        return books

    assert in_a_store(tmp_path, play).ledger.until_us == NOW * 1e6


def test_decisions_before_the_election_is_decided_on_do_not_stop_the_booking(
    tmp_path: Path,
) -> None:
    async def play(gateway: Gateway) -> Bookkeeper:
        books = await booked(gateway)
        # A takeover reads other records yet, and the controller ticks on.
        books.observe(replace(state(None), now=NOW, term=None))
        books.observe(replace(state(None), now=NOW + 5, term=TERM))
        return books

    assert in_a_store(tmp_path, play).ledger.until_us == (NOW + 5) * 1e6


def test_a_ledger_that_was_not_read_in_this_term_is_not_stored(tmp_path: Path) -> None:
    async def play(gateway: Gateway) -> Bookkeeper:
        old = await lead(gateway)
        books = await booked(gateway, NOW, term=old)
        await (await booked(gateway, NOW, NOW + 10, term=old)).save(old)
        await gateway.store.transact([], [Delete(TEST.leader)])
        await books.save(await lead(gateway))
        return await booked(gateway)

    assert in_a_store(tmp_path, play).ledger.until_us == (NOW + 10) * 1e6


def test_nothing_is_booked_until_the_requests_of_the_last_leader_were_looked_for(
    tmp_path: Path,
) -> None:
    pool = Pool("zone-a", "large", "gpu", 4, spot=True)
    asked = PendingRequest(InstanceRequest("r", pool, 1), 3.6, NOW)
    unknown = CapacityState(prefix="t1", asks={"r": asked})

    async def play(gateway: Gateway) -> list[int]:
        found = []
        for capacity in (unknown, replace(unknown, observed_at=NOW), replace(unknown, asks={})):
            books = Bookkeeper(gateway, lambda _: 2.0, capacity=lambda capacity=capacity: capacity)
            await books.load(TERM)
            books.observe(replace(state(None), now=NOW, term=TERM))
            found.append(books.ledger.until_us)
        return found

    assert in_a_store(tmp_path, play) == [0, NOW * 1e6, NOW * 1e6]


def test_what_metrics_show_is_never_more_than_the_next_leader_knows(tmp_path: Path) -> None:
    async def play(gateway: Gateway) -> tuple[Bookkeeper, Bookkeeper]:
        term = await lead(gateway)
        books = await booked(gateway, NOW, NOW + 10, term=term)
        assert books.stored.until_us == 0
        await books.save(term)
        books.observe(replace(state(None), now=NOW + 20, term=term))
        return books, await booked(gateway)

    first, following = in_a_store(tmp_path, play)
    assert first.stored == following.stored == following.ledger
    assert first.stored.until_us == (NOW + 10) * 1e6


def test_the_next_leader_continues_days_and_jobs(tmp_path: Path) -> None:
    async def play(gateway: Gateway) -> list[Bookkeeper]:
        term = await lead(gateway)
        first = await booked(gateway, NOW, NOW + 10, term=term)
        await first.save(term)
        second = await booked(gateway, NOW + 10, NOW + 30, term=term)
        assert second.stored_shares == first.shares
        await second.save(term)
        # Nothing was booked: only the ledger is written again.
        before = (await gateway.store.snapshot(TEST.goodput_shares)).entries
        await second.save(term)
        assert (await gateway.store.snapshot(TEST.goodput_shares)).entries == before
        return [first, second, await booked(gateway)]

    first, second, third = in_a_store(tmp_path, play)
    assert third.shares == second.shares
    assert set(first.shares) <= set(second.shares)
    for kind in ("day", "job"):
        assert not rest_of(third.shares, kind, third.ledger)


def test_unreadable_and_old_shares_are_left_alone_and_deleted(tmp_path: Path) -> None:
    async def play(gateway: Gateway) -> dict[str, bytes]:
        term = await lead(gateway)
        old = [Share("day", f"2020-01-{n:02}", n, n) for n in range(1, 32)]
        old += [Share("day", f"2020-03-{n:02}", 50 + n, 50 + n) for n in range(1, 32)]
        puts = [Put(f"{TEST.goodput_shares}day/{each.name}", encode(each)) for each in old]
        await gateway.store.transact([], [Put(f"{TEST.goodput_shares}job/", b"{]"), *puts])
        await (await booked(gateway, NOW, NOW + 10, term=term)).save(term)
        found = (await gateway.store.snapshot(TEST.goodput_shares)).entries
        return {entry.key.removeprefix(TEST.goodput_shares): entry.value for entry in found}

    stored = in_a_store(tmp_path, play)
    assert stored["job/"] == b"{]", "no job had the cluster"
    assert "day/2020-01-01" not in stored
    assert "day/2020-01-02" in stored
