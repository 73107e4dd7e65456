"""A sailord whose takeover is not complete leaves what the last leader stored."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from typing import Any

from agents.protocol.codec import encode
from agents.protocol.compression import pack
from agents.protocol.records import JobId
from agents.protocol.store_keys import Keys
from agents.rpc.signing import ClusterKey
from agents.store.interface import Put
from agents.store.store_thread import StoreThread
from planner.move_policy.node_lifetimes import LifetimeHistory
from sailord.cluster_records import Gateway, Transition
from sailord.config import load_config
from sailord.controller.election import lock_state_folder
from sailord.controller.lifetime_store import load_lifetimes, save_lifetimes
from sailord.core.model.events import Elected
from sailord.core.queries.reconfiguration_timing import ReconfigurationTiming
from sailord.daemon import _assemble
from tests.sailord.controller.test_lifetime_store import POOL, SEEN
from tests.sailord.core.states import JOB, generation, job
from tests.sailord.daemon.running import Place

OTHER = JobId("other")


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


def test_new_leader_reads_since_when_the_last_generation_trains(place: Place) -> None:
    config = load_config(place.config)
    timing: Any = {
        "kind": "loss", "reason": "b is lost", "is_planned": False, "source": "memory",
        "restored_step": 40, "steps_lost": 0, "downtime_s": 2.0, "predicted_s": 2.0, "phases": (),
    }  # fmt: skip
    moves = [
        ReconfigurationTiming(number, at, total_s=3.0, **timing)
        for number, at in ((2, 100.0), (3, 500.0))
    ]

    async def run() -> Elected:
        state = lock_state_folder(config.state)
        store = await StoreThread.open(config.store, socket=config.store_socket)
        key = ClusterKey.read(config.key, config.cluster_name)
        daemon = _assemble(config, store, state, key, None)
        gateway, keys = daemon.gateway, daemon.gateway.keys
        try:
            for id_, number in ((JOB, 3), (OTHER, 4)):  # The other one has not trained since.
                await gateway.submit(job(id=id_), "", None)
                record = replace(generation(), job=id_, number=number)
                put = Put(keys.generation(id_), pack(encode(record)))
                await store.transact([], [put])
                for at, move in enumerate(moves):
                    line = Transition(at, float(at), "moved", None, None, 1, move=move)
                    await gateway.write_transition(id_, line)
            await store.run(daemon.election.campaign())
            await daemon._take_over()
            _, event = await daemon.controller.inbox.next_event()
            assert isinstance(event, Elected)
            return event
        finally:
            await store.close()
            os.close(state.lock)

    assert asyncio.run(run()).trained_since == ((JOB, 503.0),)
