"""Who calls has a name and a role: by a token, or by what the kernel says of a local process."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import web
from click.testing import CliRunner

from sailord import tokens
from sailord.api.access import callers
from sailord.api.access.callers import GROUPS_S, caller_at
from sailord.cli.main import main
from sailord.config import Config
from sailord.tokens import create_token, hash_of, read_tokens, revoke_token
from simulator.documents.problems import InputError
from tests.processes import wait_until
from tests.sailord.daemon.running import JOB, TOKEN, Place


def typed(*words: str) -> Any:
    return CliRunner().invoke(main, list(words))


def ask(place: Place, token: str, method: str, path: str, body: object = None) -> tuple[int, Any]:
    wire = HTTPConnection("127.0.0.1", place.port, timeout=10)
    wire.request(method, path, json.dumps(body), {"Authorization": f"Bearer {token}"})
    reply = wire.getresponse()
    said = reply.read()
    wire.close()
    return reply.status, json.loads(said) if b"{" in said[:1] else said.decode()


def stream(place: Place, token: str) -> Any:
    """Open a stream of events; return its connection and answer."""
    wire = HTTPConnection("127.0.0.1", place.port, timeout=30)
    wire.request("GET", "/v1/events", headers={"Authorization": f"Bearer {token}"})
    reply = wire.getresponse()
    assert reply.status == 200
    return wire, reply


@pytest.fixture
def head(tmp_path):
    place = Place(tmp_path)
    text = place.config.read_text().replace("token_file", 'tokens = "tokens.json"\ntoken_file')
    place.config.write_text(text)
    yield place
    place.stop_all()


@pytest.mark.slow
def test_tokens_have_roles_expire_and_are_revoked(head):
    """One sailord shows it all: roles, expiry, revocation, audit, the count of refusals."""
    file = head.folder / "tokens.json"
    made = {}
    for name, role in (("vera", "viewer"), ("otto", "operator")):
        done = typed("token", "create", name, "--role", role, "--file", str(file))
        assert done.exit_code == 0, done.output
        made[name] = done.stdout.strip()
    stored = file.read_text()
    assert not any(token in stored for token in made.values())
    head.start()
    wait_until(lambda: head.ask("GET", "/readyz")[0] == 200)

    assert ask(head, made["vera"], "GET", "/v1/status")[0] == 200
    code, said = ask(head, made["vera"], "POST", "/v1/jobs", {"job": JOB})
    assert (code, said["problems"][0]["what"]) == (403, "vera is a viewer; this needs a operator")
    assert ask(head, made["otto"], "POST", "/v1/jobs", {"job": JOB, "id": "j"})[0] == 201
    assert ask(head, made["otto"], "POST", "/v1/jobs/j/pause", {"reason": "lunch"})[0] == 202
    wait_until(lambda: "(by otto)" in str(head.ask("GET", "/v1/jobs/j/history")[1]))
    assert ask(head, TOKEN, "POST", "/v1/jobs/j/resume", {})[0] == 202
    assert ask(head, made["otto"], "POST", "/v1/network")[0] == 202
    told = "a measurement of all links was ordered (by otto)"
    assert told in str(head.ask("GET", "/v1/events?follow=false")[1])
    log = (head.folder / "head.log").read_text()
    assert '"by": "otto"' in log
    assert '"by": "admin"' in log

    # A stream ends with the token that opened it.
    wire, following = stream(head, made["otto"])
    with closing(wire):
        assert any(b"lunch" in line for line in following)
        assert typed("token", "revoke", "otto", "--file", str(file)).exit_code == 0
        following.read()  # To its end.
    assert head.ask("GET", "/readyz")[0] == 200
    assert ask(head, made["otto"], "GET", "/v1/status")[0] == 401
    document = json.loads(file.read_text())
    document["tokens"][0]["expires"] = 1.0
    file.write_text(json.dumps(document))
    assert ask(head, made["vera"], "GET", "/v1/status")[0] == 401
    assert "expired 1970-01-01" in typed("token", "list", "--file", str(file)).output
    file.write_text("{")
    assert ask(head, TOKEN, "GET", "/v1/status")[0] == 200, "the admin's token is in no file"
    refusals = head.ask("GET", "/v1/status")[1]["refusals"]
    assert (refusals["last_hour"], refusals["total"]) == (2, {"token": 2})
    assert (refusals["address"], refusals["cause"]) == ("127.0.0.1", "token")
    metrics = head.ask("GET", "/metrics")[1]
    assert 'sailor_requests_refused_total{why="token"} 2.0' in metrics
    log = (head.folder / "head.log").read_text()
    assert not any(token in log for token in (*made.values(), TOKEN))


def test_mistakes_in_a_token_file_are_reported(tmp_path):
    file = tmp_path / "tokens.json"
    assert "cannot be read" in typed("token", "list", "--file", str(file)).output
    token = create_token(file, "a", "viewer", None)
    assert [each.sha256 for each in read_tokens(file)] == [hash_of(token)]
    assert file.stat().st_mode & 0o077 == 0
    again = typed("token", "create", "a", "--file", str(file))
    assert again.exit_code == 2
    assert "there is a token a already" in again.output
    assert "is not a name" in typed("token", "create", "A b", "--file", str(file)).output
    assert "there is no token b" in typed("token", "revoke", "b", "--file", str(file)).output
    file.write_text('{"tokens": [{"name": 1}]}')
    assert "is not a file of tokens" in typed("token", "list", "--file", str(file)).output


def test_a_token_revoked_while_another_is_made_stays_revoked(tmp_path, monkeypatch):
    file = tmp_path / "tokens.json"
    create_token(file, "gone", "admin", None)
    has_read, may_write, write = threading.Event(), threading.Event(), tokens._write

    def write_late(*given: Any) -> None:
        if threading.current_thread().name == "create":
            has_read.set()
            may_write.wait(30)
        write(*given)

    monkeypatch.setattr(tokens, "_write", write_late)
    words = (file, "new", "viewer", None)
    create = threading.Thread(target=create_token, args=words, name="create")
    revoke = threading.Thread(target=revoke_token, args=(file, "gone"))
    create.start()
    assert has_read.wait(30)
    revoke.start()
    revoke.join(0.3)
    may_write.set()
    create.join(30)
    revoke.join(30)
    assert [each.name for each in read_tokens(file)] == ["new"]


def test_the_lock_of_tokens_follows_no_link(tmp_path):
    (tmp_path / ".tokens.json.lock").symlink_to(tmp_path / "made")
    with pytest.raises(InputError, match="cannot be opened"):
        create_token(tmp_path / "tokens.json", "a", "viewer", None)
    assert not (tmp_path / "made").exists()


def test_a_user_who_leaves_a_group_loses_its_rights(monkeypatch):
    uid, now, groups = os.getuid() + 1, [1e6], ["ops"]
    raw = callers._CREDENTIALS.pack(1, uid, uid)
    wire = SimpleNamespace(getsockopt=lambda *_: raw)
    transport = SimpleNamespace(get_extra_info=lambda _: wire)
    request = cast("web.Request", SimpleNamespace(transport=transport))
    config = cast("Config", SimpleNamespace(operators="ops", viewers=None))
    monkeypatch.setattr(callers, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(callers.pwd, "getpwuid", lambda _: SimpleNamespace(pw_name="otto"))
    monkeypatch.setattr(callers.os, "getgrouplist", lambda *_: [7] if groups else [])
    all_groups = [SimpleNamespace(gr_name="ops", gr_gid=7)]
    monkeypatch.setattr(callers.grp, "getgrall", lambda: all_groups)
    callers._look_up.cache_clear()
    assert caller_at(request, config) == callers.Caller("otto", "operator")
    groups.clear()
    now[0] += GROUPS_S
    assert caller_at(request, config) is None
    callers._look_up.cache_clear()


CLIENT = """
import os, socket, sys
if sys.argv[2] != "0":
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
wire = socket.socket(socket.AF_UNIX); wire.connect(sys.argv[1])
wire.sendall(b"GET / HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\n\\r\\n")
print(wire.recv(4096).decode().rpartition("\\n")[2])
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can call as another user")
async def test_the_caller_on_a_unix_socket_is_read_from_the_kernel():

    config = SimpleNamespace(operators=None, viewers=None)

    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=str(caller_at(request, cast("Config", config))))

    app = web.Application()
    app.router.add_get("/", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    await web.UnixSite(runner, folder / "socket").start()
    (folder / "socket").chmod(0o666)

    async def call(uid: str) -> str:
        words = (sys.executable, "-c", CLIENT, str(folder / "socket"), uid)
        done = await asyncio.create_subprocess_exec(*words, stdout=subprocess.PIPE)
        return (await done.communicate())[0].decode().strip()

    assert await call("0") == "Caller(name='root', role='admin')"
    assert await call("65534") == "None"
    config.viewers = "nogroup"
    assert await call("65534") == "Caller(name='nobody', role='viewer')"
    config.operators = "nogroup"
    assert "role='operator'" in await call("65534")
    await runner.cleanup()
    (folder / "socket").unlink(missing_ok=True)
    folder.rmdir()
