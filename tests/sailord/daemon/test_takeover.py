"""A sailord whose takeover is not complete leaves what the last leader stored."""

from __future__ import annotations

import asyncio
import os

from agents.protocol.store_keys import Keys
from agents.rpc.signing import ClusterKey
from agents.store.store_thread import StoreThread
from planner.move_policy.node_lifetimes import LifetimeHistory
from sailord.cluster_records import Gateway
from sailord.config import load_config
from sailord.controller.election import lock_state_folder
from sailord.controller.lifetime_store import load_lifetimes, save_lifetimes
from sailord.daemon import _assemble
from tests.sailord.controller.test_lifetime_store import POOL, SEEN
from tests.sailord.daemon.running import Place


def test_lifetimes_that_were_not_read_yet_are_not_overwritten(place: Place) -> None:
    config = load_config(place.config)

    async def run() -> LifetimeHistory:
        state = lock_state_folder(config.state)
        store = await StoreThread.open(config.store, socket=config.store_socket)
        gateway = Gateway(store, Keys(config.cluster_name))
        key = ClusterKey.read(config.key, config.cluster_name)
        daemon = _assemble(config, store, state, key, None)
        try:
            await store.run(daemon.election.campaign())
            assert daemon.election.term is not None
            await save_lifetimes(gateway, SEEN, daemon.election.term)
            await daemon._save_lifetimes()
            return await load_lifetimes(gateway)
        finally:
            await store.close()
            os.close(state.lock)

    assert POOL in asyncio.run(run()).pools
