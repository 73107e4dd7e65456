"""Notices of a departure, from the metadata server and from a shutdown of the system."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace

import aiohttp
import pytest

from agents.cloud.gce_metadata import read_instance
from agents.cloud.notices import MAINTENANCE, PREEMPTED, SHUTDOWN, Notices
from agents.core.decide import decide
from agents.core.model import (
    Event,
    NoticeGiven,
    NoticeWithdrawn,
    Register,
    SelfTested,
    State,
    StopRequested,
    StoreOrder,
)
from agents.daemon.clock import Clock
from agents.protocol.codec import decode
from agents.protocol.records import NodeId, NodeRecord, Order
from agents.protocol.store_keys import Keys
from agents.registration import Registration
from agents.store.factory import open_store
from agents.store.socket_server import serve
from tests.agents.running import PREFIX, Place, place
from tests.fakes.metadata import Metadata, metadata_server
from tests.processes import until

NODE = NodeId("a.b.1")
TERMINATE = "TERMINATE_ON_HOST_MAINTENANCE"


@contextlib.contextmanager
def asked_of(server: Metadata) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GCE_METADATA_HOST", server.address)
        yield


@contextlib.asynccontextmanager
async def watched(server: Metadata, *recalled: str) -> AsyncIterator[list[Event]]:
    """Collect the events of an agent that follows the server."""
    events: list[Event] = []
    notices = Notices(NODE, 30.0, 10.0, Clock(), events.append)
    notices.restore(recalled)
    with asked_of(server):
        async with aiohttp.ClientSession() as session:
            watch = asyncio.create_task(notices.watch(session))
            try:
                yield events
            finally:
                watch.cancel()
                await asyncio.wait([watch])


def kinds(events: list[Event]) -> list[str]:
    return [type(event).__name__ for event in events]


async def test_gce_each_departure_has_its_own_notice_and_a_false_alarm_is_withdrawn():
    async with metadata_server() as server, watched(server) as events:
        for count in (1, 2):
            await until(lambda: server.waiting == 2)
            await server.flip(PREEMPTED, "TRUE")
            await until(lambda least=2 * count - 1: len(events) == least)
            await until(lambda: server.waiting == 2)
            await server.flip(PREEMPTED, "FALSE")
            await until(lambda least=2 * count: len(events) == least)
        assert kinds(events) == ["NoticeGiven", "NoticeWithdrawn"] * 2
        first, gone, second, _ = events
        assert isinstance(first, NoticeGiven)
        assert isinstance(second, NoticeGiven)
        assert isinstance(gone, NoticeWithdrawn)
        assert first.id == gone.id != second.id
        assert first.leaves_at == first.at + 30.0
        # The first request does not wait; all others wait for a change.
        assert [waits for what, waits in server.asked if what == PREEMPTED][:2] == [False, True]


@pytest.mark.parametrize(
    "mood",
    [{"delay_s": 0.6}, {"fails": 3}, {"drops": 3}, {"is_impatient": True}, {"has_marks": False}],
    ids=str,
)
async def test_gce_a_faulty_metadata_server_is_still_followed(mood):
    async with metadata_server() as server, watched(server) as events:
        await until(lambda: server.waiting == 2)
        for name, value in mood.items():
            setattr(server, name, value)
        asked = len(server.asked)
        await server.flip(PREEMPTED, "TRUE")
        await until(lambda: events)
        await server.flip(PREEMPTED, "FALSE")
        await until(lambda: len(events) == 2)
        assert kinds(events) == ["NoticeGiven", "NoticeWithdrawn"]
        assert len(server.asked) - asked < 40, "it is asked without a pause"


async def test_gce_a_flag_set_before_the_agent_started_gives_a_notice_at_once():
    async with metadata_server() as server:
        server.values[PREEMPTED] = "TRUE"
        async with watched(server) as events:
            await until(lambda: events)
            assert kinds(events) == ["NoticeGiven"]


async def test_gce_two_sources_share_one_notice_until_both_withdraw():
    async with metadata_server() as server, watched(server) as events:
        await until(lambda: server.waiting == 2)
        await server.flip(MAINTENANCE, "MIGRATE_ON_HOST_MAINTENANCE")  # A live migration.
        await server.flip(MAINTENANCE, TERMINATE)
        await until(lambda: len(events) == 1)
        await server.flip(PREEMPTED, "TRUE")
        await until(lambda: len(events) == 2)
        early, late = events
        assert isinstance(early, NoticeGiven)
        assert isinstance(late, NoticeGiven)
        assert early.id == late.id
        assert early.leaves_at is None
        assert late.leaves_at == late.at + 30.0
        asked = len(server.asked)
        await server.flip(MAINTENANCE, "NONE")
        await until(lambda: len(server.asked) > asked)  # The change was read.
        await until(lambda: server.waiting == 2)
        assert len(events) == 2
        await server.flip(PREEMPTED, "FALSE")
        await until(lambda: len(events) == 3)
        assert events[2] == NoticeWithdrawn(events[2].at, early.id)


async def test_gce_a_restarted_agent_keeps_its_notice():
    id_ = f"going-{NODE}-5"
    async with metadata_server() as server:
        server.values[PREEMPTED] = "TRUE"
        async with watched(server, id_, "end-x") as events:
            await until(lambda: events)
            assert isinstance(events[0], NoticeGiven)
            assert events[0].id == id_
        server.values[PREEMPTED] = "FALSE"
        async with watched(server, id_) as events:
            await until(lambda: events)
            assert events == [NoticeWithdrawn(events[0].at, id_)]
        # There is no withdrawal before both sources were read.
        events.clear()
        half = Notices(NODE, 30.0, 10.0, Clock(), events.append)
        half.restore([id_])
        half.hear(MAINTENANCE, is_leaving=False)
        assert events == []


@pytest.mark.parametrize("is_told", [True, False], ids=["told", "untold"])
def test_gce_a_shutdown_sets_its_own_deadline_with_or_without_a_preemption_flag(is_told):
    events: list[Event] = []
    now = [100.0]
    clock = SimpleNamespace(now=lambda: now[0])
    notices = Notices(NODE, 120.0, 30.0, clock, events.append)
    if is_told:
        notices.hear(PREEMPTED, is_leaving=True)
        now[0] += 10.0
    notices.hear(SHUTDOWN, is_leaving=True)
    ends = [event.leaves_at for event in events if isinstance(event, NoticeGiven)]
    assert ends == ([220.0, 140.0] if is_told else [130.0])
    assert len({event.id for event in events if isinstance(event, NoticeGiven)}) == 1


async def test_gce_only_a_server_with_the_metadata_header_is_believed():
    async with metadata_server() as server, aiohttp.ClientSession() as session:
        with asked_of(server):
            machine = await read_instance(session)
            assert machine is not None
            assert (machine.machine_type, machine.zone) == ("a2-highgpu-2g", "us-central1-b")
            server.fails, server.drops = 1, 1
            assert await read_instance(session) == machine
            server.is_google = False
            assert await read_instance(session) is None


def ready() -> State:
    node = NodeRecord(NODE, "a", "z", "m", "g", 1, "h:1")
    return decide(State(node, is_registered=True), SelfTested(1.0))[0]


def told(state: State, event: Event) -> tuple[State, list[Order], list[NodeRecord]]:
    state, commands = decide(state, event)
    orders = [command.order for command in commands if isinstance(command, StoreOrder)]
    return state, orders, [c.node for c in commands if isinstance(c, Register)]


def test_a_second_notice_can_only_move_the_departure_forward():
    state, orders, _ = told(ready(), NoticeGiven(2.0, "x", None))
    assert [order.id for order in orders] == ["x"]
    state, orders, nodes = told(state, NoticeGiven(3.0, "x", 33.0))
    assert (orders, [node.leaves_at for node in nodes]) == ([], [33.0])
    state, orders, nodes = told(state, NoticeGiven(4.0, "x", 34.0))
    assert (orders, nodes) == ([], [])
    state, orders, _ = told(state, NoticeGiven(5.0, "x", 20.0))
    assert (orders, state.node.leaves_at) == ([], 20.0)


def test_a_stop_of_a_draining_node_gives_no_second_notice():
    state, _, _ = told(ready(), NoticeGiven(2.0, "x", 32.0))
    state, orders, _ = told(state, StopRequested(3.0))
    assert orders == []
    assert state.node.leaves_at == 32.0
    _, orders, _ = told(ready(), StopRequested(3.0))
    assert [order.id for order in orders] == [f"end-{NODE}-3000"], (
        "each stop is an order of its own"
    )


def test_a_node_drains_until_all_its_notices_are_withdrawn():
    state, _, _ = told(ready(), NoticeGiven(2.0, "x"))
    state, _, _ = told(state, NoticeGiven(2.0, "y"))
    state, orders, _ = told(state, NoticeWithdrawn(3.0, "x"))
    assert (state.node.state, orders) == ("draining", [])
    state, orders, _ = told(state, NoticeWithdrawn(4.0, "y"))
    assert (state.node.state, [i.id for i in orders]) == ("ready", ["y-withdrawn"])


async def test_a_withdrawal_is_stored_after_its_notice(tmp_path):
    held = await open_store(f"embedded://{tmp_path}/store.db")
    server = await serve(held, tmp_path / "s")
    store = await open_store(f"unix://{tmp_path}/s")
    here = Registration(store, Keys("test"), 2.0, Clock(), [].append)
    raising = asyncio.create_task(here.store_orders())
    await server.close()
    names = [f"{count:02}" for count in range(20)]
    for name in reversed(names):
        here.store_order(Order(name, "preempt", NODE))
    await asyncio.sleep(0.05)
    server = await serve(held, tmp_path / "s")

    async def all_there():
        entries = (await held.snapshot(f"{PREFIX}intent/")).entries
        return entries if len(entries) == len(names) else None

    entries = await until(all_there)
    by_age = sorted(entries, key=lambda entry: entry.created)
    assert [decode(Order, entry.value).id for entry in by_age] == names[::-1]
    raising.cancel()
    await store.close()
    await server.close()
    await held.close()


async def orders(here: Place) -> list[Order]:
    found = (await here.store.snapshot(f"{PREFIX}intent/")).entries
    return [decode(Order, entry.value) for entry in sorted(found, key=lambda e: e.created)]


@pytest.mark.slow
async def test_gce_a_real_agent_drains_recovers_and_drains_again(tmp_path):
    async with metadata_server() as server, place(tmp_path) as here:
        here.environment["GCE_METADATA_HOST"] = server.address
        agent = here.start()
        node = await here.ready()
        await until(lambda: server.waiting == 2)
        await server.flip(PREEMPTED, "TRUE")

        async def stored(count):
            found = await orders(here)
            return found if len(found) == count else None

        first = (await until(lambda: stored(1)))[0]
        assert (first.kind, first.target) == ("preempt", node.id)
        assert first.leaves_at is not None
        agent.kill()  # The next agent process knows the notice.
        agent.wait()
        await until(lambda: server.waiting == 0)
        here.start()
        await until(lambda: server.waiting == 2)
        assert await orders(here) == [first]
        await server.flip(PREEMPTED, "FALSE")
        assert (await here.ready()).id == node.id
        await until(lambda: stored(2))
        await until(lambda: server.waiting == 2)
        await server.flip(PREEMPTED, "TRUE")
        last = (await until(lambda: stored(3)))[2]
        assert last.kind == "preempt"
        assert last.id != first.id


@pytest.mark.slow
@pytest.mark.parametrize("told_by", [signal.SIGPWR, signal.SIGTERM])
async def test_gce_a_system_shutdown_gives_a_notice_with_its_time(tmp_path, told_by):
    async with place(tmp_path) as here:
        agent, node = await here.train()
        agent.send_signal(told_by)
        agent.send_signal(signal.SIGTERM)
        told = await until(lambda: orders(here))
        assert [order.kind for order in told] == ["preempt"]
        assert (told[0].leaves_at is not None) == (told_by == signal.SIGPWR)
        await here.open(node, 1, state="closed")
        await until(lambda: agent.poll() is not None)
        assert (agent.returncode, len(await orders(here))) == (0, 1)
