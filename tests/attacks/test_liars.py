"""A node with the cluster's key reports nonsense: sailord refuses it, or lives with it."""

from __future__ import annotations

import json
import time
from http.client import HTTPConnection
from typing import Any

import pytest

from agents.rpc.signing import REQUEST_HEADER, ClusterKey, sign_request
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
def test_paths_lead_nowhere(head, path):
    """2: refused since ever."""
    assert head.ask("GET", path)[0] in (401, 404, 405, 422)
