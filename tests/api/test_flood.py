"""Ten thousand requests at once are answered in words, and the controller goes on deciding."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import time
from collections import Counter

import pytest

from tests.daemon.running import JOB, TOKEN, wait_until

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
    """One request, sent when all have a connection."""
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


@pytest.fixture
def descriptors():
    """As many as the machine lets us have; the limit of this process is put back."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def step(head) -> int:
    return head.ask("GET", "/v1/jobs/flood")[1].get("step") or 0


def latencies(head) -> dict[str, float]:
    lines = head.ask("GET", "/metrics")[1].splitlines()
    return {
        line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1])
        for line in lines
        if "seconds{" in line
    }


def test_ten_thousand_requests_at_once(head, descriptors):
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
    # Nobody died of it, and the job was followed all the while.
    wait_until(lambda: step(head) > before + 5, within_s=60.0)
    text = (head.folder / "head.log").read_text()
    assert "a request failed" not in text
    assert "Traceback" not in text
    assert head.ask("GET", "/v1/jobs/flood")[1]["generation"]["number"] == 1
    head.ask("POST", "/v1/jobs/flood/cancel", {})
