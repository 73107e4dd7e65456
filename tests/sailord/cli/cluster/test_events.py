"""`events -f` tells of a job's end once, whenever the two events of it come."""

from __future__ import annotations

import json
from contextlib import closing
from typing import Any

import pytest
from click.testing import CliRunner

from sailord.cli.main import main
from tests.local_http import LocalServer, QuietHandler


def event(id_: int, kind: str, text: str) -> dict[str, Any]:
    return {"id": id_, "at": 0.0, "kind": kind, "text": text, "job": "j"}


class Head(LocalServer):
    """Has some events, and streams later ones to the first who follows."""

    def __init__(self, found: list[dict[str, Any]], later: list[dict[str, Any]]) -> None:
        super().__init__(Answer)
        self.found, self.later = found, [later]


class Answer(QuietHandler):
    server: Head

    def reply(self) -> None:
        if self.path.endswith("follow=false"):
            self.answer(200, json.dumps({"events": self.server.found}).encode())
        elif self.server.later:
            lines = [f"data: {json.dumps(each)}\n\n" for each in self.server.later.pop()]
            self.answer(200, "".join(lines).encode(), "text/event-stream")
        else:
            problem = {"place": "events", "what": "no more", "cure": ""}
            self.answer(404, json.dumps({"problems": [problem]}).encode())


HELD = event(1, "job_held", "why"), event(2, "transition", "held: why")
DONE = event(3, "job_finished", "done: all"), event(4, "transition", "done: all")


@pytest.mark.parametrize("before", [0, 1, 2], ids="{} before".format)
def test_an_end_is_one_line(before, monkeypatch):
    monkeypatch.setattr("sailord.client.time.sleep", lambda _: None)
    told = [*HELD, *DONE]
    with closing(Head(told[:before], told[before:])) as server:
        address = f"http://127.0.0.1:{server.server_port}"
        done = CliRunner().invoke(main, ["events", "-f", "--server", address])
    said = [line.rpartition("j: ")[2] for line in done.stdout.splitlines()]
    assert [text.removeprefix("held: ") for text in said] == ["why", "done: all"]
