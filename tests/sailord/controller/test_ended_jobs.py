"""Records of ended jobs do not pile up in the store."""

from __future__ import annotations

from dataclasses import replace

from agents.daemon.clock import Clock
from agents.protocol.codec import encode
from agents.protocol.records import (
    FIRST,
    Durable,
    GenerationRecord,
    JobId,
    JobRecord,
    NodeId,
    Point,
)
from agents.protocol.store_keys import Keys
from agents.store.interface import Delete, Put
from agents.store.sqlite_store import EmbeddedStore
from sailord.cluster_records import Gateway, Transition
from sailord.controller.cluster_state import ClusterState
from sailord.controller.ended_jobs import EndedJobs, surplus
from sailord.controller.inbox import Inbox
from sailord.core.decide import decide
from sailord.core.model.events import JobsForgotten
from sailord.core.model.options import Options
from sailord.core.model.state import State
from sailord.core.sharing.parts import Parts

KEYS = Keys("test")
KEPT = 3


def ended(number: int, how="done") -> JobRecord:
    return JobRecord(JobId(f"old-{number:03}"), how, submitted_at=float(number))


LIVE = (JobRecord(JobId("held"), "held"), JobRecord(JobId("queued"), "queued"),
        JobRecord(JobId("paused"), "paused"))  # fmt: skip


def knowing(*jobs: JobRecord) -> State:
    options = replace(Options(), ended_jobs_kept=KEPT)
    return State(options=options, term=1, jobs={job.id: job for job in jobs})


def test_the_ended_jobs_that_were_submitted_first_are_surplus():
    jobs = [ended(5), ended(1, "failed"), ended(4), ended(2, "cancelled"), ended(3), *LIVE]
    assert surplus(knowing(*jobs)) == ("old-001", "old-002")
    assert surplus(knowing(*jobs[:3], *LIVE)) == ()


def test_the_controller_forgets_what_was_deleted_but_not_what_was_submitted_again():
    again = JobRecord(ended(2).id, "queued")
    before = knowing(ended(1), again, ended(3))
    gone = (ended(1).id, again.id, JobId("unknown"))
    durable = Durable(Point(1, 1), "file:///m", "0")
    before = replace(before, durables={ended(1).id: durable, ended(3).id: durable})
    state, _ = decide(before, JobsForgotten(1.0, gone))
    assert set(state.jobs) == {again.id, ended(3).id}
    assert set(state.durables) == {ended(3).id}


async def in_a_store(tmp_path, state: State, jobs):
    store = await EmbeddedStore.open(tmp_path / "store")
    gateway = Gateway(store, KEYS)
    for job in jobs:
        record = GenerationRecord(job.id, 1, "closed", "p", (NodeId("a"),), FIRST, 1, "")
        puts = [Put(KEYS.spec(job.id), b"spec"), Put(KEYS.generation(job.id), encode(record))]
        line = encode(Transition(1, 0.0, "text"))
        puts += [Put(KEYS.history(job.id, number), line) for number in range(110)]
        await store.transact([], [*puts, gateway.put_job(job), Put(KEYS.about(job.id, "p"), b"{}")])
    await store.put(KEYS.leader, b"us")
    leader = await store.get(KEYS.leader)
    cluster = ClusterState(Parts(replace(state, term=leader.created)))
    return gateway, EndedJobs(gateway, cluster, Inbox(Clock()), settle_s=0.0)


async def keys_of(gateway: Gateway, job: JobId) -> int:
    prefixes = f"{KEYS.jobs}{job}/", f"{KEYS.papers}{job}/"
    return sum([len((await gateway.store.snapshot(each)).entries) for each in prefixes])


async def test_all_records_of_surplus_jobs_are_deleted_and_of_no_other(tmp_path):
    jobs = [ended(number) for number in range(KEPT + 2)]
    gateway, work = await in_a_store(tmp_path, knowing(*jobs), jobs)
    assert not await work.forget_some()
    counts = [await keys_of(gateway, job.id) for job in jobs]
    assert counts == [0, 0, 114, 114, 114]
    _, event = await work.inbox.next_event()
    assert event.jobs == ("old-000", "old-001")
    await gateway.store.close()


async def test_a_job_that_is_queued_again_is_left_alone(tmp_path):
    known = [ended(number) for number in range(KEPT + 1)]
    stored = [JobRecord(known[0].id, "queued"), *known[1:]]
    gateway, work = await in_a_store(tmp_path, knowing(*known), stored)
    assert not await work.forget_some()
    assert await keys_of(gateway, known[0].id) > 0
    await gateway.store.close()


async def test_a_former_leader_deletes_nothing(tmp_path):
    jobs = [ended(number) for number in range(KEPT + 1)]
    gateway, work = await in_a_store(tmp_path, knowing(*jobs), jobs)
    await gateway.store.transact([], [Delete(KEYS.leader)])
    await gateway.store.put(KEYS.leader, b"another")
    assert not await work.forget_some()
    assert await keys_of(gateway, jobs[0].id) == 114
    await gateway.store.close()
