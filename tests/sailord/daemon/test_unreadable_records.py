"""A real sailord beside records that it cannot read: it passes over them, says so, and goes on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from agents.protocol.records import JobId, NodeId
from agents.protocol.store_keys import Keys
from agents.store.factory import open_store
from agents.store.interface import Entry, Put
from tests.processes import wait_until
from tests.sailord.daemon.running import JOB
from tests.sailord.daemon.test_cluster_commands import call

KEYS = Keys("test")
ODD = b'{"state":"hibernating"}'


def put(place, values: Mapping[str, bytes]) -> None:
    async def write() -> None:
        store = await open_store(f"unix://{place.folder}/{place.name}/store.sock")
        await store.transact([], [Put(*pair) for pair in values.items()])
        await store.close()

    asyncio.run(write())


def get(place, key: str) -> Entry:
    async def read() -> Entry:
        store = await open_store(f"unix://{place.folder}/{place.name}/store.sock")
        entry = await store.get(key)
        await store.close()
        assert entry is not None
        return entry

    return asyncio.run(read())


def steps(count: Path) -> tuple[int, int]:
    """The generation that a fake agent is in, and the steps that it has done."""
    generation, _, done, _ = count.read_text().split()
    return int(generation), int(done)


def begin(place) -> Path:
    place.start()
    wait_until(lambda: place.ask("GET", "/readyz")[0] == 200)
    count = place.start_agent("a")
    assert place.ask("POST", "/v1/jobs", {"job": JOB, "id": "j"})[0] == 201
    wait_until(lambda: "j: running" in call(place, "status").output)
    return count


def log_lines(place, *, key: str) -> list[dict[str, object]]:
    text = (place.folder / f"{place.name}.log").read_text().splitlines()
    lines = [json.loads(line) for line in text if line.startswith("{")]
    return [line for line in lines if line.get("record") == key]


@pytest.mark.slow
def test_each_unreadable_record_is_reported_once_and_the_job_goes_on(place):
    count = begin(place)
    odd = {
        KEYS.node(NodeId("ghost.1")): ODD,
        KEYS.order("order-of-tomorrow"): b'{"id":"o","kind":"hibernate","target":"a"}',
        KEYS.state(JobId("k")): ODD,
        KEYS.history(JobId("j"), 1): b"nothing",
    }
    put(place, odd)
    wait_until(lambda: len(place.status()["unreadable"]) == 3)  # A leader reads histories.
    head = place.processes[0]
    head.kill()
    head.wait()
    place.start()
    wait_until(lambda: len(place.status()["unreadable"]) == 4)
    generation, done = wait_until(lambda: steps(count))
    wait_until(lambda: steps(count)[1] > done + 20)
    assert steps(count)[0] == generation
    said = call(place, "status").output
    assert "unreadable  " in said
    assert f"{KEYS.node(NodeId('ghost.1'))}: NodeRecord" in said
    doctor = call(place, "doctor")
    assert (doctor.exit_code, doctor.output.count("cannot be read: ")) == (1, 4)
    nodes = call(place, "nodes").output
    assert "ghost  unreadable" in nodes
    assert "sailor_records_unreadable 4.0" in place.ask("GET", "/metrics")[1]
    left = f"{KEYS.order('order-of-tomorrow')} cannot be read and is left alone"
    wait_until(lambda: left in call(place, "events").output)  # With the next reading of the store.
    for key, value in odd.items():
        assert get(place, key).value == value
        # Once in each of the two processes, but for the history, which the first did not read.
        lines = log_lines(place, key=key)
        assert len(lines) == (1 if "history" in key else 2), lines
        assert {line["level"] for line in lines} == {"error"}


@pytest.mark.slow
def test_unreadable_generation_keeps_the_cluster_until_it_can_be_read(place):
    count = begin(place)
    gen = get(place, KEYS.generation(JobId("j"))).value
    put(place, {KEYS.generation(JobId("j")): gen[:-1] + b',"needs":99}'})
    wait_until(lambda: KEYS.generation(JobId("j")) in place.status()["unreadable"])
    assert place.ask("POST", "/v1/jobs", {"job": JOB, "id": "k"})[0] == 201
    blocked = wait_until(lambda: place.status()["blocked"])
    assert blocked == "sailord cannot read the records of j, which may have the cluster"
    generation, done = steps(count)
    wait_until(lambda: steps(count)[1] > done + 20)
    put(place, {KEYS.generation(JobId("j")): gen})
    wait_until(lambda: "j: running" in call(place, "status").output)
    wait_until(lambda: place.status()["unreadable"] == {})
    assert steps(count)[0] == generation


@pytest.mark.slow
def test_an_unreadable_capacity_record_is_shown_since_it_stops_renting(place):
    host = '[[provider.host]]\nname = "a"\nzone = "us-central1-a"\nmachine = "A100-40x2"\n'
    place.config.write_text(f'{place.config.read_text()}\n[provider]\nkind = "static"\n{host}')
    place.start()
    wait_until(lambda: place.ask("GET", "/readyz")[0] == 200)
    head = place.processes[0]
    head.kill()
    head.wait()  # It would write its own record again.

    async def spoil() -> None:
        store = await open_store(f"embedded://{place.folder}/{place.name}/store.db")
        await store.put(KEYS.capacity, b"nothing")
        await store.close()

    asyncio.run(spoil())
    place.start()
    why = wait_until(lambda: place.status()["unreadable"].get(KEYS.capacity))
    assert "nothing is rented" in why
    assert f"cannot be read: {KEYS.capacity}: " in call(place, "doctor").output
