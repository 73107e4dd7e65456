"""Observed lifetimes of nodes survive a change of leader."""

from __future__ import annotations

from agents.store.interface import Put
from planner.move_policy.node_lifetimes import LifetimeHistory
from sailord.controller.lifetime_store import load_lifetimes, save_lifetimes
from tests.sailord.led_store import in_a_store, lead

POOL = "A100-40@us-central1-a spot"
SEEN = LifetimeHistory().seen(0.0, up={POOL: 2}, lost={}).seen(3600.0, up={POOL: 1}, lost={POOL: 1})


def test_lifetimes_survive_leaders_and_ignore_the_time_without_one(tmp_path):
    async def play(gateway):
        await save_lifetimes(gateway, SEEN, await lead(gateway))
        return await load_lifetimes(gateway)

    found = in_a_store(tmp_path, play)
    before, after = SEEN.record(POOL, 3600.0), found.record(POOL, 3600.0)
    assert (after.lived_s, after.losses, after.flaps) == (7200.0, 1.0, 1.0)
    assert after.node_life_s == before.node_life_s
    # One machine was up, but no leader observed whether it survived.
    assert found.record(POOL, 7200.0).lived_s < SEEN.record(POOL, 7200.0).lived_s


def test_a_former_leader_does_not_overwrite_lifetimes(tmp_path):
    async def play(gateway):
        term = await lead(gateway)
        await save_lifetimes(gateway, SEEN, term)
        await save_lifetimes(gateway, LifetimeHistory(), term - 1)
        return await load_lifetimes(gateway)

    assert POOL in in_a_store(tmp_path, play).pools


def test_unreadable_lifetimes_are_dropped(tmp_path):
    async def play(gateway):
        assert await load_lifetimes(gateway) == LifetimeHistory()
        await gateway.store.transact([], [Put(gateway.keys.lives, b'{"pools": 3}')])
        return await load_lifetimes(gateway)

    assert in_a_store(tmp_path, play) == LifetimeHistory()
