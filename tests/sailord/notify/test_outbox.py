"""Every message of the outbox reaches its receiver, also if a leader dies while sending."""

from __future__ import annotations

import asyncio
import json

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from agents.protocol.store_keys import Keys
from agents.store.interface import Put
from agents.store.sqlite_store import EmbeddedStore
from sailord.cluster_records import Gateway
from sailord.config import WebhookReceiver
from sailord.notify import outbox as outbox_module
from sailord.notify import webhook_sender
from sailord.notify.feed import FeedEvent
from sailord.notify.outbox import Outbox
from sailord.notify.webhook_sender import WebhookSender


class FakeReceiver:
    """A receiver that accepts ``takes`` messages and refuses more."""

    def __init__(self) -> None:
        self.takes, self.taken, self.refused = 0, list[str](), asyncio.Event()
        self.url, self.bodies = "", list[dict]()
        self.mumbling = ""
        """The address of one whose answers are no HTTP."""

    async def hear(self, request: web.Request) -> web.Response:
        if len(self.taken) >= self.takes:
            self.refused.set()
            return web.Response(status=503)
        self.taken.append((await request.json())["id"])
        return web.Response(status=204)

    async def note(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        return web.Response(status=202)

    async def wait_taken(self, count: int) -> None:
        async with asyncio.timeout(30.0):
            while len(self.taken) < count:
                await asyncio.sleep(0.01)


async def mumble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"garbage\r\n\r\n")
    writer.close()


@pytest.fixture
async def fake_receiver():
    made, app = FakeReceiver(), web.Application()
    app.router.add_post("/in", made.hear)
    app.router.add_post("/next", made.note)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}/in"
    mumbler = await asyncio.start_server(mumble, "127.0.0.1", 0)
    made.mumbling = f"http://127.0.0.1:{mumbler.sockets[0].getsockname()[1]}/in"
    yield made
    mumbler.close()
    await runner.cleanup()


@pytest.fixture
async def gateway(tmp_path):
    """Access to a store with a leader key."""
    store = await EmbeddedStore.open(tmp_path / "store")
    keys = Keys("test")
    await store.transact([], [Put(keys.leader, b"{}")])
    yield Gateway(store, keys)
    await store.close()


async def term_of(gateway: Gateway) -> int:
    leader = await gateway.store.get(gateway.keys.leader)
    assert leader is not None
    return leader.created


