"""Orders count once, and only for what is named: lost answers, empty names, other servers."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from sailord.cli.main import main
from tests.local_http import LocalServer, QuietHandler
from tests.sailord.daemon.running import ROOT

Reply = tuple[int, str, bytes] | None
"""Status, type of content and body; ``None``: the connection is closed without an answer."""
JOBS = {"jobs": [{"id": "tale", "state": "running"}]}


class Head(LocalServer):
    """Answers as it is told to, and remembers what was asked."""

    def __init__(self, reply: Callable[[str, str, Any], Reply]) -> None:
        super().__init__(Answer)
        self.reply = reply
        self.asked: list[tuple[str, str, Any]] = []

    @property
    def orders(self) -> list[tuple[str, Any]]:
        return [(path, body) for method, path, body in self.asked if method == "POST"]


class Answer(QuietHandler):
    server: Head

    def reply(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        asked = self.command, self.path, json.loads(raw) if raw else None
        self.server.asked.append(asked)
        reply = self.server.reply(*asked)
        if reply is None:
            self.close_connection = True
            return
        status, kind, body = reply
        self.answer(status, body, kind)


def head(reply: Callable[[str, str, Any], Reply]) -> AbstractContextManager[Head]:
    return closing(Head(reply))


def said(value: object, status: int = 200) -> Reply:
    return status, "application/json", json.dumps(value).encode()


def refused(what: str, status: int) -> Reply:
    return said({"problems": [{"place": "id", "what": what, "cure": "look"}]}, status)


def sailorctl(server: Head, *arguments: str) -> Result:
    address = f"http://127.0.0.1:{server.server_port}"
    return CliRunner().invoke(main, [*arguments, "--server", address])


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr("sailord.client.REPEATS_AFTER_S", (0.0, 0.0))


@pytest.mark.parametrize(
    ("usd", "words"),
    [("-5", "-5.0 is not in the range x>0"), ("abc", "'abc' is not a valid number")],
)
def test_an_invalid_budget_is_refused_with_its_reason(usd: str, words: str) -> None:
    found = CliRunner().invoke(main, ["budget", "tale", usd])
    assert found.exit_code == 2
    assert words in found.output


@pytest.mark.parametrize("command", ["cancel", "pause", "drain", "cordon"])
def test_an_order_with_an_empty_name_is_refused(command):
    """`sailorctl cancel "$JOB"` without the variable must not end the only job."""
    with head(lambda *_: said(JOBS | {"nodes": [{"name": "a1", "state": "ready"}]})) as server:
        done = sailorctl(server, command, "")
    assert (done.exit_code, server.asked) == (2, [])
    assert "is empty" in done.stderr
    assert "variable" in done.stderr


@pytest.mark.parametrize(
    ("there", "typed", "code"), [("a10", "a1", 1), ("a1-x", "a1", 0), ("gpu-7", "gpu", 0)]
)
def test_an_order_for_a1_does_not_reach_a10(there, typed, code):
    def reply(method: str, path: str, _: Any) -> Reply:
        if method == "GET":
            return said({"nodes": [{"name": there, "state": "ready"}]})
        return said({"id": "x"}, 202) if f"/{there}/" in path else refused("there is none", 404)

    with head(reply) as server:
        done = sailorctl(server, "drain", typed)
    assert done.exit_code == code
    assert any(f"/{there}/" in path for path, _ in server.orders) == (code == 0)


def test_a_rejoined_node_is_listed_once_and_as_alive():
    nodes = [{"name": n, "state": s} for n, s in (("a1", "ready"), ("a1", "lost"), ("a2", "ready"))]

    def reply(method: str, _: str, __: Any) -> Reply:
        return said({"nodes": nodes}) if method == "GET" else refused("there is none", 404)

    with head(reply) as server:
        done = sailorctl(server, "drain", "a")
    assert "several nodes begin so; name one: a1, a2" in done.stderr


@pytest.mark.parametrize("is_listed", [True, False], ids=["still listed", "its record is gone"])
def test_an_ambiguous_node_name_stays_ambiguous_after_a_loss(is_listed: bool):
    """`drain a` was refused while a2 lived; a moment later it must not drain a1."""
    lost = [{"name": "a2", "state": "lost"}] if is_listed else []
    known = {"nodes": [{"name": "a1", "state": "ready"}, *lost], "lost": [] if lost else ["a2"]}
    with head(lambda *asked: said(known) if asked[0] == "GET" else refused("none", 404)) as server:
        done = sailorctl(server, "drain", "a")
    assert "several nodes begin so; name one: a1, a2" in done.stderr
    assert [path for path, _ in server.orders] == ["/v1/nodes/a/drain"]


def test_an_ambiguous_job_name_is_refused_though_only_one_job_has_not_ended():
    known = {"jobs": [{"id": "tale-1", "state": "done"}, {"id": "tale-2", "state": "running"}]}
    with head(lambda *asked: said(known) if asked[0] == "GET" else refused("none", 404)) as server:
        done = sailorctl(server, "cancel", "tale")
    assert "several jobs begin so; name one: tale-1, tale-2" in done.stderr


@pytest.mark.parametrize(
    "reply",
    [
        (302, "text/html", b"sign in"),
        (200, "text/html", b"<p>welcome</p>"),
        (502, "application/json", b'{"problems": [{"why": "?"}]}'),
    ],
    ids=["a redirect", "a page", "another form"],
)
@pytest.mark.parametrize("command", [("drain", "a1"), ("status",), ("jobs",)])
def test_an_answer_of_another_server_is_an_error(reply, command):
    with head(lambda *_: reply) as server:
        done = sailorctl(server, *command)
    assert done.exit_code == 1
    assert isinstance(done.exception, SystemExit), "an error in words"
    assert "ordered" not in done.output


@pytest.mark.parametrize(("status", "code"), [(422, 2), (409, 1), (503, 1)])
def test_a_request_refused_as_invalid_exits_like_other_invalid_input(status, code):
    with head(lambda *_: refused("reason: is too long", status)) as server:
        done = sailorctl(server, "pause", "j")
    assert done.exit_code == code
    assert "is too long" in done.stderr


@pytest.mark.parametrize(
    "command",
    [("cancel", "j"), ("preempt", "a1", "--notice", "30"), ("checkpoint", "rollback", "j", "7")],
)
@pytest.mark.parametrize("first", [None, refused("the leader does not answer", 503)])
def test_an_order_whose_answer_was_lost_is_repeated_under_its_id(command, first):
    replies = [first, said({"id": "x"}, 202)]
    with head(lambda *_: replies.pop(0)) as server:
        done = sailorctl(server, *command)
    assert done.exit_code == 0, done.output
    (one, other) = server.orders
    assert one == other
    assert one[1]["id"]


def test_an_order_that_is_never_answered_names_the_id_to_repeat_it_with():
    with head(lambda *_: None) as server:
        done = sailorctl(server, "cancel", "j")
    assert done.exit_code == 1
    (id_,) = {body["id"] for _, body in server.orders}
    assert f"with the id {id_}" in done.stderr


def test_a_submission_whose_answer_was_lost_makes_one_job(tmp_path: Path):
    stored: list[str] = []

    def reply(method: str, _: str, body: Any) -> Reply:
        if method == "GET":
            return said({"id": stored[0], "state": "queued"})
        if body["id"] in stored:
            return refused("exists already", 409)
        stored.append(body["id"])
        return None

    file = tmp_path / "tale.toml"
    file.write_text((ROOT / "examples" / "small.toml").read_text())
    with head(reply) as server:
        done = sailorctl(server, "submit", str(file))
    assert done.exit_code == 0, done.output
    assert done.output == f"{stored[0]} is queued\n"
    assert stored[0].startswith("tale-")
    with head(reply) as server:
        again = sailorctl(server, "submit", str(file), "--id", stored[0])
    assert again.exit_code == 1
    assert "exists already" in again.stderr, "the answer was not lost"


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (("--server", "http://127.0.0.1:abc"), "is not an address"),
        (("--token-file", "{tmp}/two"), "it must hold one token"),
    ],
)
def test_a_wrong_address_or_token_file_is_reported_in_words(tmp_path, options, what):
    (tmp_path / "two").write_text("one\ntwo\n")
    given = [each.format(tmp=tmp_path) for each in options]
    done = CliRunner().invoke(main, ["status", *given])
    assert done.exit_code == 2
    assert what in done.stderr


@pytest.mark.parametrize(("unmeasured", "code"), [(0, 0), (3, 1)])
def test_a_network_round_that_left_links_out_fails(unmeasured, code):
    view = {"is_measuring": False, "open": 0, "unmeasured": unmeasured, "links": [], "flagged": [],
            "liars": [], "failures": []}  # fmt: skip
    with head(lambda *_: said(view)) as server:
        done = sailorctl(server, "profile", "network")
    assert done.exit_code == code, done.output
    assert ("3 curves could not be measured" in done.stderr) == bool(unmeasured)
