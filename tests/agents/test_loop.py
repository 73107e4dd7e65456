"""What `systemctl status sailor-agent` shows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agents.core.model import State
from agents.loop import describe
from tests.agents.core.life import NODE, NOW, idle, state

STOPPED = replace(NODE, state="draining")


@pytest.mark.parametrize(
    ("now", "line"),
    [
        (idle(is_healthy=False), "not ready: its devices are tested"),
        (idle(is_healthy=False, why_not="ECC errors"), "not ready: ECC errors"),
        (idle(is_healthy=False, fault="it fell off"), "not ready: it fell off"),
        (idle(is_registered=False), "not ready: it is not registered yet"),
        (
            idle(is_registered=False, store_silent_since=NOW),
            "not ready: it is not registered yet; the store does not answer",
        ),
        (idle(), "ready for work"),
        (state(), "running: generation 3 of job"),
        (
            state(is_leaving=True, node=STOPPED),
            "draining, ends when no worker is needed: generation 3 of job runs here",
        ),
        (state(node=STOPPED), "draining, running: generation 3 of job"),
    ],
)
def test_status_line_is_true(now: State, line: str) -> None:
    assert describe(now) == line
