"""Compression of long records."""

from __future__ import annotations

import json
import zlib
from dataclasses import replace

import pytest

from agents.daemon.clock import Clock
from agents.protocol import compression
from agents.protocol.codec import WireError, encode
from agents.protocol.compression import PACK_FROM, pack, unpack
from agents.protocol.records import FIRST, GenerationRecord, JobId, NodeId, Peak
from agents.protocol.store_keys import Keys
from agents.registration import Registration
from agents.store.interface import Put, Store
from sailord.cluster_records import Gateway

RECORD = GenerationRecord(JobId("j"), 1, "open", "sha", (NodeId("n.1"),), FIRST, 1, "its turn")


def test_only_long_values_are_compressed():
    short, long = b'{"a": 1}', json.dumps({"a": "b" * PACK_FROM}).encode()
    assert pack(short) == short
    assert len(pack(long)) < len(long) / 10
    assert [unpack(pack(text)) for text in (short, long, b"")] == [short, long, b""]


@pytest.mark.parametrize("value", [b"[1]", b"\x78\x9c", zlib.compress(b"{}" * 99)[:-3], b"\xff"])
def test_a_damaged_value_is_refused(value):
    with pytest.raises(WireError, match=r"neither JSON nor compressed|is truncated"):
        unpack(value)


def test_a_value_that_is_too_long_is_not_decompressed(monkeypatch):
    monkeypatch.setattr(compression, "UNPACKED_MAX", 1 << 20)
    assert len(unpack(zlib.compress(bytes(1 << 20)))) == 1 << 20
    with pytest.raises(WireError, match="too long"):
        unpack(zlib.compress(bytes((1 << 20) + 1)))


async def led(store: Store, keys: Keys) -> int:
    """Write the leader's key; return the term."""
    await store.transact([], [Put(keys.leader, b'{"address": "h:1"}')])
    entry = await store.get(keys.leader)
    assert entry is not None
    return entry.created


async def test_a_plan_of_five_thousand_nodes_fits_into_one_transaction(store, prefix):
    keys = Keys(prefix.split("/")[-2])
    gateway, term = Gateway(store, keys), await led(store, keys)
    members = tuple(NodeId(f"n{i:05}.1") for i in range(5000))
    peaks = tuple(Peak(10_000_000_000 + i, 500_000_000) for i in range(5000))
    record = replace(RECORD, members=members, peaks=peaks, term=term)
    ranks = [{"node": id_, "devices": [0], "peak": str(i)} for i, id_ in enumerate(members)]
    plan = json.dumps({"ranks": ranks}, indent=1).encode()
    about = json.dumps({"estimate": ranks * 2}).encode()
    assert len(plan) + len(about) + len(encode(record)) > 1 << 20
    assert await gateway.write_generation(record, None, plan=plan, about=about)
    assert (await gateway.read_records()).generations == (record,)
    assert await gateway.read_plan(record.job, "sha") == plan
    assert await gateway.read_about(record.job, "sha") == json.loads(about)
    await store.transact([], [Put(keys.spec(record.job), b"the job")])
    agent = Registration(store, keys, 9.0, Clock(), lambda _: None)
    briefing = await agent.details_of(record)
    assert briefing is not None
    assert briefing.plan.encode() == plan


async def test_an_uncompressed_record_is_still_read(store, prefix):
    keys = Keys(prefix.split("/")[-2])
    gateway, term = Gateway(store, keys), await led(store, keys)
    record = replace(RECORD, term=term, reason="r" * PACK_FROM)
    # As an earlier version wrote it, uncompressed and with fewer fields.
    old = json.loads(encode(record))
    del old["wait_s"]
    await store.transact([], [Put(keys.generation(record.job), json.dumps(old).encode())])
    told = replace(record, state="stopping", stop_at=9)
    assert await gateway.write_generation(told, record, plan=None, about=None)
    assert (await gateway.read_records()).generations == (told,)
    assert await gateway.write_generation(told, record, plan=None, about=None), "it stands there"
    assert not await gateway.write_generation(replace(told, state="closed"), record,
                                              plan=None, about=None)  # fmt: skip
