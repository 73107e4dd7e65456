"""Pub/Sub's push from end to end, and what no client of ours would send."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import re
import socket
import time

import pytest
from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
from cryptography.hazmat.primitives.hashes import SHA256

from agents.rpc.signing import REQUEST_HEADER, ClusterKey, sign_request
from sailord.notify.webhook_signature import sign
from tests.processes import wait_until
from tests.sailord.api.conftest import SECRET
from tests.sailord.daemon.running import TOKEN

PUSH = "/v1/webhooks/preemption"
LARGE = b"x" * ((1 << 20) + 1)


def b64(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def token(key, **changes) -> str:
    claims = {
        "iss": "https://accounts.google.com", "aud": "us", "email": "push@p",
        "email_verified": True, "exp": time.time() + 600,
    }  # fmt: skip
    head = b64(json.dumps({"alg": "RS256", "kid": "1", "typ": "JWT"}).encode())
    text = f"{head}.{b64(json.dumps(claims | changes).encode())}"
    return f"{text}.{b64(key.sign(text.encode(), PKCS1v15(), SHA256()))}"


def pushed(node: str, id_: str, method: str = "compute.instances.preempted") -> bytes:
    """What Pub/Sub posts for an entry of a log sink."""
    entry = {
        "insertId": "1",
        "protoPayload": {
            "@type": "type.googleapis.com/google.cloud.audit.AuditLog",
            "methodName": method,
            "resourceName": f"projects/p/zones/us-central1-b/instances/{node}",
        },
        "resource": {"type": "gce_instance"},
    }
    data = base64.b64encode(json.dumps(entry).encode()).decode()
    message = {"data": data, "messageId": id_, "publishTime": "2030-01-01T00:00:00Z"}
    return json.dumps({"message": message, "subscription": "projects/p/subscriptions/s"}).encode()


def post(head, path, body, headers):
    connection = http.client.HTTPConnection("127.0.0.1", head.port, timeout=20)
    with contextlib.closing(connection):
        connection.request("POST", path, body, headers)
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())


def push(head, body, bearer):
    return post(head, PUSH, body, {"Authorization": f"Bearer {bearer}"})


def told_of(head, sender):
    """The events that tell of a notice by a sender."""
    events = head.ask("GET", "/v1/events?follow=false")[1]["events"]
    end = f"(by the preemption webhook, {sender})"
    return [each for each in events if each["kind"] == "order" and each["text"].endswith(end)]


def test_a_signed_notice_is_told_with_its_time_its_reason_and_its_origin(head):
    until = time.time() + 60
    said = {"id": "n1", "node": "a", "leaves_at": until, "reason": "test notice"}
    body = json.dumps(said).encode()
    signed = {"Sailor-Webhook": sign(SECRET.encode(), body, time.time())}
    assert post(head, PUSH, body, signed) == (202, {"accepted": 1, "new": 1})
    (notice,) = told_of(head, "signed")
    said = r"preempting a was ordered \(ends in [0-9.]+ s\): test notice \(by the .*"
    assert re.fullmatch(said, notice["text"])
    wait_until(lambda: head.status()["nodes"].get("draining") == 1)
    assert head.ask("POST", "/v1/nodes/a/withdraw", {"id": "over"})[0] == 202
    wait_until(lambda: head.status()["nodes"].get("ready") == 1)


def test_a_notice_of_a_machine_that_is_no_node_is_no_event(head, pubsub_key):
    """A log sink sends the notices of the whole project."""
    before = len(told_of(head, "Pub/Sub"))
    taken = push(head, pushed("elsewhere", "m9"), token(pubsub_key))
    assert taken == (202, {"accepted": 1, "new": 1})
    assert len(told_of(head, "Pub/Sub")) == before


def test_push_of_a_preempted_machine_drains_its_node(head, pubsub_key):
    known = token(pubsub_key)
    assert push(head, pushed("a", "m1"), known) == (202, {"accepted": 1, "new": 1})
    wait_until(lambda: head.status()["nodes"].get("draining") == 1)
    (notice,) = told_of(head, "Pub/Sub")
    assert notice["text"].startswith("preempting a was ordered: compute.instances.preempted (by ")
    assert notice["node"] == "a"
    # Pub/Sub delivers at least once.
    assert push(head, pushed("a", "m1"), known) == (202, {"accepted": 1, "new": 0})
    assert len(told_of(head, "Pub/Sub")) == 1, "a repeat is no news"
    # What else the sink sends is acknowledged, or it would come again and again.
    other = pushed("a", "m2", "compute.instances.insert")
    assert push(head, other, known) == (202, {"accepted": 0, "new": 0})
    assert head.ask("POST", "/v1/nodes/a/withdraw", {"id": "false-alarm"})[0] == 202
    wait_until(lambda: head.status()["nodes"].get("ready") == 1)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"aud": "https://elsewhere"}, "Audience"),
        ({"iss": "https://elsewhere"}, "issuer"),
        ({"exp": 1_000_000_000}, "expired"),
        ({"email": "other@p"}, "another account"),
        ({"email_verified": False}, "another account"),
    ],
)
def test_push_with_wrong_claims_is_refused(head, pubsub_key, changes, why):
    code, value = push(head, pushed("a", "m3"), token(pubsub_key, **changes))
    assert code == 401
    assert why in value["problems"][0]["what"]
    assert head.status()["nodes"].get("ready") == 1


def test_push_signed_with_another_key_is_refused(head):
    code, value = push(head, pushed("a", "m4"), token(generate_private_key(65537, 2048)))
    assert code == 401
    assert "Signature verification failed" in value["problems"][0]["what"]


@pytest.mark.parametrize(
    "body",
    [
        b"", b"[]", b'{"message": 3}', b'{"message": {"data": "!", "messageId": "1"}}',
        pushed("a b", "m5"), pushed("", "m6"),
    ],
)  # fmt: skip
def test_push_without_a_node_is_refused(head, pubsub_key, body):
    assert push(head, body, token(pubsub_key))[0] == 422


def test_sender_above_the_rate_limit_gets_429(head):
    bearer = {"Authorization": f"Bearer {TOKEN}"}
    assert post(head, "/v1/jobs", LARGE, bearer)[0] == 413
    assert post(head, "/v1/nodes/a/drain", LARGE, bearer)[0] == 413
    signed = {"Sailor-Webhook": sign(SECRET.encode(), LARGE, time.time())}
    assert post(head, PUSH, LARGE, signed)[0] == 413
    key, receiver = ClusterKey.read(head.key, "test"), f"127.0.0.1:{head.port}"
    header, _ = sign_request(key, receiver, "POST", "/v1/agents/report", LARGE, at=time.time())
    assert post(head, "/v1/agents/report", LARGE, {REQUEST_HEADER: header})[0] == 413


def test_signature_is_valid_for_one_body_only(head):
    body = json.dumps({"id": "replayed", "node": "none"}).encode()
    signed = {"Sailor-Webhook": sign(SECRET.encode(), body, time.time())}
    assert post(head, PUSH, body, signed) == (202, {"accepted": 1, "new": 1})
    assert post(head, PUSH, body, signed) == (202, {"accepted": 1, "new": 0})
    assert post(head, PUSH, body.replace(b"none", b"a"), signed)[0] == 401
    for wrong in ("", "t=,v1=", "t=1", signed["Sailor-Webhook"].replace("t=", "t=9"), "\xe9"):
        assert post(head, PUSH, body, {"Sailor-Webhook": wrong})[0] == 401


@pytest.mark.parametrize(
    "raw",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /livez HTTP/9.9\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 20_000 + b"\r\n\r\n",
        b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_invalid_http_is_refused_without_a_logged_exception(head, raw):
    with socket.create_connection(("127.0.0.1", head.port), timeout=20) as wire:
        wire.sendall(raw)
        wire.shutdown(socket.SHUT_WR)
        answer = b""
        while more := wire.recv(65536):
            answer += more
    assert answer[:13] in (b"HTTP/1.1 400 ", b"HTTP/1.0 400 ", b"HTTP/1.1 401 ", b""), answer[:200]
    assert b"Traceback" not in answer
    assert b"File " not in answer
    assert head.ask("GET", "/livez")[0] == 200
    assert "request failed" not in (head.folder / "head.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    ["/v1/jobs/../../etc/passwd", "/v1/jobs/%2e%2e/%2e%2e/key", "//etc/passwd", "/v1/jobs/a%00b",
     "/v1/nodes/a/../../../key", "/v1/jobs/%F0%9F%92%A9", "/v1/jobs/" + "a" * 200],
)  # fmt: skip
def test_name_in_a_path_cannot_mean_another_path(head, path):
    code, value = head.ask("GET", path)
    assert code == 404
    assert value["problems"][0]["what"]


def test_the_election_is_an_event(head):
    events = head.ask("GET", "/v1/events?follow=false")[1]["events"]
    assert [each for each in events if "was elected leader, term " in each["text"]]
