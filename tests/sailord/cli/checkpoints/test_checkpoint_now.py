"""``checkpoint now`` ends once its order is settled, as the leader's notes tell."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from click.testing import CliRunner, Result

from agents.protocol.codec import plain
from agents.protocol.records import Order, Saving
from sailord.cli.main import main
from sailord.core.model.commands import Note, Settled
from sailord.core.model.rule import Step
from sailord.core.rules.checkpoint_rules import follow_checkpoint_order
from tests.local_http import LocalServer, QuietHandler
from tests.sailord.core.states import JOB, active_of, durable, job, state

MINE = "mine"
"""The id of the order, as sailord answers it."""


def event(id_: int, note: Note) -> dict[str, Any]:
    """Return a note as an event of the API."""
    return {"id": id_, "job": note.job, "text": note.text, "settled": plain(note.settled)}


def settled(step: int, order: str = MINE) -> Note:
    text = f"step {step} is durable, as ordered"
    return Note(text, JOB, settled=Settled((order,), step))


class Head(LocalServer):
    """Answers as a sailord whose job's newest step is durable already."""

    def __init__(self, note: Note) -> None:
        super().__init__(Answer)
        self.note, self.events = note, [event(7, settled(20))]
        self.troubles: list[str] = []
        self.is_slow, self.told = False, None

    def answer(self, method: str, path: str, asked: dict[str, list[str]]) -> Any:
        if path == "/v1/events":
            after = int(asked["after"][0])
            return {"events": [each for each in self.events if each["id"] > after]}
        if method == "POST":
            others = [event(8, settled(3, "another")), event(8, Note("started", JOB))]
            told = event(9, self.note)
            self.events += others if self.is_slow else [*others, told]
            self.told = told
            return {"id": MINE, "is_new": True}
        if path.endswith("/checkpoints"):
            if self.told not in self.events and self.told is not None:
                self.events.append(self.told)
            return {"trouble": self.troubles.pop(0), "uri": "file:///kept", "keep": 3}
        if path == "/v1/status":
            first = {"id": "first", "troubles": ["trouble of the first job"]}
            own = {"id": JOB, "troubles": ["its storage is slow"]}
            return {"job": own if asked.get("job") == [JOB] else first}
        return {"state": "running", "durable": {"point": {"step": 40}}}


class Answer(QuietHandler):
    server: Head

    def reply(self) -> None:
        url = urlsplit(self.path)
        answer = self.server.answer(self.command, url.path, parse_qs(url.query))
        body = json.dumps(answer).encode()
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.answer(200, body)


def now(note: Note, *troubles: str) -> Result:
    head = Head(note)
    head.troubles, head.is_slow = [*troubles, *[""] * 9], bool(troubles)
    with contextlib.closing(head):
        server = f"http://127.0.0.1:{head.server_port}"
        return CliRunner().invoke(main, ["checkpoint", "now", JOB, "--server", server])


def noted(*, uri: str | None, step: int) -> Note:
    """Return what the leader notes when it settles the order."""
    given = state(job=job(saving=Saving(uri)), orders=(Order(MINE, "checkpoint", JOB),))
    given = replace(given, durables={JOB: durable(step)})
    while True:
        answer = follow_checkpoint_order(given, active_of(given))
        if isinstance(answer, Step):
            given = answer.state
            if answer.commands:
                (note,) = [each for each in answer.commands if isinstance(each, Note)]
                return note
        given = replace(given, now=given.now + 10)


@pytest.mark.parametrize(
    ("uri", "step", "code", "said"),
    [
        ("file:///kept", 40, 0, "step 40 is durable; it is one of the last 3 that are kept\n"),
        ("file:///kept", 20, 1, "error: step 40 did not become durable in time\n"),
        (None, 20, 1, "error: no checkpoint: the job names no place for them\n"),
    ],
)
def test_the_order_ends_as_the_leader_tells(
    uri: str | None, step: int, code: int, said: str
) -> None:
    done = now(noted(uri=uri, step=step))
    assert (done.exit_code, done.output) == (code, said)


@pytest.mark.parametrize(("later", "code"), [("no right", 0), ("no bucket", 1)])
def test_what_failed_before_the_order_may_have_been_mended(later: str, code: int) -> None:
    """The trouble of an earlier attempt stands until one succeeds."""
    done = now(settled(40), "no right", later)
    assert done.exit_code == code
    assert ("error: no bucket" in done.output) == (code == 1)


def test_while_it_waits_it_tells_the_troubles_of_the_job_that_was_named() -> None:
    """Another job may run beside it, as the first."""
    done = now(settled(40), "no right", "no right")
    assert "still waiting\nits storage is slow\n" in done.output
    assert "first job" not in done.output
