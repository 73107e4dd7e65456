"""Strangers flood sailord and an agent: the leader leads on, and the log stays short."""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.agents.running import KEY
from tests.agents.running import place as cluster_at
from tests.attacks.conftest import MINUTES
from tests.processes import wait_until
from tests.sailord.daemon.running import ROOT, TOKEN, Over

LOG_BYTES_MAX = 50_000

FLOODS = {
    "pipelined": (600, "33 s without a leader, lease 10 s"),
    "webhook": (600, "4 s without a leader; Pub/Sub got 429"),
    "livez": (600, "status after 1.7 s, 4,200 answers/s"),
    "wrong-token": (600, "no limit, no count, no line in the log"),
    "unknown": (600, "no limit"),
    "half-header": (1500, "no time limit"),
    "silent": (1500, "no limit: descriptors ran out, 22 MB of log"),
    "half-body": (800, "bounded (5 s, 512 at once)"),
    "oversize-header": (100, "400 each"),
    "garbage": (300, "a line of log each"),
}
"""Connections, and what the flood did before there were limits."""
HANDSHAKES = {
    "half-tls": (1500, "all 1,024 handshakes of one address: others refused"),
    "full-tls": (100, "not tried"),
}
"""Floods of a port with TLS."""
IN_CI = ("pipelined", "silent", "half-body")
"""One of each sort: requests, idle connections, bodies."""
KINDS = [
    kind if kind in IN_CI else pytest.param(kind, marks=pytest.mark.at_length) for kind in FLOODS
]


def flood(kind: str, port: int, connections: int, seconds: float) -> subprocess.Popen[bytes]:
    words = [kind, str(port), str(connections), str(seconds)]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.attacks.floods", *words], cwd=ROOT, stdout=subprocess.PIPE
    )


def log_of(place) -> str:
    return (place.folder / f"{place.name}.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_flood_takes_no_leadership(head, kind, cost):
    survive(head, kind, cost, *FLOODS[kind], lambda: asked(head.port, TOKEN))


@pytest.mark.slow
@pytest.mark.parametrize("kind", HANDSHAKES)
def test_a_flood_of_handshakes_does_not_block_other_clients(tls_head, kind, cost):
    """A user at another address is served meanwhile."""

    def ask() -> int:
        tls = tls_of_user(tls_head.folder / "alice")
        return asked(tls_head.port, TOKEN, source="127.0.0.2", tls=tls)

    survive(tls_head, kind, cost, *HANDSHAKES[kind], ask, meanwhile=ask)


def tls_of_user(folder: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    context.check_hostname = False  # Its name is in an address of its own (docs/security.md).
    context.load_cert_chain(folder / "certificate.pem", folder / "key.pem")
    return context


def survive(head, kind, cost, connections, before, ask, meanwhile=lambda: 200):
    """Flood; the leader leads on, its log stays short, and ``meanwhile`` is answered with 200."""
    seconds = 10.0 if MINUTES else 3.0
    if MINUTES and kind == "pipelined":
        seconds = 60 * MINUTES
    flooding = flood(kind, head.port, connections, seconds)
    slowest = 0.0
    while flooding.poll() is None:
        begun = time.monotonic()
        code, status = head.ask("GET", "/v1/status")
        slowest = max(slowest, time.monotonic() - begun)
        assert (code, status["leads"]) == (200, True)
        assert meanwhile() == 200
        time.sleep(0.1)
    assert flooding.wait() == 0
    answers = json.loads(flooding.stdout.read())
    flooding.stdout.close()
    log = log_of(head)
    assert log.count("elected leader") == 1
    assert "no longer leader" not in log
    assert "Traceback" not in log
    assert len(log) < LOG_BYTES_MAX
    # People with the token are served again at once, also from the same address.
    wait_until(lambda: ask() == 200)
    cost(
        f"5, 9 {kind}, {connections} connections, {seconds:.0f} s",
        before,
        f"leadership kept; slowest status {slowest:.2f} s; log {len(log)} bytes; {answers}",
    )


def asked(port: int, token: str, *, source: str = "", tls: ssl.SSLContext | None = None) -> int:
    with ExitStack() as stack:
        plain = socket.create_connection(("127.0.0.1", port), 10, source_address=(source, 0))
        wire = stack.enter_context(plain)
        if tls is not None:
            wire = stack.enter_context(tls.wrap_socket(wire))
        wire.sendall(b"GET /v1/status HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
                     b"Authorization: Bearer %s\r\n\r\n" % token.encode())  # fmt: skip
        return int(wire.recv(4096).split(b" ", 2)[1])


def test_an_answer_to_a_stranger_ends_the_connection(head):
    """So the requests that were sent ahead are not even read."""
    for path, code in (("/v1/status", 401), ("/openapi.json", 200), ("/none", 401)):
        with socket.create_connection(("127.0.0.1", head.port), timeout=10) as wire:
            wire.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode() * 10)
            said = b""
            while data := wire.recv(1 << 16):
                said += data
        assert said.count(b"HTTP/1.1 ") == 1, said[:200]
        assert int(said.split(b" ", 2)[1]) == code
    local = Over(head.socket)
    for _ in range(3):
        local.request("GET", "/livez")
        assert local.getresponse().read()
    local.close()


@pytest.mark.slow
async def test_half_bodies_at_an_agent_end_and_leave_no_trace(tmp_path, cost):
    """Unsigned ones are refused before the body; few that look signed may wait at a time."""
    async with cluster_at(tmp_path) as place:
        place.start()
        node = await place.ready()
        port = int(node.address.rpartition(":")[2])
        with ExitStack() as stack:
            wires = [
                stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
                for _ in range(600)
            ]
            for wire in wires[:300]:
                wire.sendall(b"POST /v1/abort HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n")
            now = f"{time.time():.3f}".encode()
            for wire in wires[300:]:
                wire.sendall(
                    b"POST /v1/abort HTTP/1.1\r\nHost: x\r\nSailor-Signature: time=%s, nonce=%s, "
                    b"mac=%s\r\nContent-Length: 9\r\n\r\n{" % (now, b"0" * 32, b"0" * 64)
                )
            assert {wire.recv(4096).split(b" ", 2)[1] for wire in wires[:300]} == {b"401"}
            assert wires[300].recv(4096).split(b" ", 2)[1] == b"408"
        assert (await place.ready()).id == node.id
        log = (tmp_path / "agent.log").read_text()
        assert "Traceback" not in log
        assert KEY.keys[0].decode() not in log
        cost("8 half bodies at an agent, 600", "alive forever; a trace each when they left",
             f"401 at once or 408 after 5 s; log {len(log)} bytes")  # fmt: skip


def test_silent_connections_end():
    """The limit is 30 s; here a listener of its own has less patience."""
    script = Path(__file__).with_name("silent_listener.py")
    with subprocess.Popen(
        [sys.executable, script], cwd=ROOT, stdout=subprocess.PIPE, env={"PYTHONPATH": str(ROOT)}
    ) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        for begun in (b"", b"GET / HTTP/1.1\r\nHost: "):
            with socket.create_connection(("127.0.0.1", port), timeout=20) as wire:
                wire.sendall(begun)
                assert wire.recv(10) == b"", "it is closed without an answer"
        process.kill()
