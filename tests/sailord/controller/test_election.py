"""The lease is renewed whatever the service does, but not for a controller that is stuck."""

from __future__ import annotations

import asyncio
import shutil
import time
from contextlib import asynccontextmanager

import pytest

from agents.daemon.clock import since_boot_s
from agents.store.store_thread import StoreThread
from sailord.controller.election import Election, lock_state_folder

LEASE_S = 1.0


@asynccontextmanager
async def store_at(folder):
    store = await StoreThread.open(f"embedded://{folder}/store.db", socket=folder / "store.sock")
    try:
        yield store
    finally:
        await store.close()


def election_at(store, folder, **options) -> Election:
    state = lock_state_folder(folder)
    return Election(store.inner, "/leader", state, "127.0.0.1:1", LEASE_S, **options)


@pytest.mark.slow
async def test_a_busy_service_keeps_its_lease(tmp_path):
    async with store_at(tmp_path) as store:
        election = election_at(store, tmp_path / "one")
        assert await store.run(election.campaign())
        term = election.term
        renewing = store.run(election.keep_renewing())
        task = asyncio.ensure_future(renewing)
        await asyncio.sleep(0)
        end = since_boot_s() + 3 * LEASE_S
        while since_boot_s() < end:
            time.sleep(0.01)  # What blocks the event loop is the attack.
        assert election.leads(term)
        task.cancel()


async def test_a_stuck_controller_loses_its_lease_and_another_leads(tmp_path):
    async with store_at(tmp_path) as store:
        stuck = election_at(store, tmp_path / "one", hung_s=0.2)
        other = election_at(store, tmp_path / "two")
        assert await store.run(stuck.campaign())
        task = asyncio.ensure_future(store.run(stuck.keep_renewing()))
        while not await store.run(other.campaign()):
            await asyncio.sleep(0.05)
        assert not stuck.is_valid
        task.cancel()
        assert f"(127.0.0.1:1) was elected leader, term {other.term}: the lease of" in other.told
        assert other.former is not None
        assert other.former.daemon == stuck.daemon_id


async def test_an_election_tells_who_led_before(tmp_path):
    async with store_at(tmp_path) as store:
        head = election_at(store, tmp_path / "one")
        assert await store.run(head.campaign())
        assert head.told.endswith(f"was elected leader, term {head.term}"), "nobody led before"
        again = Election(store.inner, "/leader", head.folder, head.address, LEASE_S)
        assert await store.run(again.campaign())
        assert again.told.endswith(f"term {again.term}: it began again, or its lease had ended")


async def test_a_copied_state_folder_does_not_depose_the_living_leader(tmp_path):
    """A standby may be made by cloning the head's disk."""
    async with store_at(tmp_path) as store:
        head = election_at(store, tmp_path / "one")
        assert await store.run(head.campaign())
        shutil.copytree(tmp_path / "one", tmp_path / "two")
        clone = election_at(store, tmp_path / "two")
        clone.address = "127.0.0.2:1"
        assert clone.folder.id == head.folder.id
        assert not await store.run(clone.campaign())
        assert head.is_valid


async def test_a_resigned_leader_stays_resigned(tmp_path):
    async with store_at(tmp_path) as store:
        election = election_at(store, tmp_path / "one")
        assert await store.run(election.campaign())
        await store.run(election.resign())
        await store.run(election.renew())
        assert election.term is None
        assert await store.run(election.campaign())
