"""Thousands of requests at once are answered in words, and the controller goes on deciding."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections import Counter
from contextlib import ExitStack
from typing import Any

import pytest

from agents.rpc.signing import REQUEST_HEADER
from agents.rpc.unsigned_bodies import UNSIGNED_MAX
from sailord.api.access.load_limits import IN_PROGRESS_MAX
from sailord.notify.webhook_signature import SIGNATURE_HEADER
from tests.processes import wait_until
from tests.sailord.daemon.running import JOB, TOKEN

pytestmark = pytest.mark.slow
REQUESTS = 10_000 if os.environ.get("SAILOR_EXAMPLES") else 2_000

FORMS = (
    ("GET", "/v1/status", b""),
    ("POST", "/v1/jobs", b"{"),
    ("POST", "/v1/jobs/none/cancel", b"{}"),
    ("GET", "/v1/jobs/..%2f..%2fetc", b""),
    ("POST", "/v1/webhooks/preemption", b'{"id": "x"}'),
)


def request_of(number: int) -> bytes:
    method, path, body = FORMS[number % len(FORMS)]
    token = TOKEN if number % 2 else "wrong"
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


async def one(port: int, number: int, connected: asyncio.Event, waiting: list[int]) -> bytes:
    """Send one request, once all senders have a connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    waiting.append(number)
    await connected.wait()
    writer.write(request_of(number))
    answer = await reader.read()
    writer.close()
    return answer


async def flood(port: int, count: int) -> list[bytes]:
    connected, waiting = asyncio.Event(), list[int]()
    tasks = [asyncio.create_task(one(port, n, connected, waiting)) for n in range(count)]
    while len(waiting) < count:
        failed = [task.exception() for task in tasks if task.done()]
        assert not any(failed), failed[:3]
        await asyncio.sleep(0.05)
    connected.set()
    return await asyncio.gather(*tasks)


def step(head) -> int:
    return head.ask("GET", "/v1/jobs/flood")[1].get("step") or 0


def latencies(head) -> dict[str, float]:
    lines = head.ask("GET", "/metrics")[1].splitlines()
    return {
        line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1])
        for line in lines
        if "seconds{" in line
    }


def test_10_000_concurrent_requests_do_not_stop_training(head, descriptors):
    if descriptors < REQUESTS + 200:
        pytest.skip(f"this machine lets a process have {descriptors} descriptors")
    assert head.ask("POST", "/v1/jobs", {"job": JOB, "id": "flood"})[0] == 201
    wait_until(lambda: step(head) > 5)
    before = step(head)
    begun = time.monotonic()
    answers = asyncio.run(flood(head.port, REQUESTS))
    took_s = time.monotonic() - begun
    codes = Counter(int(answer.split(b" ", 2)[1]) for answer in answers)
    print(f"{REQUESTS} in {took_s:.1f} s: {dict(codes)}; {latencies(head)}")
    assert set(codes) <= {200, 401, 404, 422, 429}
    assert codes.total() == REQUESTS
    for answer in answers:
        raw = answer.partition(b"\r\n\r\n")[2]
        value = json.loads(raw)
        assert "Traceback" not in str(value)
        assert b" 200 " in answer[:20] or value["problems"][0]["what"]
    # All processes are alive, and the job was followed all the time.
    wait_until(lambda: step(head) > before + 5, within_s=60.0)
    text = (head.folder / "head.log").read_text()
    assert "request failed" not in text
    assert "Traceback" not in text
    assert head.ask("GET", "/v1/jobs/flood")[1]["generation"]["number"] == 1
    head.ask("POST", "/v1/jobs/flood/cancel", {})


def half_sent(path: str, headers: dict[str, str]) -> bytes:
    """A request whose body is announced and never comes."""
    told = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"POST {path} HTTP/1.1\r\nHost: x\r\n{told}Content-Length: 10\r\n\r\n".encode()


def looks_like_an_agent(number: int) -> dict[str, str]:
    """Return a forged signature; it can be checked only once the body has arrived."""
    return {REQUEST_HEADER: f"time={time.time():.3f}, nonce={number:032x}, mac={'0' * 64}"}


