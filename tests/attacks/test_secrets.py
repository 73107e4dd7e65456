"""Secrets that are planted everywhere are found nowhere: logs, answers, metrics, process lists."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest

from sailord.api.routes import ROUTES
from sailord.tokens import create_token
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
        for route in ROUTES:
            if route.method == "GET" and route.name not in ("events", "live"):
                path = re.sub(r"\{job[^}]*\}", "j", re.sub(r"\{node[^}]*\}", "a", route.path))
                said.append(str(place.ask("GET", re.sub(r"\{[^}]*\}", "1", path))[1]))
        said.append(json.dumps(place.ask("GET", "/v1/events?follow=false")[1]))
        titles = list(process_titles())
    finally:
        place.stop_all()
    logs = [path.read_text(errors="replace") for path in tmp_path.glob("*.log")]
    stored = [
        path.read_bytes().decode("utf-8", "replace")
        for path in (tmp_path / "head").rglob("*")
        if path.is_file()
    ]
    assert len(logs) == 2
    assert any("running" in text for text in said)
    for where, texts in {"answers": said, "logs": logs, "titles": titles, "store": stored}.items():
        found = [name for name, secret in secrets.items() if any(secret in t for t in texts)]
        assert not found, f"{found} in {where}"
    cost("planted secrets", "not looked for",
         f"none of {len(secrets)} in {len(said)} answers, 2 logs, {len(titles)} process titles, "
         "the store's files")  # fmt: skip


@pytest.mark.parametrize(
    "unit", ["sailord.service", "sailor-agent.service", "sailor-worker.service"]
)
def test_services_dump_no_core(unit):
    assert "LimitCORE=0" in (ROOT / "systemd" / unit).read_text()
