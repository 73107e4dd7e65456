"""Several sailords, of which one leads: whichever is asked, the answer is the leader's."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import pwd
import ssl
import time
from contextlib import closing

import pytest
from click.testing import CliRunner

from agents.rpc.signing import ClusterKey
from sailord.api.access.callers import Caller, name_caller
from sailord.authority import Authority
from sailord.cli.main import main
from sailord.notify.webhook_signature import SIGNATURE_HEADER, sign
from tests.agents.store.places import NEEDS_ETCD, Cluster
from tests.agents.store.rights import let_guest, require_passwords
from tests.processes import wait_until
from tests.sailord.daemon.running import JOB, TOKEN, Over, Place

pytestmark = [pytest.mark.slow, NEEDS_ETCD]


SECRET = "of the webhooks, long enough"


@pytest.fixture
def etcd():
    with closing(Cluster()) as place:
        yield place


def leader_first(made):
    """All of them, once each is ready and one leads."""

    def found():
        told = [each.ask("GET", "/readyz") for each in made]
        if {code for code, _ in told} != {200} or sum(said["leads"] for _, said in told) != 1:
            return None
        return sorted(made, key=lambda each: not told[made.index(each)][1]["leads"])

    return wait_until(found)


@pytest.fixture
def heads(tmp_path, etcd):
    """The leader and a standby."""
    (tmp_path / "hook").write_text(SECRET)
    (tmp_path / "hook").chmod(0o600)
    hooks = '[webhooks]\nsecret_file = "hook"\n'
    made = [Place(tmp_path, name=n, store=etcd.url, webhooks=hooks) for n in ("one", "two")]
    for each in made:
        each.start()
    try:
        yield leader_first(made)
    finally:
        for each in made:
            each.stop_all()


@pytest.fixture
def heads_with_tls(tmp_path, etcd):
    """The leader and a standby with certificates, and without a token."""
    authority = Authority.create(tmp_path / "ca", "test")
    for role, name in (("sailord", "one"), ("sailord", "two"), ("user", "alice")):
        authority.issue(role, name, tmp_path / f"tls-{name}")
    made = []
    for name in ("one", "two"):
        files = "".join(
            f'{each} = "tls-{name}/{file}.pem"\n'
            for each, file in (("ca", "ca"), ("certificate", "certificate"), ("key", "key"))
        )
        place = Place(tmp_path, name=name, store=etcd.url, webhooks=f"[tls]\n{files}")
        place.config.write_text(place.config.read_text().replace('token_file = "token"\n', ""))
        made.append(place)
        place.start()
    try:
        yield leader_first(made)
    finally:
        for each in made:
            each.stop_all()


def test_leader_hears_from_a_standby_who_called_and_from_nobody_else(heads_with_tls, tmp_path):
    leader, other = heads_with_tls
    status, said = other.ask("POST", "/v1/jobs", {"job": JOB, "id": "j"})
    assert (status, said["id"]) == (201, "j")
    assert other.ask("POST", "/v1/jobs/j/pause", {"reason": "lunch"})[0] == 202
    me = pwd.getpwuid(os.getuid()).pw_name
    wait_until(lambda: f"(by {me})" in str(other.ask("GET", "/v1/jobs/j/history?x=%2f")[1]))
    # A user's certificate, beside the cluster's key, names nobody.
    tls, key = tmp_path / "tls-alice", ClusterKey.read(other.key, "test")
    context = ssl.create_default_context(cafile=tls / "ca.pem")
    context.check_hostname = False
    context.load_cert_chain(tls / "certificate.pem", tls / "key.pem")
    address, eve = f"127.0.0.1:{leader.port}", Caller("eve", "admin")
    headers = name_caller(eve, key, address, "GET", "/v1/nodes")
    line = http.client.HTTPSConnection("127.0.0.1", leader.port, timeout=10, context=context)
    with closing(line):
        line.request("GET", "/v1/nodes", headers=headers)
        assert line.getresponse().status == 401


def over_tcp(head, method, path, headers=None):
    with closing(http.client.HTTPConnection("127.0.0.1", head.port, timeout=10)) as connection:
        connection.request(method, path, None, headers or {})
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())


def test_standby_gives_the_leaders_answers(heads):
    leader, other = heads
    assert other.ask("GET", "/readyz")[1] == {"ready": True, "leads": False}
    leader.start_agent("a")
    wait_until(lambda: other.status()["nodes"] == {"ready": 1})
    status, job = other.ask("POST", "/v1/jobs", {"job": JOB, "id": "j"})
    assert (status, job["id"]) == (201, "j")
    assert other.ask("GET", "/v1/jobs/j")[0] == 200
    wait_until(lambda: other.status()["job"]["phase"]["name"] == "running")
    same = ("/v1/nodes/a/logs?rank=0", "/v1/jobs/j/plan", "/v1/jobs/j/history")
    for path in same:  # The history may grow between the two questions.
        wait_until(lambda path=path: other.ask("GET", path) == leader.ask("GET", path))
    code, said = other.ask("POST", "/v1/jobs/j/resume", {})
    assert (code, said["problems"][0]["place"]) == (409, "j")
    assert other.ask("POST", "/v1/nodes/unknown/drain", {})[0] == 404
    assert other.ask("POST", "/v1/nodes/a/cordon", {"id": "c"})[0] == 202
    wait_until(lambda: leader.ask("GET", "/v1/nodes")[1]["nodes"][0]["cordoned"])
    code, said = other.ask("POST", "/v1/nodes/a/uncordon", {"id": "c"})
    assert (code, "used with another order" in str(said)) == (409, True)
    shown = CliRunner().invoke(main, ["status", "--server", f"unix://{other.socket}"])
    assert "j: running" in shown.output


def test_standby_checks_the_token_itself(heads):
    _, other = heads
    assert over_tcp(other, "GET", "/v1/nodes")[0] == 401
    bearer = {"Authorization": f"Bearer {TOKEN}"}
    assert over_tcp(other, "GET", "/v1/nodes", bearer) == (200, {"nodes": [], "lost": []})


def test_standby_sends_no_unsigned_webhook_to_the_leader(heads):
    """The leader would charge the standby's address for it."""
    leader, other = heads
    path, body = "/v1/webhooks/capacity", json.dumps({"id": "m"}).encode()
    for signature, code in (("t=1,v1=0", 401), (sign(SECRET.encode(), body, time.time()), 422)):
        with closing(http.client.HTTPConnection("127.0.0.1", other.port, timeout=10)) as wire:
            wire.request("POST", path, body, {SIGNATURE_HEADER: signature})
            assert wire.getresponse().status == code
    refused = [
        sum(float(line.split()[1]) for line in each.ask("GET", "/metrics")[1].splitlines()
            if line.startswith("sailor_requests_refused_total"))
        for each in (leader, other)
    ]  # fmt: skip
    assert refused == [0, 1]


