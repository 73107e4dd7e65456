"""What an agent makes of records that it cannot read: nothing is started or stopped."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from agents.core.model import Event, GenerationRead, GenerationUnreadable, JobEnded
from agents.daemon.clock import Clock
from agents.protocol.codec import encode, plain
from agents.protocol.records import (
    FIRST,
    GenerationRecord,
    JobId,
    JobRecord,
    Leader,
    NodeId,
    NodeRecord,
)
from agents.protocol.store_keys import Keys
from agents.protocol.versions import Protocol
from agents.registration import Registration, choose
from agents.store.interface import Put, Store, StoreUnavailable
from agents.store.sqlite_store import EmbeddedStore

US, OTHERS = NodeId("a.1"), NodeId("b.1")
JOB, NEXT = JobId("job"), JobId("next")
OPEN = GenerationRecord(JOB, 3, "open", "p", (US,), FIRST, 1, "")
KEYS = Keys("test")
NEWER = [
    b"nothing",
    b'{"state":"hibernating"}',
    b"\x78\x9c not compressed",
    json.dumps(plain(OPEN) | {"needs": 99}).encode(),
    json.dumps(plain(OPEN) | {"state": "hibernating"}).encode(),
]


def in_a_store(tmp_path, play: Callable[[Store, Registration, list[Event]], Awaitable[None]]):
    async def run() -> None:
        store, events = await EmbeddedStore.open(tmp_path / "store"), list[Event]()
        in_memory = {JOB}
        agent = Registration(store, KEYS, 9.0, Clock(), events.append, lambda: in_memory)
        try:
            await play(store, agent, events)
        finally:
            await store.close()

    asyncio.run(run())


def ignore(_jobs: object, _own: object) -> None:
    """Prepare nothing."""


@pytest.mark.parametrize("value", NEWER)
@pytest.mark.parametrize("held", [JOB, None])
def test_unreadable_generation_starts_and_stops_nothing(tmp_path, value, held):
    async def play(store: Store, agent: Registration, events: list[Event]) -> None:
        closed = encode(GenerationRecord(NEXT, 1, "closed", "p", (US,), FIRST, 1, ""))
        await store.put(KEYS.generation(NEXT), closed)
        await store.put(KEYS.generation(JOB), encode(OPEN))
        await agent._poll(US, held, ignore)
        await store.put(KEYS.generation(JOB), value)
        await agent._poll(US, held, ignore)
        await agent._poll(US, held, ignore)
        await store.put(KEYS.generation(JOB), encode(OPEN))
        await agent._poll(US, held, ignore)
        kinds = [type(event) for event in events]
        assert kinds == [GenerationRead, GenerationUnreadable, GenerationUnreadable, GenerationRead]
        assert (agent.unreadable.total, agent.unreadable.found) == (1, {})

    in_a_store(tmp_path, play)


def test_generation_that_asks_for_this_node_is_joined_beside_an_unreadable_one(tmp_path):
    async def play(store: Store, agent: Registration, events: list[Event]) -> None:
        asks = GenerationRecord(NEXT, 1, "open", "p", (US,), FIRST, 1, "")
        await store.put(KEYS.generation(JOB), b"nothing")
        await store.put(KEYS.generation(NEXT), encode(asks))
        await agent._poll(US, None, ignore)
        (event,) = events
        assert isinstance(event, GenerationRead)
        assert event.record == asks

    in_a_store(tmp_path, play)


def test_unreadable_job_keeps_its_work_folder_and_its_snapshots(tmp_path):
    async def play(store: Store, agent: Registration, events: list[Event]) -> None:
        looks: list[Any] = []

        def look(jobs: Any, _own: object) -> None:
            looks.append(jobs)

        await store.put(KEYS.generation(JOB), encode(OPEN))
        await store.put(KEYS.state(NEXT), encode(JobRecord(NEXT, "queued")))
        # A new agent process has never read the record of the job whose workers it took over.
        await store.put(KEYS.state(JOB), b'{"state":"ended in another way"}')
        await agent._poll(US, JOB, look)
        assert looks == []
        await store.put(KEYS.state(JOB), encode(JobRecord(JOB, "running")))
        await agent._poll(US, JOB, look)
        await store.put(KEYS.state(JOB), b"nothing")
        await agent._poll(US, JOB, look)
        assert [look[JOB].state for look in looks] == ["running", "running"]
        assert not [event for event in events if isinstance(event, JobEnded)]
        assert list(agent.unreadable.found) == [KEYS.state(JOB)]

    in_a_store(tmp_path, play)


async def test_a_store_that_is_full_still_renews_the_lease_of_a_node_that_changes():
    """It refuses writes, as of a node that begins to drain, and renews leases all the same."""
    kept: list[int] = []
    renewed = asyncio.Event()

    async def refuse(*_: object) -> None:
        raise StoreUnavailable("no space left")

    async def keep(lease: int) -> bool:
        kept.append(lease)
        renewed.set()
        return True

    full: Any = SimpleNamespace(transact=refuse, keep=keep)
    agent = Registration(full, KEYS, 9.0, Clock(), [].append, _lease=7)
    agent.register(NodeRecord(US, "a", "z", "m", "g", 1, "a:1", state="draining"))
    keeping = asyncio.create_task(agent.keep_registered())
    async with asyncio.timeout(60):
        await renewed.wait()
    keeping.cancel()
    assert kept == [7]


def test_unreadable_node_is_not_among_the_nodes(tmp_path):
    async def play(store: Store, agent: Registration, _: list[Event]) -> None:
        other = NodeRecord(OTHERS, "b", "z", "m", "g", 1, "b:1")
        odd = plain(other) | {"state": "hibernating"}
        await store.transact(
            [],
            [
                Put(KEYS.node(OTHERS), json.dumps(plain(other) | {"rack": "r7"}).encode()),
                Put(KEYS.node(NodeId("c.1")), json.dumps(odd).encode()),
            ],
        )
        (found,) = await agent.nodes()
        assert found == other
        assert (await agent.nodes())[0] is found, "unchanged records are not decoded again"
        assert "hibernating" in agent.unreadable.found[KEYS.node(NodeId("c.1"))]

    in_a_store(tmp_path, play)


def test_leader_of_another_protocol_is_logged_once_and_gets_reports(tmp_path):
    async def play(store: Store, agent: Registration, _: list[Event]) -> None:
        leader = Leader("d", "h", "b", 1, "s", "head:1", 1, Protocol(99, 98))
        await store.put(KEYS.leader, encode(leader))
        await agent._poll(US, None, ignore)
        await agent._poll(US, None, ignore)
        assert (agent.leader, agent.unreadable.total) == ("head:1", 1)
        assert agent.unreadable.found[KEYS.leader].endswith("upgrade this agent first")
        await store.put(KEYS.leader, b"nothing")
        await agent._poll(US, None, ignore)
        assert (agent.leader, agent.unreadable.total) == (None, 2)

    in_a_store(tmp_path, play)


def test_the_first_node_of_a_job_says_which_packages_the_others_install(tmp_path):
    async def play(_: Store, agent: Registration, __: list[Event]) -> None:
        assert await agent.packages_agreed(JOB, None) == "", "no node was the first"
        assert await agent.packages_agreed(JOB, "tiny==1\n") == "tiny==1\n"
        assert await agent.packages_agreed(JOB, "tiny==2\n") == "tiny==1\n"
        assert await agent.packages_agreed(NEXT, None) == ""

    in_a_store(tmp_path, play)


def test_packages_are_asked_of_the_leader_and_of_other_nodes(tmp_path):
    async def play(store: Store, agent: Registration, _: list[Event]) -> None:
        for id_, port in ((US, 1), (OTHERS, 2)):
            node = NodeRecord(id_, id_, "z", "box", "A100-40", 1, f"10.0.0.1:{port}", "ready")
            await store.put(KEYS.node(id_), encode(node))
            if id_ == US:
                agent.register(node)
        agent.leader = "10.0.0.9:1"
        assert await agent.package_sources() == ["10.0.0.9:1", "10.0.0.1:2"]

    in_a_store(tmp_path, play)


def test_a_node_follows_the_job_that_has_it():
    """Else one that has left a job reports about it, without what it keeps of its own."""
    theirs = replace(OPEN, job=NEXT, state="closed")
    jobs = {JOB: JobRecord(JOB, "running"), NEXT: JobRecord(NEXT, "running", part=(US,))}
    assert choose((OPEN, theirs), jobs, US, None) == theirs
    assert choose((OPEN, theirs), jobs, US, JOB) == OPEN, "as long as its workers run"
    assert choose((OPEN,), jobs, US, None) == OPEN, "its own job has no generation yet"
    del jobs[NEXT]
    assert choose((OPEN, theirs), jobs, US, None) == OPEN


def test_snapshots_of_a_job_that_has_left_the_node_are_deleted(tmp_path):
    async def play(store: Store, agent: Registration, events: list[Event]) -> None:
        agent.jobs_in_memory = lambda: {JOB, NEXT}
        ours = JobRecord(NEXT, "running", part=(US,))
        for job in (JobRecord(JOB, "running"), ours):
            await store.put(KEYS.state(job.id), encode(job))
        await agent._poll(US, None, ignore)
        assert [each.job for each in events if isinstance(each, JobEnded)] == [JOB]
        await store.put(KEYS.state(JOB), encode(JobRecord(JOB, "paused")))
        events.clear()
        await agent._poll(US, None, ignore)
        assert not [each for each in events if isinstance(each, JobEnded)]

    in_a_store(tmp_path, play)