def looks_like_a_webhook(number: int) -> dict[str, str]:
    return {SIGNATURE_HEADER: f"t={int(time.time())},v1={number:064x}"}


def opened(stack: ExitStack, port: int, request: bytes) -> socket.socket:
    wire = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
    wire.sendall(request)
    return wire


def code_of(wire: socket.socket) -> int:
    return int(wire.recv(4096).split(b" ", 2)[1])


def test_unauthenticated_slow_bodies_do_not_starve_others(head, descriptors):
    """More than may wait: agents go on reporting, people are answered, the slow are sent away."""
    if descriptors < UNSIGNED_MAX + 200:
        pytest.skip(f"this machine lets a process have {descriptors} descriptors")
    assert head.ask("POST", "/v1/jobs", {"job": JOB, "id": "flood-slow"})[0] == 201
    path = "/v1/jobs/flood-slow"
    wait_until(lambda: (head.ask("GET", path)[1].get("step") or 0) > 5)
    with ExitStack() as stack:
        wires = [
            opened(stack, head.port, half_sent("/v1/agents/report", looks_like_an_agent(number)))
            for number in range(UNSIGNED_MAX + 50)
        ]
        before = head.ask("GET", path)[1]["step"]
        code, status = head.ask("GET", "/v1/status")
        assert (code, status["nodes"]) == (200, {"ready": 1})
        token = f"Authorization: Bearer {TOKEN}\r\n"
        asked = f"GET /v1/nodes HTTP/1.1\r\nHost: x\r\n{token}\r\n".encode()
        assert code_of(opened(stack, head.port, asked)) == 200
        wait_until(lambda: head.ask("GET", path)[1]["step"] > before + 5)
        assert head.ask("GET", path)[1]["generation"]["number"] == 1
        assert code_of(wires[0]) == 408, "the oldest connection makes room for new ones"
        assert code_of(wires[-1]) == 408, "an unfinished body times out"
    head.ask("POST", f"{path}/cancel", {})


def test_slow_clients_with_the_token_do_not_starve_others(head, descriptors):
    """Clients with the token have a limit apart from the Unix socket's and the agents'."""
    if descriptors < IN_PROGRESS_MAX + 200:
        pytest.skip(f"this machine lets a process have {descriptors} descriptors")
    bearer = {"Authorization": f"Bearer {TOKEN}"}
    with ExitStack() as stack:

        def crowded() -> list[Any]:
            half = half_sent("/v1/jobs", bearer)
            wires = [opened(stack, head.port, half) for _ in range(IN_PROGRESS_MAX + 1)]
            return wires if code_of(wires[-1]) == 429 else []

        # On a slow machine the first have been sent away before the last one comes.
        wires = wait_until(crowded)
        assert head.ask("GET", "/v1/status")[0] == 200
        assert code_of(wires[0]) == 408
    wait_until(lambda: head.ask("GET", "/v1/status")[1]["nodes"] == {"ready": 1})
    # The other clients have disconnected, which is no error of sailord.
    assert "Traceback" not in (head.folder / "head.log").read_text()


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/v1/agents/report", {}),
        ("/v1/agents/report", {REQUEST_HEADER: f"time=1, nonce={'0' * 32}, mac={'0' * 64}"}),
        ("/v1/webhooks/preemption", {}),
        ("/v1/webhooks/preemption", {SIGNATURE_HEADER: f"t=1,v1={'0' * 64}"}),
        ("/v1/webhooks/preemption", {"Authorization": "Bearer a-wrong-one"}),
        ("/v1/webhooks/preemption", {"Authorization": "Bearer a.b.c"}),
    ],
)
def test_malformed_credentials_are_refused_before_the_body_arrives(head, path, headers):
    with ExitStack() as stack:
        assert code_of(opened(stack, head.port, half_sent(path, headers))) == 401


def test_webhook_whose_body_never_arrives_gets_408(head):
    with ExitStack() as stack:
        asked = half_sent("/v1/webhooks/preemption", looks_like_a_webhook(1))
        assert code_of(opened(stack, head.port, asked)) == 408