class Leader:
    """The parts of a leader that send webhooks; ``die`` simulates SIGKILL."""

    def __init__(self, gateway: Gateway, fake_receiver: FakeReceiver, term: int) -> None:
        self.outbox = Outbox(gateway)
        self.term: int | None = term
        receiver = WebhookReceiver(fake_receiver.url, b"a-receiver-secret-of-ours")
        self.sender = WebhookSender((receiver,), self.outbox, self)
        self.tasks: list[asyncio.Task[None]] = []

    async def lead(self) -> None:
        assert self.term is not None
        await self.outbox.load()
        await self.sender.begin(self.term)
        self.tasks = [asyncio.create_task(work.run()) for work in (self.outbox, self.sender)]

    async def die(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def test_no_message_is_lost_when_the_leader_dies_while_sending(
    gateway, fake_receiver, monkeypatch
):
    monkeypatch.setattr(webhook_sender, "BACKOFF_S_FIRST", 0.05)
    term = await term_of(gateway)
    first = Leader(gateway, fake_receiver, term)
    await first.lead()
    ids = [f"{name}.leaves" for name in "cabed"]
    for id_ in ids:
        event = FeedEvent(0, 1.0, "node_preempted", "a node is draining", term=term)
        first.outbox.offer(id_, event)
    fake_receiver.takes = 2
    await fake_receiver.wait_taken(2)
    await fake_receiver.refused.wait()
    await first.die()
    fake_receiver.takes = 100
    second = Leader(gateway, fake_receiver, term)
    await second.lead()
    await fake_receiver.wait_taken(5)
    await second.die()
    assert list(dict.fromkeys(fake_receiver.taken)) == ids, "all of them, in order"
    assert len(fake_receiver.taken) <= len(ids) + 1, "only the message being sent may arrive twice"


async def test_only_the_newest_messages_are_kept_while_no_receiver_accepts_any(
    gateway, fake_receiver, monkeypatch
):
    """If more are offered at once than are kept, none is deleted before it is stored."""
    monkeypatch.setattr(outbox_module, "KEPT", 5)
    monkeypatch.setattr(webhook_sender, "BACKOFF_S_FIRST", 0.05)
    term = await term_of(gateway)
    leader = Leader(gateway, fake_receiver, term)
    ids = [f"n{number:02}.leaves" for number in range(20)]
    for id_ in ids:
        leader.outbox.offer(id_, FeedEvent(0, 1.0, "node_preempted", "it drains", term=term))
    working = asyncio.create_task(leader.outbox.run())
    async with asyncio.timeout(30.0):
        while not any(e.key.endswith(ids[-1]) for e in (await leader.outbox.read()).entries):
            await asyncio.sleep(0.01)
    working.cancel()
    kept = [json.loads(e.value)["id"] for e in (await leader.outbox.read()).entries]
    assert sorted(kept) == ids[-6:], "KEPT messages, and the last one"


@pytest.mark.parametrize("address", ["{0.url}", "{0.mumbling}", "http://127.0.0.1:nonsense/in"])
async def test_address_of_a_receiver_is_neither_logged_nor_stored(gateway, fake_receiver, address):
    """Anyone who knows the address of a Slack channel can write into it."""
    leader = Leader(gateway, fake_receiver, await term_of(gateway))
    url = f"{address.format(fake_receiver)}/T0/a-secret-word"
    leader.sender.receivers = (WebhookReceiver(url, format="slack"),)
    with capture_logs() as logs:
        await leader.lead()
        leader.outbox.offer("h", FeedEvent(0, 1.0, "job_held", "why", job="j", term=leader.term))
        async with asyncio.timeout(30.0):
            while not any("not accepted" in each["event"] for each in logs):
                await asyncio.sleep(0.01)
        failing = list(leader.outbox.failing.values())
        await leader.die()
    stored = (await gateway.store.snapshot("/sailor/")).entries
    told = [*map(str, logs), *failing, *(each.value.decode() for each in stored)]
    assert len(failing) == 1
    assert "127.0.0.1" in failing[0]
    assert [each for each in told if "a-secret-word" in each] == []


async def test_cursor_written_with_the_receivers_address_is_still_read(gateway, fake_receiver):
    term = await term_of(gateway)
    leader = Leader(gateway, fake_receiver, term)
    (receiver,) = leader.sender.receivers
    old = json.dumps({"after": 0, "url": receiver.url}).encode()
    await gateway.write_as_leader(term, [Put(leader.sender.key(receiver), old)])
    fake_receiver.takes = 1
    leader.outbox.offer("n.leaves", FeedEvent(0, 1.0, "node_preempted", "it drains", term=term))
    await leader.lead()
    await fake_receiver.wait_taken(1)
    cursor = leader.sender.key(receiver)
    async with asyncio.timeout(30.0):
        while (await gateway.store.get(cursor)).value == old:
            await asyncio.sleep(0.01)
    await leader.die()
    assert set(json.loads((await gateway.store.get(cursor)).value)) == {"after"}


async def test_a_receiver_that_is_named_twice_has_two_cursors(gateway, fake_receiver):
    """With one cursor, what was sent under one name would count as sent under the other."""
    leader = Leader(gateway, fake_receiver, await term_of(gateway))
    before = leader.sender.key(leader.sender.receivers[0])
    one, two = (
        WebhookReceiver(fake_receiver.url, b"a-receiver-secret-of-ours", events=(kind,))
        for kind in ("job_held", "checkpoint_committed")
    )
    leader.sender.receivers = (one, two)
    assert leader.sender.key(one) == before != leader.sender.key(two)


async def test_slack_gets_what_concerns_people_and_pagerduty_resolves(gateway, fake_receiver):
    sent = fake_receiver.bodies
    leader = Leader(gateway, fake_receiver, await term_of(gateway))
    url = fake_receiver.url.replace("/in", "/next")
    leader.sender.receivers = (
        WebhookReceiver(url, format="slack"),
        WebhookReceiver(url, b"a-routing-key", format="pagerduty"),
    )
    await leader.lead()
    for kind, id_ in (
        *(("node_preempted", "n"), ("job_held", "h"), ("generation_running", "r")),
        *(("budget_at_risk", "b"), ("job_finished", "f")),
    ):
        event = FeedEvent(0, 1.0, kind, "why", job="j", term=leader.term)
        leader.outbox.offer(id_, event)
    async with asyncio.timeout(30.0):
        while len(sent) < 9:
            await asyncio.sleep(0.01)
    await leader.die()
    assert [each["text"] for each in sent if "text" in each] == [
        ":red_circle: j (test) is held: why",
        ":warning: j (test) budget at risk: why",
        "j (test) why",
    ]
    incidents = [(e["event_action"], e["dedup_key"]) for e in sent if "routing_key" in e]
    assert incidents == [
        ("trigger", "sailor/test/j/job_held"),
        ("resolve", "sailor/test/j/job_held"),
        ("trigger", "sailor/test/j/budget_at_risk"),
        *(
            ("resolve", f"sailor/test/j/{kind}")
            for kind in ("job_held", "budget_at_risk", "deadline_at_risk")
        ),
    ]
