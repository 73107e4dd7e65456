"""What `systemctl status sailor-agent` shows, and an agent whose disk is full."""

from __future__ import annotations

import asyncio
import errno
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agents import loop
from agents.core.model import Event, GenerationRead, State, UploadDone
from agents.daemon.clock import Clock
from agents.loop import AgentLoop, CurrentState, describe
from agents.protocol.records import GenerationRecord, Point, Report, Uploaded
from agents.saved_state import SavedState, updated
from tests.agents.core.life import JOB, NODE, NOW, G, idle, state
from tests.processes import until

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


async def test_agent_whose_disk_is_full_joins_no_generation_until_it_has_room(
    tmp_path, monkeypatch
):
    """An agent that ended would end again at once, and the workers' node with it."""
    attempts: list[SavedState] = []
    has_room = False

    def save(path: Path, saved: SavedState) -> None:
        attempts.append(saved)
        if not has_room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(loop, "save", save)
    monkeypatch.setattr(loop, "SAVE_AGAIN_S", 0.01)
    sent: list[Report] = []
    joined: list[GenerationRecord] = []

    async def join(record: GenerationRecord) -> None:
        joined.append(record)

    def ignored(*_: object) -> None:
        pass

    events: asyncio.Queue[Event] = asyncio.Queue()
    parts: dict[str, Any] = {
        "registration": SimpleNamespace(),
        "gang": SimpleNamespace(begin=ignored),
        "joiner": SimpleNamespace(join=join),
        "snapshots": SimpleNamespace(begin=ignored),
        "sender": SimpleNamespace(send=sent.append),
    }
    begun = idle()
    agent = AgentLoop(
        current=CurrentState(begun), saved=updated(SavedState("boot", 1), begun),
        path=tmp_path / "x", clock=Clock(), events=events, **parts,
    )  # fmt: skip
    running = asyncio.create_task(agent.run())
    # Do not wait for work that the next agent would do again.
    vote = Uploaded(Point(40, 3), "3-40", 1, "", ())
    events.put_nowait(UploadDone(NOW, JOB, vote))
    await until(lambda: sent and sent[-1].uploaded == (vote,))
    assert attempts
    events.put_nowait(GenerationRead(NOW, replace(G, number=4)))
    attempts.clear()
    await until(lambda: [each for each in attempts if each.generation == 4][2:])
    assert joined == []
    has_room = True
    await until(lambda: joined)
    assert agent.saved.generation == 4
    assert not running.done()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
