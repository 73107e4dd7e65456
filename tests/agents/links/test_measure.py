"""Two agents' ends of a measurement, over real sockets; without the secret nothing is sent."""

from __future__ import annotations

import asyncio
import fcntl
import socket
import threading
import time

import aiohttp
import pytest
from aiohttp import web

from agents.links.exchange import LinkBroken, exchange
from agents.links.http import LinkRoutes
from agents.links.receiver import Receiver
from agents.links.sender import Sender, measure
from agents.links.traffic import bytes_carried
from agents.protocol.codec import decode, encode
from agents.protocol.link_records import LinkOrder, LinkTimes, Listening, ListenOrder
from agents.rpc.client import SignedClient
from agents.rpc.server import answer_signed
from agents.rpc.signing import ClusterKey, Verifier
from agents.rpc.unsigned_bodies import UNSIGNED

HOST = "127.0.0.1"
KEY = ClusterKey("test", (b"k" * 32,))
ALL = 1e15
LISTEN = ListenOrder(1, 1 << 30, 20.0, ALL, look_s=0.01)


def order(port: int = 0, *, flows: int = 1, both_ways: bool = False, **limits: float) -> LinkOrder:
    known = {"bytes_max": 1 << 30, "seconds_max": 20.0, "quiet_bytes_per_s": ALL, "look_s": 0.01}
    sizes = (1 << 10, 1 << 20, 1 << 22)
    return LinkOrder(f"{HOST}:{port}", flows, both_ways, sizes, **{**known, **limits})


def listening(wanted: ListenOrder = LISTEN) -> Listening:
    return asyncio.run(Receiver(HOST).listen(wanted))


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    for thread in threading.enumerate():
        if thread.name == "link-receiver":
            thread.join(20.0)


def test_a_measurement_over_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("there is no IPv6 here")
    found = asyncio.run(Receiver("::1").listen(LISTEN))
    assert found.port > 0
    with socket.create_connection(("::1", found.port)) as connection:
        connection.sendall(found.secret)


@pytest.mark.parametrize("flows", [1, 3])
@pytest.mark.parametrize("both_ways", [False, True])
def test_all_sizes_are_timed(flows, both_ways):
    found = listening(ListenOrder(flows, 1 << 30, 20.0, ALL, look_s=0.01))
    result = measure(order(flows=flows, both_ways=both_ways), found)
    assert result.broken == ""
    assert [entry.size_bytes for entry in result.times] == [1 << 10, 1 << 20, 1 << 22]
    assert result.round_trip_s > 0
    repeats = [len(entry.seconds) + 1 for entry in result.times]
    ways = 2 if both_ways else 1
    sizes = [entry.size_bytes for entry in result.times]
    expected = sum(n * s for n, s in zip(repeats, sizes, strict=True)) * ways * flows
    assert result.bytes_moved == expected


def test_measurement_ends_before_its_bytes_are_spent():
    result = measure(order(bytes_max=1 << 20), listening())
    assert [entry.size_bytes for entry in result.times] == [1 << 10]
    assert result.bytes_moved <= 1 << 20


def test_receiver_takes_no_more_than_it_agreed_to():
    found = listening(ListenOrder(1, 1 << 20, 20.0, ALL, look_s=0.01))
    result = measure(order(), found)
    assert "closed the connection" in result.broken or "failed" in result.broken
    assert [entry.size_bytes for entry in result.times] == [1 << 10]


def test_without_the_secret_nothing_is_served():
    found = listening()
    wrong = Listening(found.port, b"x" * len(found.secret))
    assert measure(order(), wrong).broken != ""
    assert measure(order(), found).broken == "", "the port is still open for the right one"


def test_one_measurement_at_a_time():
    async def twice() -> tuple[Listening, Listening]:
        receiver = Receiver(HOST)
        return await receiver.listen(LISTEN), await receiver.listen(LISTEN)

    first, second = asyncio.run(twice())
    assert second.busy == "takes part in another measurement"
    assert measure(order(), first).broken == ""


def test_peer_that_stops_reading_breaks_the_link_in_time():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        with pytest.raises(LinkBroken, match="stood still"):
            exchange([ours], send=1 << 30, receive=0, end_at=time.monotonic() + 0.05)


@pytest.mark.usefixtures("descriptors")
def test_a_thousand_open_files_break_no_link():
    near, theirs = socket.socketpair()
    with near, theirs, socket.socket(fileno=fcntl.fcntl(near, fcntl.F_DUPFD_CLOEXEC, 1024)) as ours:
        ours.setblocking(False)
        exchange([ours], send=1, receive=0, end_at=time.monotonic() + 5)
        theirs.sendall(theirs.recv(1))
        exchange([ours], send=0, receive=1, end_at=time.monotonic() + 5)


def test_lost_peer_breaks_the_link():
    ours, theirs = socket.socketpair()
    with ours:
        ours.setblocking(False)
        theirs.close()
        with pytest.raises(LinkBroken, match="closed"):
            exchange([ours], send=0, receive=1, end_at=time.monotonic() + 5)


def test_a_link_without_a_receiver_fails():
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        found = measure(order(), Listening(taken.getsockname()[1], b"s" * 32))
    assert "cannot be connected to" in found.broken


def test_counters_of_all_devices_are_added():
    text = (
        "Inter-|   Receive |  Transmit\n face |bytes packets|bytes\n"
        "    lo: 100 1 0 0 0 0 0 0 200 1 0 0 0 0 0 0\n  eth0: 30 1 0 0 0 0 0 0 4 1 0 0 0 0 0 0\n"
    )
    assert bytes_carried(text) == 334


async def served(stack: list[web.AppRunner], session: aiohttp.ClientSession) -> tuple[str, Sender]:
    """An agent's routes, as `agents.server` serves them."""
    verifier = Verifier(KEY, lambda: f"{HOST}:{runner.addresses[0][1]}")

    @web.middleware
    async def check(request, handler):
        return await answer_signed(request, verifier, handler)

    app, sender = web.Application(middlewares=[check]), Sender(SignedClient(session, KEY))
    app[UNSIGNED] = {}
    LinkRoutes(Receiver(HOST), sender).add_to(app.router)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, HOST, 0).start()
    stack.append(runner)
    return f"{HOST}:{runner.addresses[0][1]}", sender


def test_agents_measure_each_other_over_signed_requests():
    async def run() -> tuple[int, LinkTimes, LinkTimes, int, int]:
        runners: list[web.AppRunner] = []
        async with aiohttp.ClientSession() as session:
            one, _ = await served(runners, session)
            two, _ = await served(runners, session)
            client = SignedClient(session, KEY)

            async def ask(**limits: float) -> tuple[int, bytes]:
                asked = order(int(two.rpartition(":")[2]), **limits)
                return await client.call(
                    one, "POST", "/v1/links/measure", encode(asked), to="agent", timeout_s=30.0
                )

            status, body = await ask()
            _, loud = await ask(quiet_bytes_per_s=-1.0)
            unsigned = await session.post(f"http://{one}/v1/links/measure", data=b"{}")
            wrong, _ = await client.call(one, "POST", "/v1/links/listen", b"{}", to="agent")
            for runner in runners:
                await runner.cleanup()
            return status, decode(LinkTimes, body), decode(LinkTimes, loud), unsigned.status, wrong

    status, found, loud, unsigned, wrong = asyncio.run(run())
    assert status == 200
    assert found.broken == found.busy == ""
    assert len(found.times) == 3
    assert "carries" in loud.busy
    assert (unsigned, wrong) == (401, 422)
