"""A write that the store rejects for good holds its job, and nothing else waits for it."""

from __future__ import annotations

import asyncio
from contextlib import closing
from dataclasses import replace

import pytest

from agents.daemon.clock import Clock
from agents.protocol.records import JobId, JobRecord
from agents.protocol.store_keys import Keys
from agents.rpc.signing import ClusterKey
from agents.store.interface import TRANSACTION_BYTES_MAX, Put, StoreRefused, StoreUnavailable
from agents.store.sqlite_store import EmbeddedStore
from sailord.cluster_records import Gateway
from sailord.config import load_config
from sailord.controller.agent_client import AgentClient
from sailord.controller.loop import build_controller
from sailord.core.model.commands import WriteJob
from sailord.core.model.events import JobWriteRejected
from tests.agents.store.places import NEEDS_ETCD
from tests.agents.store.places import Cluster as Etcd
from tests.processes import until, wait_until
from tests.sailord.daemon.running import JOB as SPEC
from tests.sailord.daemon.running import Place

JOB = JobRecord(JobId("j"), "queued", priority=0, submitted_at=1.0, steps="its turn")
OTHER = replace(JOB, id=JobId("k"))


def with_a_writer(tmp_path, play) -> None:
    """Play with a store writer that leads, and its store."""

    async def run() -> None:
        store = await EmbeddedStore.open(tmp_path / "store")
        keys, config = Keys("test"), load_config(Place(tmp_path).config)
        await store.transact([], [Put(keys.leader, b"{}")])
        leader = await store.get(keys.leader)
        assert leader is not None
        controller = build_controller(
            config, Gateway(store, keys), Clock(), AgentClient(ClusterKey("test", (b"k" * 64,)))
        )
        controller.cluster.state = replace(controller.cluster.state, term=leader.created)
        writing = asyncio.create_task(controller.writer.run())
        try:
            await play(controller, store, keys, leader.created)
        finally:
            writing.cancel()
            await store.close()

    asyncio.run(run())


def test_rejected_write_is_dropped_with_what_follows_for_its_job(tmp_path):
    async def play(controller, store, keys, term):
        too_long = replace(JOB, reason="r" * TRANSACTION_BYTES_MAX)
        for job in (too_long, JOB, OTHER):
            controller.writer.put(term, WriteJob(job))
        _, event = await controller.inbox.next_event()
        assert isinstance(event, JobWriteRejected)
        assert (event.job, "a transaction of" in event.why) == (JOB.id, True)
        await until(controller.writer._writes.empty)
        while await store.get(keys.state(OTHER.id)) is None:
            await asyncio.sleep(0.01)
        assert await store.get(keys.state(JOB.id)) is None
        assert controller.cluster.store.rejected_writes == 1
        assert controller.cluster.store.refused_write == ""

    with_a_writer(tmp_path, play)


def test_late_answer_to_a_write_of_an_earlier_term_means_nothing_in_the_next_one(tmp_path):
    async def play(controller, _, __, term):
        async def late(*_) -> bool:
            controller.cluster.state = replace(controller.cluster.state, term=term + 2)
            return False

        controller.writer._write = late
        assert await controller.writer._try(term, WriteJob(JOB))
        assert controller.inbox._events.empty()

    with_a_writer(tmp_path, play)


@pytest.mark.parametrize(
    "error",
    [
        StoreRefused("etcd refused: invalid user ID or password"),
        StoreUnavailable("its disk is full: no password"),
    ],
    ids=["refused", "a full disk"],
)
def test_refusal_that_may_end_blocks_until_it_does(tmp_path, monkeypatch, error):
    """A wrong password says nothing about the write: no later one overtakes it."""

    async def play(controller, store, keys, term):
        async def refuse(*_):
            raise error

        with monkeypatch.context() as patched:
            patched.setattr(store, "transact", refuse)
            controller.writer.put(term, WriteJob(JOB))
            await until(lambda: "password" in controller.cluster.store.refused_write)
        await until(lambda: not controller.cluster.store.refused_write)
        assert await store.get(keys.state(JOB.id)) is not None

    with_a_writer(tmp_path, play)


# ---- a real sailord ------------------------------------------------------------------------------


def begin(place: Place) -> None:
    place.start()
    wait_until(lambda: place.ask("GET", "/readyz")[0] == 200)
    place.start_agent("a")


def submit(place: Place, id_: str, spec: str = SPEC) -> int:
    return place.ask("POST", "/v1/jobs", {"job": spec, "id": id_})[0]


@pytest.mark.slow
@NEEDS_ETCD
def test_job_whose_plan_is_too_long_for_etcd_is_held_and_the_next_one_runs(tmp_path):
    """etcd takes 2 kB: job files of two lines, and no plan."""
    with closing(Etcd(1, arguments=["--max-request-bytes=2000"])) as etcd:
        place = Place(tmp_path, store=etcd.url)
        try:
            begin(place)
            assert submit(place, "j", SPEC + f"# {'long ' * 100}\n") == 201
            wait_until(lambda: (place.status()["job"] or {}).get("state") == "held")
            reason = place.status()["job"]["phase"]["reason"]
            assert "the store rejects its record for good" in reason
            assert "request is too large" in reason
            assert submit(place, "k") == 201
            wait_until(lambda: place.ask("GET", "/v1/jobs/k")[1]["state"] == "held")
            assert "writes_rejected_total 2.0" in place.ask("GET", "/metrics")[1]
            assert place.status()["leads"]
        finally:
            place.stop_all()
