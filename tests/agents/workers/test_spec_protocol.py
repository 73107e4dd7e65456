"""An agent of a later version says what to do with workers that cannot act on its orders."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agents.core.model import Event, GangReported
from agents.daemon.clock import Clock
from agents.protocol.records import JobId
from agents.workers import fork_client
from agents.workers.fork_client import ForkClient, WorkersTooOldError
from agents.workers.fork_server import ForkServer
from agents.workers.gang import WorkerGang
from worker.spec_protocol import NEEDS, SPEAKS, why_incompatible

TOLD = (
    "this node's workers speak protocol {}, and its agent needs {}: drain the node, which starts"
    " them anew (sailorctl drain NODE)"
)


@pytest.fixture
async def answers(tmp_path: Path) -> AsyncIterator[dict[str, bytes]]:
    """A fork server that answers so to everything: one without a number, at first."""
    says = {"all": b"{}\n"}

    async def serve(lines: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await lines.readline():
            writer.write(says["all"])
        writer.close()

    server = await asyncio.start_unix_server(serve, tmp_path / "fork_server.sock")
    yield says
    server.close()
    await server.wait_closed()


async def test_too_old_fork_server_is_reported_with_the_cure(answers, tmp_path, monkeypatch):
    client = ForkClient(tmp_path, "unused", 60.0)
    await client.ensure_running()  # Today's agent directs those without a number.
    monkeypatch.setattr(fork_client, "NEEDS", 2)
    with pytest.raises(WorkersTooOldError) as refused:
        await client.ensure_running()
    assert str(refused.value) == TOLD.format(0, 2)
    told: list[Event] = []
    gang = WorkerGang(tmp_path, client, Clock(), told.append)
    gang.job, gang.generation, gang._is_starting = JobId("j"), 3, True
    await gang.start([{"job": "j", "generation": 3, "rank": 0, "device": 0}])
    failed = told[0]
    assert isinstance(failed, GangReported)
    assert failed.failure == f"the workers cannot be started: {TOLD.format(0, 2)}"
    answers["all"] = b'{"speaks": 2, "new": [1]}\n'
    await client.ensure_running()
    client.check_version()


def test_the_fork_server_reports_the_protocol_of_its_workers() -> None:
    server: Any = ForkServer.__new__(ForkServer)
    assert server._answer({"ask": "sync", "new": 1}, []) == {"speaks": SPEAKS}
    assert why_incompatible(SPEAKS, NEEDS) == ""
    assert why_incompatible(1, 2) == TOLD.format(1, 2)