def test_standby_streams_the_leaders_events(heads):
    leader, other = heads
    with closing(Over(other.socket)) as connection:
        connection.request("GET", "/v1/events")
        leader.start_agent("a")
        assert leader.ask("POST", "/v1/jobs", {"job": JOB, "id": "j"})[0] == 201
        stream = connection.getresponse()
        assert stream.getheader("Content-Type") == "text/event-stream"
        lines = (line for line in stream if line.startswith(b"data: "))
        told = (json.loads(line.removeprefix(b"data: ")) for line in lines)
        assert "was elected leader" in next(told)["text"]
        assert next(told)["job"] == "j"


def test_standby_says_that_the_leader_does_not_answer(heads):
    leader, other = heads
    leader.processes[0].kill()
    code, said = other.ask("GET", "/v1/nodes")
    if code == 503:  # It may have noticed by now.
        assert "does not answer" in said["problems"][0]["what"]
    wait_until(lambda: other.ask("GET", "/readyz")[1].get("leads"))
    assert other.ask("GET", "/v1/nodes") == (200, {"nodes": [], "lost": []})


def test_leader_without_store_permission_resigns_and_leads_once_permitted(tmp_path, etcd):
    """It wins every time, and must not keep others from leading."""
    (tmp_path / "guest").write_text("guest")
    (tmp_path / "guest").chmod(0o600)

    async def begin():
        store = await etcd.open()
        await store.put("/there", b"")
        await store.close()
        await require_passwords(etcd)
        await let_guest(etcd, "/sailor/v1/test/")

    asyncio.run(begin())
    enter = f"&user=guest&password_file={tmp_path}/guest"
    head = Place(tmp_path, store=etcd.url + enter)
    with contextlib.ExitStack() as stack:
        stack.callback(head.stop_all)
        head.start()

        def log() -> str:
            return (tmp_path / "head.log").read_text()

        wait_until(lambda: "cannot lead" in log())
        assert "the four prefixes" in log()
        assert "permission denied" in log()
        assert head.ask("GET", "/livez")[0] == 200
        assert head.ask("POST", "/v1/jobs/j/cancel", {})[0] == 503
        for part in ("papers", "outbox", "capacity"):
            asyncio.run(let_guest(etcd, f"/sailor/{part}/v1/test/"))
        wait_until(lambda: head.ask("GET", "/readyz")[1].get("leads"))
        assert head.ask("GET", "/v1/nodes") == (200, {"nodes": [], "lost": []})
