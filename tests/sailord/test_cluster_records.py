"""sailord reads what it can, leaves alone what it cannot, and keeps what a newer version added."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from agents.protocol.codec import WireError, encode, plain
from agents.protocol.records import (
    FIRST,
    Durable,
    GenerationRecord,
    JobId,
    JobRecord,
    NodeId,
    NodeRecord,
    Order,
    Point,
)
from agents.protocol.versions import Protocol
from agents.store.interface import Delete, Put
from sailord.cluster_records import Gateway
from tests.sailord.led_store import TEST as KEYS
from tests.sailord.led_store import in_a_store

JOB, OTHER = JobId("job"), JobId("other")
RUNNING = JobRecord(JOB, "running")
OPEN = GenerationRecord(JOB, 3, "open", "p", (NodeId("a"),), FIRST, 1, "")
NODE = NodeRecord(NodeId("a.1"), "a", "z", "m", "g", 1, "a:1")
ODD = b'{"state":"hibernating"}'


@pytest.mark.parametrize(
    ("entries", "blocking"),
    [
        ({"state": ODD}, False),  # It has no generation: it cannot have the cluster.
        ({"state": ODD, "gen": encode(OPEN)}, True),
        ({"state": ODD, "gen": ODD}, True),
        ({"state": encode(RUNNING), "gen": ODD}, True),
        ({"state": encode(JobRecord(JOB, "done")), "gen": ODD}, False),
        ({"state": encode(RUNNING), "gen": encode(OPEN), "durable": ODD}, True),
        ({"state": encode(JobRecord(JOB, "queued")), "durable": ODD}, False),
    ],
)
def test_job_with_an_unreadable_record_is_set_aside(tmp_path, entries, blocking):
    async def play(gateway: Gateway):
        puts = [Put(f"{KEYS.jobs}{JOB}/{part}", value) for part, value in entries.items()]
        await gateway.store.transact([], [*puts, gateway.put_job(JobRecord(OTHER, "queued"))])
        world = await gateway.read_records()
        assert [job.id for job in world.jobs] == [OTHER]
        assert (world.generations, world.durables) == ((), ())
        assert (world.set_aside, world.blocking) == ({JOB}, {JOB} if blocking else set())
        odd = {f"{KEYS.jobs}{JOB}/{part}" for part, value in entries.items() if value == ODD}
        assert world.unreadable.keys() == odd
        assert (await gateway.read_records()).unreadable == world.unreadable

    in_a_store(tmp_path, play)


def test_nodes_that_cannot_be_read_or_understood_are_named(tmp_path):
    async def play(gateway: Gateway):
        later = NodeRecord(NodeId("c.1"), "c", "z", "m", "g", 1, "c:1", protocol=Protocol(9, 8))
        puts = [Put(KEYS.node(NODE.id), encode(NODE)), Put(KEYS.node(NodeId("b.1")), ODD)]
        await gateway.store.transact([], [*puts, Put(KEYS.node(later.id), encode(later))])
        world = await gateway.read_records()
        assert world.nodes == (NODE, later)
        assert world.nodes_unreadable == {"b.1"}
        assert world.unreadable.keys() == {KEYS.node(NodeId("b.1")), KEYS.node(later.id)}
        assert world.unreadable[KEYS.node(later.id)].endswith("upgrade sailord first")

    in_a_store(tmp_path, play)


def test_a_job_written_anew_keeps_what_a_newer_version_added(tmp_path):
    async def play(gateway: Gateway):
        newer = plain(RUNNING) | {"team": "vision"}
        newer["saving"]["region"] = "eu"
        await gateway.store.put(KEYS.state(JOB), json.dumps(newer).encode())
        await gateway.read_records()
        held = JobRecord(JOB, "held", reason="stop")
        await gateway.store.transact([], [gateway.put_job(held)])
        entry = await gateway.store.get(KEYS.state(JOB))
        written = json.loads(entry.value)
        assert (written["team"], written["saving"]["region"]) == ("vision", "eu")
        assert (await gateway.read_records()).jobs == (held,)

    in_a_store(tmp_path, play)


def test_unknown_fields_of_a_record_are_kept_while_its_generation_is_the_same(tmp_path):
    async def play(gateway: Gateway):
        await gateway.store.put(KEYS.leader, b"me")
        term = (await gateway.store.get(KEYS.leader)).created
        await gateway.store.put(
            KEYS.generation(JOB), json.dumps(plain(OPEN) | {"colour": "red"}).encode()
        )

        async def write(state, number, before):
            record = GenerationRecord(JOB, number, state, "p", (), FIRST, term, "")
            assert await gateway.write_generation(record, before, plan=None, about=None)
            return record, json.loads((await gateway.store.get(KEYS.generation(JOB))).value)

        stopping, raw = await write("stopping", OPEN.number, OPEN)
        assert raw["colour"] == "red"
        _, raw = await write("open", OPEN.number + 1, stopping)
        assert "colour" not in raw

    in_a_store(tmp_path, play)


def test_unreadable_records_are_never_overwritten(tmp_path):
    async def play(gateway: Gateway):
        durable = Durable(Point(1, 1), "m", "s")
        await gateway.store.put(KEYS.leader, b"me")
        term = (await gateway.store.get(KEYS.leader)).created
        for key in (KEYS.generation(JOB), KEYS.durable(JOB), KEYS.state(JOB), KEYS.order("o")):
            await gateway.store.put(key, ODD)
        with pytest.raises(WireError):
            await gateway.write_generation(OPEN, None, plan=None, about=None)
        with pytest.raises(WireError):
            await gateway.commit(durable, OPEN, term)
        assert not await gateway.submit(RUNNING, "spec")
        assert await gateway.give_order(Order("o", "drain", "a")) == "other"
        entries = (await gateway.store.snapshot(KEYS.all)).entries
        assert {entry.value for entry in entries if entry.key != KEYS.leader} == {ODD}

    in_a_store(tmp_path, play)


def test_an_order_with_another_number_is_no_repetition_of_one_under_its_id(tmp_path):
    async def play(gateway: Gateway):
        for kind, values in (("priority", (5, 9)), ("budget", (5.0, 9.0))):
            field = {"priority": "priority", "budget": "usd_max"}[kind]
            first, second = (Order(kind, kind, "j", **{field: value}) for value in values)
            given = [await gateway.give_order(each) for each in (first, first, second)]
            assert given == ["new", "known", "other"]

    in_a_store(tmp_path, play)


def test_a_former_leader_writes_no_generation_and_commits_nothing(tmp_path):
    async def play(gateway: Gateway):
        store, durable = gateway.store, Durable(Point(7, OPEN.number), "m", "s")
        terms = []
        for leader in (b"first", b"second"):
            await store.transact([], [Delete(KEYS.leader)])
            await store.put(KEYS.leader, leader)
            terms.append((await store.get(KEYS.leader)).created)
        old, new = terms
        by_old, by_new = (replace(OPEN, term=term) for term in terms)
        assert not await gateway.write_generation(by_old, None, plan=b"p", about=b"{}")
        assert [entry.key for entry in (await store.snapshot(KEYS.all)).entries] == [KEYS.leader]
        assert await gateway.write_generation(by_new, None, plan=b"p", about=b"{}")
        stop = replace(by_old, state="stopping")
        assert not await gateway.write_generation(stop, by_new, plan=None, about=None)
        assert await gateway.commit(durable, by_new, old) == "deposed"
        assert await store.get(KEYS.durable(JOB)) is None
        assert await gateway.commit(durable, by_new, new) == "committed"

    in_a_store(tmp_path, play)


def test_unreadable_lines_of_a_history_are_passed_over(tmp_path):
    async def play(gateway: Gateway):
        line = b'{"id":1,"at":2.0,"text":"it began","new":3}'
        await gateway.store.transact(
            [], [Put(KEYS.history(JOB, 1), line), Put(KEYS.history(JOB, 2), b"nothing")]
        )
        assert [each.text for each in await gateway.read_history(JOB)] == ["it began"]
        assert list(gateway.unreadable.found) == [KEYS.history(JOB, 2)]

    in_a_store(tmp_path, play)
