"""Which job is meant where none is named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sailord.cli.shared.server import active_job
from sailord.client import ServerProblem


def meant(active: str | None, **states: str) -> str:
    answers = {
        "/v1/status": {"job": None if active is None else {"id": active}},
        "/v1/jobs": {"jobs": [{"id": id_, "state": state} for id_, state in states.items()]},
    }
    client: Any = SimpleNamespace(ask=lambda _, path: answers[path])
    return active_job(client)


def test_the_active_job_or_the_only_one_is_meant() -> None:
    assert meant("a", a="running", b="queued") == "a"
    assert meant(None, a="paused") == "a"
    assert meant(None, a="paused", b="done") == "a"
    assert meant(None, a="done") == "a"


@pytest.mark.parametrize("states", [{}, {"a": "paused", "b": "paused"}, {"a": "done", "b": "done"}])
def test_of_several_jobs_one_must_be_named(states: dict[str, str]) -> None:
    with pytest.raises(ServerProblem, match="name one"):
        meant(None, **states)
