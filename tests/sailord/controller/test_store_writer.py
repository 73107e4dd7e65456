"""The store writer forgets plans that nothing needs any more."""

from __future__ import annotations

import asyncio

from agents.daemon.clock import Clock
from agents.protocol.records import JobId, JobRecord
from agents.protocol.store_keys import Keys
from agents.store.sqlite_store import EmbeddedStore
from sailord.cluster_records import Gateway
from sailord.controller.cluster_state import ClusterState
from sailord.controller.inbox import Inbox
from sailord.controller.store_writer import StoreWriter
from sailord.core.model.commands import WriteGeneration
from sailord.core.model.events import GenerationWritten
from sailord.core.model.state import State
from sailord.core.sharing.parts import Parts
from sailord.notify.outbox import Outbox
from sailord.planning.messages import FoundPlan
from tests.sailord.core.states import JOB, A, B, generation, proposal

KEYS = Keys("test")
OLD, FORGOTTEN, BESIDE = JobId("old"), JobId("forgotten"), JobId("beside")


async def test_plans_of_ended_jobs_go_at_the_next_generation_of_another(tmp_path):
    store = await EmbeddedStore.open(tmp_path / "store")
    gateway = Gateway(store, KEYS)
    await store.put(KEYS.leader, b"us")
    term = (await store.get(KEYS.leader)).created
    known = (JobRecord(JOB, "running"), JobRecord(OLD, "done"), JobRecord(BESIDE, "held"))
    cluster = ClusterState(Parts(State(term=term, jobs={job.id: job for job in known})))
    inbox, found = Inbox(Clock()), FoundPlan(proposal(A, B), b"{}", {})
    writer = StoreWriter(gateway, Outbox(gateway), cluster, inbox, Clock())
    opened = generation(A, B, number=1, term=term)
    kept = {(JOB, opened.plan), (JOB, "asked for meanwhile"), (BESIDE, "theirs")}
    writer.plans |= dict.fromkeys({*kept, (OLD, "x"), (FORGOTTEN, "x")}, found)
    writer.put(term, WriteGeneration(opened, None))
    running = asyncio.create_task(writer.run())
    _, event = await inbox.next_event()
    running.cancel()
    await store.close()
    assert isinstance(event, GenerationWritten)
    assert set(writer.plans) == kept
