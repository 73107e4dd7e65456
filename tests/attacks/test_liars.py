"""A node with the cluster's key reports nonsense: sailord refuses it, or goes on in spite of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import ssl
import time
from http.client import HTTPConnection, HTTPSConnection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agents.daemon import unreadable
from agents.daemon.clock import Clock
from agents.protocol.records import JobId
from agents.rpc.signing import REQUEST_HEADER, ClusterKey, sign_request
from agents.workers.gang import WorkerGang
from agents.workers.join import GenerationJoiner
from agents.workers.pidfd import ProcessId
from agents.workers.process import WorkerProcess
from agents.workers.status import WorkerStatus
from sailord.authority import Authority
from tests.processes import wait_until
from tests.sailord.daemon.running import JOB, Place

REPORT = "/v1/agents/report"
HUGE = 10**30
LIES: tuple[dict[str, Any], ...] = (
    {"step": HUGE},
    {"step": -1},
    {"step": 1e308},
    {"step": "9"},
    {"generation": HUGE},
    {"generation": -5},
    {"number": HUGE},
    {"node": "../../leader"},
    {"node": "a" * 100_000},
    {"node": "other.1"},
    {"heard": {"term": HUGE, "generation": HUGE}},
    {"sealed": [{"point": {"step": HUGE, "generation": HUGE}, "holds": []}] * 1000},
    {"sealed": [[[[[[[[]]]]]]]]},
    {"taking": "over"},
)


def post(place: Place, body: bytes) -> int:
    address = f"127.0.0.1:{place.port}"
    key = ClusterKey.read(place.key, "test")
    header, _ = sign_request(key, address, "POST", REPORT, body, at=time.time())
    wire = HTTPConnection("127.0.0.1", place.port, timeout=10)
    wire.request("POST", REPORT, body, {REQUEST_HEADER: header})
    code = wire.getresponse().status
    wire.close()
    return code


@pytest.mark.slow
def test_absurd_reports_neither_stop_nor_move_sailord(head, cost):
    head.start_agent("a")
    wait_until(lambda: head.status()["nodes"].get("ready"))
    assert head.ask("POST", "/v1/jobs", {"job": JOB, "id": "j"})[0] == 201
    wait_until(lambda: (head.ask("GET", "/v1/jobs/j")[1].get("step") or 0) > 5)
    truth = {"node": "a.1", "number": 1, "heard": {"term": 0, "generation": 0}, "generation": 1,
             "taking": "running", "step": 3, "sealed": []}  # fmt: skip
    codes = [post(head, json.dumps({**truth, **lie}).encode()) for lie in LIES]
    codes += [post(head, body) for body in (b"", b"[]", b"null", b"[" * 100_000, b"\xff" * 99)]
    assert set(codes) <= {200, 413, 422}, codes
    before = head.ask("GET", "/v1/jobs/j")[1]
    wait_until(lambda: head.ask("GET", "/v1/jobs/j")[1]["step"] > before["step"] + 5)
    after = head.ask("GET", "/v1/jobs/j")[1]
    assert after["step"] < 10**6
    assert after["generation"]["number"] == 1
    log = (head.folder / "head.log").read_text()
    assert "Traceback" not in log
    assert head.status()["leads"]
    cost(f"an agent lies, {len(codes)} absurd reports", "not tried",
         f"{codes.count(422)} refused, the others without effect; the job trains on")  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    ["/v1/jobs/..%2f..%2fetc", "/v1/jobs/../../etc/passwd", "/v1/packages/..%2f..%2fx/1",
     "/v1/nodes/%2e%2e/logs", "/v1/jobs/j/checkpoints/..%2f1/pin", "/v1/jobs/j%00/why"],
)  # fmt: skip
def test_path_traversal_is_refused(head, path):
    assert head.ask("GET", path)[0] in (401, 404, 405, 422)


@pytest.mark.slow
def test_an_agent_reports_under_tls_for_its_own_node_alone(tls_head, cost):
    folder = tls_head.folder
    authority = Authority.open(folder / "ca")
    for role, name in (("agent", "n1"), ("sailord", "other")):
        authority.issue(role, name, folder / name)
    said = json.dumps({"node": "n1.1a.1", "number": 1, "heard": {"term": 0, "generation": 0}})
    about = {"n1": said, "n2": said.replace("n1.", "n2."), "n": said.replace("n1.", "n.")}
    codes = {
        (who, node): post_over_tls(tls_head, folder / who, body.encode())
        for who in ("n1", "alice", "other")
        for node, body in about.items()
    }
    assert codes.pop(("n1", "n1")) in (200, 409)
    assert set(codes.values()) == {403}, codes
    assert "Traceback" not in (folder / "head.log").read_text()
    cost("an agent, a user and a sailord report for other nodes, TLS", "not tried", "403 each")


def post_over_tls(place: Place, certificate: Path, body: bytes) -> int:
    context = ssl.create_default_context(cafile=str(certificate / "ca.pem"))
    context.check_hostname = False
    context.load_cert_chain(certificate / "certificate.pem", certificate / "key.pem")
    key = ClusterKey.read(place.key, "test")
    to = f"127.0.0.1:{place.port}"
    header, _ = sign_request(key, to, "POST", REPORT, body, at=time.time())
    wire = HTTPSConnection("127.0.0.1", place.port, timeout=10, context=context)
    try:
        wire.request("POST", REPORT, body, {REQUEST_HEADER: header})
        return wire.getresponse().status
    finally:
        wire.close()


FORGED: tuple[dict[str, Any], ...] = (
    {"rank": 0, "meeting": "10.0.0.66:1"},
    {"meeting": "10.0.0.66:1"},
    {"rank": 0, "taking": "failed", "failure": "rank 0 is at fault"},
    {"rank": 7},
    {"generation": 9, "step": HUGE},
    {"generation": -1},
    {"step": "9"},
    {"step": 1e308},
    {"taking": "over"},
    {"sealed_at": {"step": HUGE}},
    {"broken_peers": 3},
    {"failure": ["x"]},
)


async def test_a_worker_can_report_for_its_own_rank_only(tmp_path, cost, monkeypatch):
    """This process is rank 1 of two; rank 0 is at work."""
    told: list[Any] = []
    heard: list[Any] = []
    client: Any = SimpleNamespace(is_service=False, orphan_s=1e6, wait_settled=settled,
                                  ensure_running=settled)  # fmt: skip
    gang = WorkerGang(tmp_path, client, Clock(), told.append)
    errors: list[str] = []
    log = SimpleNamespace(error=lambda event, **_: errors.append(event))
    monkeypatch.setattr(unreadable, "log", log)
    meetings: list[Any] = []

    async def publish(*meeting: object) -> None:
        meetings.append(meeting)

    rendezvous: Any = SimpleNamespace(known=lambda *_: None, publish=publish)
    any_: Any = None
    joiner = GenerationJoiner(any_, any_, any_, any_, gang, rendezvous, any_)

    def hear(job: JobId, status: WorkerStatus) -> None:
        heard.append((job, status))
        joiner.hear(job, status)

    gang.hear = hear
    gang.job, gang.generation, gang._is_starting = JobId("j"), 3, False
    first, second = (
        WorkerProcess(tmp_path, cast("Any", SimpleNamespace(id=ProcessId(pid, 1))),
                      {"job": "j", "generation": 3, "rank": rank})
        for rank, pid in ((0, 1), (1, os.getpid()))
    )  # fmt: skip
    first.status = WorkerStatus(3, 0, "running", 41)
    truth = {"generation": 3, "rank": 1, "taking": "running", "step": 41}
    await gang.open(JobId("j"), 0, 0)
    gang.generation = 3
    gang.members += [first, second]
    lines = [json.dumps({**truth, **lie}).encode() for lie in FORGED]
    lines += [b"", b"[]", b"null", b"\xff" * 99, b"[" * 100_000, b"x" * (1 << 22)]
    for line in lines:
        with contextlib.suppress(ConnectionError):
            await say(tmp_path / "workers.sock", line)
    assert all((each.generation, each.step) != (9, HUGE) and not each.failure for each in told)
    told.clear()
    assert all(status.rank == 1 for _, status in heard)
    heard.clear()
    await say(tmp_path / "workers.sock", json.dumps(truth).encode())
    async with asyncio.timeout(30):
        while not told:
            await asyncio.sleep(0)
    assert [(each.generation, each.step, each.taking) for each in told] == [(3, 41, "running")]
    assert [status.rank for _, status in heard] == [1]
    assert meetings == [], "rank 0 alone says where all ranks meet"
    gang.members.clear()
    await gang.close(is_over=False)
    assert errors == ["skipped an unreadable record"]
    cost(f"a worker forges {len(lines)} statuses", "not tried", "believed of its own rank alone")


async def settled() -> None:
    """A fork server that has nothing to do."""


async def say(path: Path, line: bytes) -> None:
    """Send a line, and wait until the other end has read it or closed."""
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        writer.write(line + b"\n")
        writer.write_eof()
        await reader.read()
    finally:
        writer.close()
