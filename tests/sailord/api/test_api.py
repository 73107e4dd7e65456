"""The API of a real sailord: what it answers, and how it refuses what it cannot use."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import json
import re
import time

import pytest

from agents.rpc.signing import REQUEST_HEADER, ClusterKey, sign_request
from sailord.notify.webhook_signature import sign
from tests.processes import wait_until
from tests.sailord.api.conftest import ALERT_TOKEN, SECRET
from tests.sailord.daemon.running import JOB, TOKEN, Over


def over_tcp(head, method, path, body=b"", headers=None):
    connection = http.client.HTTPConnection("127.0.0.1", head.port, timeout=20)
    with contextlib.closing(connection):
        connection.request(method, path, body, headers or {})
        reply = connection.getresponse()
        text = reply.read()
    return reply.status, json.loads(text) if "json" in reply.headers["Content-Type"] else text


def assert_refused(answer, status):
    code, value = answer
    assert code == status, value
    for problem in value["problems"]:
        assert problem["place"]
        assert problem["what"]
        is_of_job = problem["place"].startswith("job")
        assert problem["cure"] or is_of_job, problem
        assert not re.search(r"\b(int|str|float|dict|bool|NoneType)\b", problem["what"])
    assert "Traceback" not in json.dumps(value)


def test_the_status_of_a_job_that_does_not_run_is_refused(head):
    for name in ("none", ""):
        assert_refused(head.ask("GET", f"/v1/status?job={name}"), 404)


def test_the_page_of_a_job_that_is_not_known_shows_the_nodes(head):
    connection = http.client.HTTPConnection("127.0.0.1", head.port, timeout=20)
    with contextlib.closing(connection):
        headers = {"Authorization": f"Bearer {TOKEN}"}
        connection.request("GET", "/v1/live?job=nobody", headers=headers)
        reply = connection.getresponse()
        lines = iter(reply.readline, b"")
        sent = next(line for line in lines if line.startswith(b"data: {") and b'"nodes"' in line)
    document = json.loads(sent.removeprefix(b"data: "))
    assert [node["name"] for node in document["nodes"].values()] == ["a"]
    assert not {"job", "plan"} & set(document)


def test_requests_over_tcp_need_the_token(head):
    assert over_tcp(head, "GET", "/livez")[0] == 200
    for headers in ({}, {"Authorization": "Bearer no"}, {"Authorization": "Basic " + TOKEN}):
        assert_refused(over_tcp(head, "GET", "/v1/status", headers=headers), 401)
    known = {"Authorization": f"Bearer {TOKEN}"}
    assert over_tcp(head, "GET", "/v1/status", headers=known)[0] == 200
    assert_refused(over_tcp(head, "GET", "/v1/nothing", headers={}), 401)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/v1/nothing", None, 404),
        ("DELETE", "/v1/jobs", None, 405),
        ("GET", "/v1/jobs/none", None, 404),
        ("GET", "/v1/jobs/..%2f..%2fetc", None, 404),
        ("GET", "/v1/jobs/%00/why", None, 404),
        ("GET", "/v1/nodes/none/logs", None, 404),
        ("GET", "/v1/nodes/a/logs?rank=../x", None, 422),
        ("GET", "/v1/nodes/a/logs?after=../x", None, 422),
        ("POST", "/v1/jobs/none/cancel", {}, 404),
        ("POST", "/v1/jobs/none/explode", {}, 404),
        ("POST", "/v1/nodes/none/drain", {}, 404),
        ("POST", "/v1/nodes/a/drain", {"leaves_at": "soon"}, 422),
        ("POST", "/v1/nodes/a/drain", {"leaves_at": -1}, 422),
        ("POST", "/v1/nodes/a/drain", {"notice_s": -1}, 422),
        ("POST", "/v1/nodes/a/drain", {"notice_s": 9, "leaves_at": 1e9}, 422),
        ("POST", "/v1/jobs/none/budget", {"max_usd_total": 9}, 404),
        ("POST", "/v1/jobs/none/priority", {"priority": 9}, 404),
        ("POST", "/v1/jobs", {"job": JOB, "weight": 10**400}, 422),
        ("POST", "/v1/jobs", {"job": JOB, "weight": float("nan")}, 422),
        ("POST", "/v1/nodes/a/drain", {"id": "../leader"}, 422),
        ("POST", "/v1/nodes/a/drain", {"reason": "\ud800"}, 422),
        ("POST", "/v1/jobs", None, 422),
        ("POST", "/v1/jobs", [], 422),
        ("POST", "/v1/jobs", {"job": 3}, 422),
        ("POST", "/v1/jobs", {"job": "no = toml ="}, 422),
        ("POST", "/v1/jobs", {"job": JOB, "id": "../x"}, 422),
        ("POST", "/v1/jobs", {"job": JOB, "id": "x/y"}, 422),
        ("POST", "/v1/jobs", {"job": JOB, "priority": True}, 422),
        ("POST", "/v1/jobs", {"job": JOB, "priority": 10**12}, 422),
        ("POST", "/v1/jobs", {"job": JOB, "more": 1}, 422),
        ("POST", "/v1/jobs", {"job": '[model]\nconfig = "/etc/passwd"'}, 422),
        ("POST", "/v1/jobs", {"job": "x" * (2 << 20)}, 413),
        ("GET", "/v1/events?after=x", None, 422),
        ("GET", "/v1/events?after=%D9%A3", None, 422),
    ],
)
def test_invalid_request_is_refused_with_problem_and_cure(head, method, path, body, status):
    assert_refused(head.ask(method, path, body), status)


@pytest.mark.parametrize(
    ("body", "what", "cure"),
    [
        ({"job": 3}, "is 3", "give a text"),
        ({"job": JOB, "priority": 1.5}, "is 1.5", "give a whole number"),
        ({"job": JOB, "priority": True}, "is true", "give a whole number"),
        ({}, "is missing", "give a text"),
    ],
)
def test_value_of_the_wrong_type_is_refused_with_the_expected_one(head, body, what, cure):
    code, value = head.ask("POST", "/v1/jobs", body)
    assert (code, value["problems"][0]["what"], value["problems"][0]["cure"]) == (422, what, cure)


@pytest.mark.parametrize("raw", [b"{", b"\xff", b"[" * 100_000, b'{"job": NaN}', b"3"])
@pytest.mark.usefixtures("no_collection")
def test_body_that_is_not_json_is_refused(head, raw):
    connection = Over(head.socket)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/jobs", raw)
        assert connection.getresponse().status == 422


def test_reports_need_a_signature_with_the_clusters_key(head):
    path, key = "/v1/agents/report", ClusterKey.read(head.key, "test")
    header, _ = sign_request(key, f"127.0.0.1:{head.port}", "POST", path, b"{}", at=time.time())
    assert_refused(over_tcp(head, "POST", path, b"{}"), 401)
    assert_refused(over_tcp(head, "POST", path, b"{ }", {REQUEST_HEADER: header}), 401)
    assert_refused(over_tcp(head, "POST", path, b"{}", {REQUEST_HEADER: header}), 422)
    assert_refused(over_tcp(head, "POST", path, b"{}", {REQUEST_HEADER: header}), 401)


def post_plain(head, body, *, at=None, secret=SECRET, path="preemption"):
    raw = json.dumps(body).encode()
    header = sign(secret.encode(), raw, time.time() if at is None else at)
    return over_tcp(head, "POST", f"/v1/webhooks/{path}", raw, {"Sailor-Webhook": header})


def test_repeated_notice_has_one_effect(head):
    notice = {"id": "n1", "node": "a", "leaves_at": time.time() + 1000}
    assert post_plain(head, notice) == (202, {"accepted": 1, "new": 1})
    assert post_plain(head, notice) == (202, {"accepted": 1, "new": 0})
    wait_until(lambda: head.status()["nodes"].get("draining") == 1)
    assert post_plain(head, {"id": "n2", "node": "a", "withdrawn": True})[0] == 202
    wait_until(lambda: head.status()["nodes"].get("ready") == 1)


def test_withdrawal_may_carry_the_id_of_the_notice(head):
    def leaving():
        return [each["name"] for each in head.status()["leaving"]]

    assert post_plain(head, {"id": "n9", "node": "a"})[1]["new"] == 1
    wait_until(lambda: leaving() == ["a"])
    assert post_plain(head, {"id": "n9", "node": "a", "withdrawn": True})[1]["new"] == 1
    wait_until(lambda: leaving() == [])
    code, said = post_plain(head, {"id": "n9", "node": "another"})
    assert (code, said["problems"][0]["cure"]) == (
        409,
        "use a new id for each order (idempotency key)",
    )


def test_unauthenticated_notice_is_refused(head):
    assert_refused(post_plain(head, {"id": "x", "node": "a"}, secret="not-our-secret-no"), 401)
    assert_refused(post_plain(head, {"id": "x", "node": "a"}, at=time.time() - 400), 401)
    assert_refused(over_tcp(head, "POST", "/v1/webhooks/preemption", b"{}"), 401)
    token = {"Authorization": "Bearer a.b.c"}
    assert_refused(over_tcp(head, "POST", "/v1/webhooks/preemption", b"{}", token), 401)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"id": "x"},
        {"id": "x", "node": 3},
        {"id": "x", "node": "../a b"},
        {"id": "/", "node": "a"},
    ],
)
def test_invalid_notice_is_refused(head, body):
    assert_refused(post_plain(head, body), 422)


def test_alerts_are_taken_as_notices(head):
    alert = {
        "status": "resolved", "labels": {"alertname": "Gpu", "node": "a"}, "fingerprint": "f",
        "startsAt": "2030-01-01T00:00:00Z",
    }  # fmt: skip
    headers = {"Authorization": f"Bearer {ALERT_TOKEN}"}
    path = "/v1/webhooks/preemption"
    raw = json.dumps({"version": "4", "alerts": [alert, alert]}).encode()
    assert over_tcp(head, "POST", path, raw, headers)[1] == {"accepted": 1, "new": 1}
    for wrong in ({"alerts": 3}, {"alerts": [3]}, {"alerts": [{"labels": {}}]}, {}, []):
        raw = json.dumps(wrong).encode()
        assert_refused(over_tcp(head, "POST", path, raw, headers), 422)


def test_capacity_message_is_noted_once(head):
    news = {"id": "c1", "zone": "z", "gpu": "A100-40", "gpus": 8}
    assert post_plain(head, news, path="capacity") == (202, {"accepted": 1, "new": 1})
    assert post_plain(head, news, path="capacity") == (202, {"accepted": 1, "new": 0})
    assert_refused(post_plain(head, {"id": "c1"}, path="capacity"), 422)


@pytest.mark.slow
def test_webhook_receiver_gets_every_stage_of_a_job(head, receiver):
    assert head.ask("POST", "/v1/jobs", {"job": JOB, "id": "told"})[0] == 201
    assert_refused(head.ask("POST", "/v1/jobs", {"job": JOB, "id": "told"}), 409)

    def runs():  # A job has no phase before its turn has come.
        return head.ask("GET", "/v1/jobs/told")[1].get("phase", {}).get("name") == "running"

    wait_until(runs)
    assert head.ask("GET", "/v1/jobs/told/plan")[1]["plan"]["pipelines"]
    assert head.ask("GET", "/v1/jobs/told/why")[1]["plan"]
    assert head.ask("POST", "/v1/jobs/told/cancel", {"reason": "enough"})[0] == 202
    wait_until(lambda: head.ask("GET", "/v1/jobs/told")[1]["state"] == "cancelled")
    kinds = ["generation_opened", "generation_running", "job_finished"]

    def told():
        found = [json.loads(body) for _, body in list(receiver.taken)]
        return [each["kind"] for each in found if each["job"] == "told"] == kinds

    wait_until(told)
    assert receiver.refused, "the first message was refused, and came again"
    signature, body = receiver.taken[-1]
    moment = float(signature.split(",")[0].removeprefix("t="))
    assert signature == sign(SECRET.encode(), body, moment)


def test_submitted_job_is_visible_at_once(head):
    for number in range(10):
        assert head.ask("POST", "/v1/jobs", {"job": JOB, "id": f"at-once-{number}"})[0] == 201
        assert head.ask("GET", f"/v1/jobs/at-once-{number}")[0] == 200
        assert head.ask("POST", f"/v1/jobs/at-once-{number}/cancel", {})[0] == 202


def test_order_without_effect_is_refused_with_a_cure(head):
    def order(path, **body):
        code, value = head.ask("POST", path, body)
        return code, value["problems"][0] if "problems" in value else value

    assert order("/v1/nodes/a/uncordon")[0] == 409
    assert order("/v1/nodes/a/cordon", id="once")[0] == 202
    code, problem = order("/v1/nodes/a/cordon")  # Told at once: the first is known by now.
    assert code == 409
    assert problem["what"] == "cordon would change nothing: it is cordoned already"
    assert "uncordon" in problem["cure"]
    assert order("/v1/nodes/a/cordon", id="once")[0] == 202, "the same id may be sent again"
    assert order("/v1/nodes/a/uncordon")[0] == 202
    assert head.ask("POST", "/v1/jobs", {"job": JOB, "id": "useless"})[0] == 201
    assert order("/v1/jobs/useless/pause")[0] == 202
    assert order("/v1/jobs/useless/resume")[0] == 202
    assert order("/v1/jobs/useless/cancel", id="end")[0] == 202
    wait_until(lambda: head.ask("GET", "/v1/jobs/useless")[1]["state"] == "cancelled")
    # Its answer was lost, say: stored again, the next leader would carry it out again.
    code, again = order("/v1/jobs/useless/cancel", id="end")
    assert (code, again["is_new"]) == (202, False)
    code, problem = order("/v1/jobs/useless/resume")
    assert code == 409
    assert problem["place"] == "useless"
    assert "submit it again" in problem["cure"]


@pytest.mark.parametrize(
    ("method", "path", "status", "what", "cure"),
    [
        ("GET", "/v1/nothing", 404, "unknown address", "/openapi.json"),
        ("DELETE", "/v1/jobs", 405, "does not support DELETE", "use GET, POST; "),
        ("GET", "/v1/jobs/none", 404, "no such job", ""),
        ("POST", "/v1/nodes/b/drain", 404, "no such node", "choose from a"),
        ("GET", "/v1/nodes/b/logs", 404, "no such node", "choose from a"),
        (
            "GET",
            "/v1/nodes/a/logs?rank=77",
            404,
            "no log of rank 77",
            "ranks on this node: 0",
        ),
    ],
)
def test_missing_resource_is_refused_with_the_nearest_names(head, method, path, status, what, cure):
    code, value = head.ask(method, path, None)
    problem = value["problems"][0]
    assert (code, problem["what"]) == (status, what)
    assert cure in problem["cure"]
    assert problem["place"] in path


def test_event_stream_resumes_after_an_id(head):
    def happened():
        return head.ask("GET", "/v1/events?follow=false")[1]["events"]

    assert head.ask("POST", "/v1/jobs", {"job": JOB, "id": "streamed"})[0] == 201
    assert head.ask("POST", "/v1/jobs/streamed/cancel", {})[0] == 202
    wait_until(lambda: len(happened()) > 2, within_s=20)
    first, second, *_ = happened()
    connection = Over(head.socket)
    with contextlib.closing(connection):
        connection.request("GET", "/v1/events", headers={"Last-Event-ID": str(first["id"])})
        reply = connection.getresponse()
        assert reply.readline() == f"id: {second['id']}\n".encode()


def test_disconnected_follower_causes_no_logged_error(head):
    def told() -> int:
        return len(head.ask("GET", "/v1/events?follow=false")[1]["events"])

    for id_ in ("heard", "unheard"):
        assert head.ask("POST", "/v1/jobs", {"job": JOB, "id": id_})[0] == 201
    wait_until(told, within_s=20)
    with contextlib.closing(Over(head.socket)) as connection:
        connection.request("GET", "/v1/events", headers={"Last-Event-ID": "0"})
        assert connection.getresponse().readline()
    for id_ in ("heard", "unheard"):  # The following events have no reader.
        before = told()
        assert head.ask("POST", f"/v1/jobs/{id_}/cancel", {})[0] == 202
        wait_until(lambda before=before: told() > before, within_s=20)
    said = (head.folder / f"{head.name}.log").read_text(encoding="utf-8")
    assert "ClientConnectionResetError" not in said


def test_follow_must_be_true_or_false(head):
    status, said = head.ask("GET", "/v1/events?follow=maybe")
    assert status == 422
    assert said["problems"][0]["place"] == "follow"


def test_openapi_document_lists_every_address_with_a_summary(head):
    document = head.ask("GET", "/openapi.json")[1]
    assert document["openapi"] == "3.1.0"
    assert {"/v1/jobs", "/v1/events", "/v1/webhooks/preemption"} <= set(document["paths"])
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert operation["summary"], path


def test_metrics_are_in_prometheus_text_format(head):
    lines = head.ask("GET", "/metrics")[1].splitlines()
    values = {}
    for line in lines:
        if not line.startswith("# "):
            name, value = line.rsplit(" ", 1)
            values[name] = float(value)
    assert values["sailor_leads"] == 1
    assert values["sailor_decisions_total"] > 0


def test_many_concurrent_requests_leave_sailord_alive(head):
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        bad = [pool.submit(over_tcp, head, "POST", "/v1/jobs", b"{") for _ in range(400)]
        assert {each.result()[0] for each in bad} <= {401, 429}
    assert head.ask("GET", "/livez")[0] == 200
    assert "request failed" not in (head.folder / "head.log").read_text()
