"""A following command resumes where it was after sailord restarts, and retries with backoff."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time

import pytest

from sailord import client as client_module
from sailord.client import PAUSE_S_FIRST, PAUSE_S_MAX, Client, Reconnector, ServerProblem
from sailord.local.paths import free_port
from tests.local_http import LocalServer, QuietHandler
from tests.processes import wait_until
from tests.sailord.daemon.running import JOB, ROOT


class Scripted(LocalServer):
    """Answers each request as the next line of a script says, and the last one forever."""

    def __init__(self, *script: tuple[int, bytes]) -> None:
        super().__init__(_Answer)
        self.script, self.asked = list(script), list[str]()

    @property
    def client(self) -> Client:
        return Client(f"http://127.0.0.1:{self.server_port}")


class _Answer(QuietHandler):
    server: Scripted

    def reply(self) -> None:
        said = self.server.script[0]
        if len(self.server.script) > 1:
            self.server.script.pop(0)
        self.server.asked.append(self.path)
        self.send_response(said[0])
        is_stream = said[0] == 200
        self.send_header("Content-Type", "text/event-stream" if is_stream else "application/json")
        self.end_headers()
        self.wfile.write(said[1])


def event(id_: int) -> bytes:
    return f"id: {id_}\ndata: {json.dumps({'id': id_})}\n\n".encode()


def problem(what: str) -> bytes:
    said = {"place": "sailord", "what": what, "cure": "try again"}
    return json.dumps({"problems": [said]}).encode()


@pytest.fixture
def pauses(monkeypatch):
    """Return the list of pauses, which are recorded instead of slept."""
    found: list[float] = []
    monkeypatch.setattr(client_module.time, "sleep", found.append)
    return found


@pytest.fixture
def serve():
    made: list[Scripted] = []

    def start(*script: tuple[int, bytes]) -> Scripted:
        made.append(Scripted(*script))
        return made[-1]

    yield start
    for each in made:
        each.close()


def test_follower_resumes_after_the_last_id(serve, pauses):
    server = serve(
        (200, event(1) + event(2) + b'data: {"id": 3'),
        (503, problem("no leader elected yet")),
        (429, problem("too many")),
        (502, b"<html>a proxy</html>"),
        (200, event(3)),
    )
    told: list[str] = []
    stream = server.client.follow(0, Reconnector(lambda problem: told.append(str(problem))))
    assert [each["id"] for each in itertools.islice(stream, 3)] == [1, 2, 3]
    after = [path.rpartition("=")[2] for path in server.asked]
    assert after == ["0", "2", "2", "2", "2"]
    assert len(told) == 1, "an outage is told of once"
    assert pauses == [PAUSE_S_FIRST * 2**n for n in range(4)]


def test_follower_retries_with_exponential_backoff(serve, pauses):
    server = serve((200, event(7)))
    stream = server.client.follow(0, Reconnector(print))
    assert next(stream)["id"] == 7
    server.shutdown()
    server.server_close()

    class Enough(Exception):  # noqa: N818 - it ends what has no end
        pass

    def count(pause_s: float) -> None:
        pauses.append(pause_s)
        if len(pauses) == 12:
            raise Enough

    client_module.time.sleep = count  # The fixture puts it back.
    with pytest.raises(Enough):
        next(stream)
    assert pauses[:3] == [PAUSE_S_FIRST, 2 * PAUSE_S_FIRST, 4 * PAUSE_S_FIRST]
    assert set(pauses[6:]) == {PAUSE_S_MAX}


@pytest.mark.usefixtures("pauses")
@pytest.mark.parametrize("status", [401, 404, 422, 500])
def test_follower_stops_at_a_permanent_error(serve, status):
    server = serve((200, event(1)), (status, problem("no")))
    stream = server.client.follow(0, Reconnector(print))
    assert next(stream)["id"] == 1
    with pytest.raises(ServerProblem, match="no; try again"):
        next(stream)


def test_follower_does_not_wait_for_a_server_that_never_answered(pauses):
    stream = Client(f"http://127.0.0.1:{free_port()}").follow(0, Reconnector(print))
    with pytest.raises(ServerProblem, match="did not answer"):
        next(stream)
    assert pauses == []


def follow(place, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "from sailord.cli.main import main; main()", *arguments]
    return subprocess.Popen(
        [*command, "--server", f"unix://{place.socket}"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.slow
def test_events_and_logs_are_followed_across_a_restart(place):
    head = place.start()
    wait_until(lambda: place.ask("GET", "/readyz")[0] == 200)
    place.start_agent("a")
    wait_until(lambda: place.status()["nodes"].get("ready"))
    assert place.ask("POST", "/v1/jobs", {"job": JOB, "id": "before"})[0] == 201
    happenings, written = follow(place, "events", "-f", "--json"), follow(place, "logs", "-f", "a")
    try:
        assert "was elected leader" in json.loads(happenings.stdout.readline())["text"]
        assert json.loads(happenings.stdout.readline())["job"] == "before"
        assert written.stdout.readline() == "step by step\n"
        head.kill()
        head.wait()
        place.socket.unlink()
        for each in (happenings, written):
            assert each.stderr.readline().startswith("waiting: "), "a waiting command says so"
        time.sleep(0.3)  # Some attempts long.
        place.start()
        wait_until(lambda: place.ask("GET", "/readyz")[1].get("leads"))
        assert place.ask("POST", "/v1/jobs", {"job": JOB, "id": "after"})[0] == 201
        # On a machine that is busy it may have to be elected once more.
        wait_until(lambda: place.ask("POST", "/v1/jobs/before/cancel", {})[0] == 202)
        ids = []
        while (happening := json.loads(happenings.stdout.readline()))["job"] != "after":
            ids.append(happening["id"])
        assert ids == sorted(set(ids)), "nothing is told twice"
        assert written.poll() is None
    finally:
        for each in (happenings, written):
            each.kill()
            each.communicate()
