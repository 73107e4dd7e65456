"""Which job the screen shows, of several that share the cluster."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from sailord.client import ServerProblem
from sailord.screen.poller import Poller
from sailord.screen.ui import Asked, Ui
from sailord.screen.view import screen
from tests.sailord.screen.test_view import STORM

BESIDE = {"id": "other", "phase": "running", "generation": 1, "step": 120, "steps": 400}
NEXT = Asked("next_job")


class FakeClient:
    """A sailord with two jobs, of which one may end."""

    def __init__(self) -> None:
        self.has_other = True
        self.asked: list[str] = []
        self.first = STORM["status"]["job"]["id"]

    def ask(self, _method: str, path: str) -> dict[str, Any]:
        self.asked.append(path)
        if path.startswith("/v1/events"):
            return {"events": []}
        if path == "/v1/nodes":
            return {"nodes": []}
        status = copy.deepcopy(STORM["status"])
        first = BESIDE | {"id": self.first, "nodes": ["a1"], "step_s": None}
        rows = [first, BESIDE | {"nodes": ["b1", "b2"], "step_s": 0.5}]
        status["running"] = rows if self.has_other else []
        if path == "/v1/status?job=other":
            if not self.has_other:
                raise ServerProblem("other: does not run", 404)
            status["job"]["id"] = "other"
        return status


def shown(poller: Poller) -> list[str]:
    return [str(line) for line in screen(poller.seen, Ui(), 80, 24).renderables]


@pytest.fixture
def poller():
    made = Poller(FakeClient())
    made.look()
    return made


def test_each_other_job_has_a_line(poller):
    (line,) = [line for line in shown(poller) if line.startswith("other ")]
    assert line == "other  running, step 120 of 400, 0.5 s each, 2 nodes"
    assert "next job" in shown(poller)[-1]


def test_tab_goes_through_the_jobs(poller):
    seen = []
    for _ in range(3):
        poller.order(NEXT)
        poller.look()
        seen.append(poller.seen.job["id"])
    assert seen == ["other", poller.client.first, "other"]


def test_the_first_job_is_shown_once_the_chosen_one_does_not_run(poller):
    poller.order(NEXT)
    poller.client.has_other = False
    poller.look()
    assert poller.seen.job["id"] == poller.client.first
    assert poller.job is None
    assert "next job" not in shown(poller)[-1]
