"""Every webhook event reaches each receiver at least once, even if sailord or a receiver dies."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from typing import Any

import pytest

from sailord.notify.webhook_signature import sign
from tests.local_http import LocalServer, QuietHandler
from tests.processes import wait_until
from tests.sailord.daemon.running import JOB, Place

pytestmark = pytest.mark.slow
SECRET = "a-receiver-secret-of-ours"


class Receiver(LocalServer):
    """Takes messages while it is willing, and answers 503 otherwise."""

    def __init__(self) -> None:
        super().__init__(_Take)
        self.is_willing = True
        self.taken: list[dict[str, object]] = []
        self.traces: list[dict[str, Any]] = []
        """Sent to the same address as an OpenTelemetry collector's."""
        self.refused = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/in"

    def ids(self) -> list[object]:
        return [each["id"] for each in list(self.taken)]


class _Take(QuietHandler):
    server: Receiver

    def reply(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/in/v1/traces":
            self.server.traces.append(json.loads(body))
            self.send_response(200)
            self.end_headers()
            return
        header = self.headers["Sailor-Webhook"]
        moment = float(header.split(",")[0].removeprefix("t="))
        assert header == sign(SECRET.encode(), body, moment)
        if self.server.is_willing:
            self.server.taken.append(json.loads(body))
        else:
            self.server.refused += 1
        self.send_response(204 if self.server.is_willing else 503)
        self.end_headers()


@pytest.fixture
def receivers():
    found = [Receiver(), Receiver()]
    yield found
    for each in found:
        each.close()


@pytest.fixture
def place(tmp_path, receivers):
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "secret").chmod(0o600)
    webhooks = "".join(
        f'[[webhooks.receiver]]\nurl = "{each.url}"\nsecret_file = "secret"\n' for each in receivers
    )
    made = Place(tmp_path, webhooks=webhooks)
    yield made
    made.stop_all()


def start(place: Place):
    head = place.start()
    wait_until(lambda: place.ask("GET", "/readyz")[0] == 200)
    return head


def test_webhooks_are_complete_though_sailord_is_killed_at_any_failpoint(place, receivers):
    """One receiver is away all the while, and hears everything when it is back.

    The leader that sees a job run stores that. If it is killed before, and the job is cancelled
    before the next leader sees it, no receiver is told.
    """
    chance = random.Random(3)
    there, away = receivers
    away.is_willing = False
    head = start(place)
    place.start_agent("a")
    wait_until(lambda: place.status()["nodes"].get("ready"))
    expected = []
    for number in range(3):
        job = f"j{number}"
        assert place.ask("POST", "/v1/jobs", {"job": JOB, "id": job})[0] == 201
        expected.append(f"{job}.1.opened")
        runs = f"/v1/jobs/{job}"
        wait_until(lambda path=runs: "running" in str(place.ask("GET", path)[1].get("phase")))
        time.sleep(chance.uniform(0.0, 0.05))
        os.kill(head.pid, signal.SIGKILL)
        head.wait()
        head = start(place)
        if number:
            wait_until(lambda name=f"{job}.1.running": name in there.ids())
            expected.append(f"{job}.1.running")
        assert place.ask("POST", f"/v1/jobs/{job}/cancel", {})[0] == 202
        time.sleep(chance.uniform(0.0, 0.1))
        os.kill(head.pid, signal.SIGKILL)
        head.wait()
        head = start(place)
        path = f"/v1/jobs/{job}"
        wait_until(lambda path=path: place.ask("GET", path)[1]["state"] == "cancelled")
    wait_until(lambda: set(expected) <= set(there.ids()))
    assert away.refused > 0
    away.is_willing = True
    wait_until(lambda: set(expected) <= set(away.ids()), within_s=60.0)

    def ended(receiver):
        kinds = [(each["job"], each["kind"]) for each in list(receiver.taken)]
        return all((f"j{number}", "job_finished") in kinds for number in range(3))

    for receiver in receivers:
        wait_until(lambda receiver=receiver: ended(receiver))
        # What comes again has the same id, and what came first stands first.
        first = list(dict.fromkeys(receiver.ids()))
        assert [id_ for id_ in first if id_ in expected] == expected
        assert sum(each["kind"] == "job_finished" for each in receiver.taken) >= 3


def test_draining_node_is_reported_after_a_restart_too(place, receivers):
    head = start(place)
    place.start_agent("a")
    wait_until(lambda: place.status()["nodes"].get("ready"))
    receivers[0].is_willing = False
    assert place.ask("POST", "/v1/nodes/a/preempt", {"id": "p", "leaves_at": 3e9})[0] == 202
    wait_until(lambda: receivers[0].refused)
    os.kill(head.pid, signal.SIGKILL)
    head.wait()
    receivers[0].is_willing = True
    start(place)
    wait_until(lambda: receivers[0].taken)
    (told,) = {each["id"] for each in receivers[0].taken}
    assert told == receivers[1].taken[0]["id"]
    assert receivers[0].taken[0]["kind"] == "node_preempted"
    assert receivers[0].taken[0]["node"] == "a"
