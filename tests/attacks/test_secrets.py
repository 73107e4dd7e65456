"""Secrets that are planted everywhere are found nowhere: logs, answers, metrics, process lists."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

import pytest

from sailord.api.routes import ROUTES
from sailord.tokens import create_token
from tests.agents.store.places import NEEDS_ETCD, Cluster, wait_answer
from tests.agents.store.rights import add_root, require_passwords
from tests.processes import wait_until
from tests.sailord.daemon.running import JOB, Place

ROOT = Path(__file__).resolve().parents[2]
PLANTED = {
    "key": "PLANTED-cluster-key-0123456789abcdef",
    "token": "PLANTED-admin-token-0123456789abcdef",
    "hook": "PLANTED-webhook-secret-0123456789abcdef",
    "alert": "PLANTED-alertmanager-token-0123456789",
    "receiver": "PLANTED-receiver-secret-0123456789",
}


def ask(place: Place, method: str, path: str, headers: dict[str, str], body: str = "") -> str:
    wire = HTTPConnection("127.0.0.1", place.port, timeout=10)
    wire.request(method, path, body, headers)
    said = wire.getresponse().read().decode("utf-8", "replace")
    wire.close()
    return said


def process_titles() -> Iterator[str]:
    """The arguments of all processes, as every user of the host sees them."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            yield path.read_bytes().decode("utf-8", "replace")
        except OSError:
            continue


@pytest.mark.slow
def test_planted_secrets_are_found_nowhere(tmp_path, cost):
    place = Place(
        tmp_path,
        webhooks='\n[webhooks]\nsecret_file = "hook"\nalertmanager_token_file = "alert"\n'
        '[[webhooks.receiver]]\nurl = "http://127.0.0.1:9/in"\nsecret_file = "receiver"\n',
    )
    for name, secret in PLANTED.items():
        (tmp_path / name).write_text(secret)
        (tmp_path / name).chmod(0o600)
    config = place.config.read_text().replace(
        'token_file = "token"', 'token_file = "token"\ntokens = "tokens.json"'
    )
    place.config.write_text(config)
    named = create_token(tmp_path / "tokens.json", "otto", "operator", 1)
    secrets = {**PLANTED, "named": named}
    said: list[str] = []
    try:
        place.start()
        wait_until(lambda: place.ask("GET", "/readyz")[0] == 200)
        place.start_agent("a")
        wait_until(lambda: place.status()["nodes"].get("ready"))
        assert place.ask("POST", "/v1/jobs", {"job": JOB, "id": "j"})[0] == 201
        wait_until(lambda: "running" in str(place.ask("GET", "/v1/jobs/j")[1].get("phase")))
        now = int(time.time())
        for token in (PLANTED["token"], PLANTED["token"] + "x", named, PLANTED["alert"], "a.b.c"):
            bearer = {"Authorization": f"Bearer {token}"}
            for path in ("/v1/status", "/v1/webhooks/preemption", "/v1/nodes/a/logs", "/metrics"):
                said += [ask(place, method, path, bearer, "{") for method in ("GET", "POST")]
        forged = {"Sailor-Webhook": f"t={now},v1={'0' * 64}"}
        said.append(ask(place, "POST", "/v1/webhooks/preemption", forged, "{}"))
        said += answers_of(place)
        said.append(json.dumps(place.ask("GET", "/v1/events?follow=false")[1]))
        assert_nowhere(secrets, place, said)  # While its processes have titles.
    finally:
        place.stop_all()
    assert len(list(tmp_path.glob("*.log"))) == 2
    assert any("running" in text for text in said)
    seen = assert_nowhere(secrets, place, said)
    cost("planted secrets", "not looked for", f"none of {len(secrets)} in {seen} texts")


def answers_of(place: Place) -> list[str]:
    """Return what sailord answers to everything that can be read, and to the doctor's questions."""
    said = []
    for route in ROUTES:
        if route.method == "GET" and route.name not in ("events", "live"):
            path = re.sub(r"\{job[^}]*\}", "j", re.sub(r"\{node[^}]*\}", "a", route.path))
            said.append(str(place.ask("GET", re.sub(r"\{[^}]*\}", "1", path))[1]))
    return said


def assert_nowhere(secrets: dict[str, str], place: Place, said: list[str]) -> int:
    """Look for secrets in answers, logs, process titles and the store; count what was looked at."""
    logs = [path.read_text(errors="replace") for path in place.folder.glob("*.log")]
    stored = [
        path.read_bytes().decode("utf-8", "replace")
        for path in (place.folder / place.name).rglob("*")
        if path.is_file() and path.name != "key.pem"
    ]
    everywhere = {"answers": said, "logs": logs, "titles": list(process_titles()), "store": stored}
    for where, texts in everywhere.items():
        found = [name for name, secret in secrets.items() if any(secret in t for t in texts)]
        assert not found, f"{found} in {where}"
    return sum(map(len, everywhere.values()))


@pytest.mark.slow
def test_private_keys_of_certificates_are_found_nowhere(tls_head, cost):
    keys = {}
    for path in sorted((*tls_head.folder.rglob("*.key"), *tls_head.folder.rglob("key.pem"))):
        lines = path.read_text().splitlines()
        if "PRIVATE KEY" in lines[0]:
            keys |= {
                f"{path.parent.name}/{path.name}:{n}": line for n, line in enumerate(lines[1:-1])
            }
    assert {name.partition("/")[0] for name in keys} >= {"ca", "alice", "tls"}
    for shown in (b"", b"GET / HTTP/1.1\r\n\r\n"):  # Handshakes that fail are in the log.
        with socket.create_connection(("127.0.0.1", tls_head.port), timeout=10) as wire:
            wire.sendall(shown)
    seen = assert_nowhere(keys, tls_head, answers_of(tls_head))
    cost("private keys", "not looked for", f"no line of {len(keys)} in {seen} texts")


@pytest.mark.slow
@NEEDS_ETCD
def test_the_password_of_etcd_is_found_nowhere(tmp_path, cost):
    password = "PLANTED-etcd-password-0123456789"
    (tmp_path / "etcd.password").write_text(password)
    (tmp_path / "etcd.password").chmod(0o600)

    async def begin(cluster: Cluster) -> None:
        store = await cluster.open()
        await wait_answer(store)
        await store.close()
        await require_passwords(cluster)
        await add_root(cluster, "planted", password)

    with closing(Cluster(1)) as cluster:
        asyncio.run(begin(cluster))
        enter = f"&user=planted&password_file={tmp_path}/etcd.password"
        place = Place(tmp_path, store=cluster.url + enter)
        try:
            place.start()
            wait_until(lambda: place.ask("GET", "/readyz")[0] == 200)
            said = answers_of(place)
            cluster.kill()  # What it says of a store that is gone is looked at, too.
            wait_until(lambda: not place.ask("GET", "/readyz")[1].get("leads"))
            said += answers_of(place)
            seen = assert_nowhere({"password": password}, place, said)
        finally:
            place.stop_all()
    cost("etcd's password", "not looked for", f"in none of {seen} texts")


@pytest.mark.parametrize(
    "unit", ["sailord.service", "sailor-agent.service", "sailor-worker.service"]
)
def test_services_dump_no_core(unit):
    assert "LimitCORE=0" in (ROOT / "systemd" / unit).read_text()
