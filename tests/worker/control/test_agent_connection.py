"""What becomes of a worker whose connection to its agent fails in its own code."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from worker.control import agent_connection
from worker.control.agent_connection import AgentConnection, AgentMessage


def test_worker_that_cannot_follow_an_order_ends_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As one that an agent of a later version reuses: nobody could direct it any more."""
    ended, codes = threading.Event(), []

    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    def refuse(_: AgentMessage) -> None:
        raise ValueError("this node's workers speak protocol 1, and its agent needs 2")

    monkeypatch.setattr(agent_connection.os, "_exit", end)
    with socket.socket(socket.AF_UNIX) as agent:
        agent.bind(str(tmp_path / "workers.sock"))
        agent.listen()
        connection = AgentConnection(str(tmp_path / "workers.sock"), 60.0, refuse)
        connection.open()
        worker, _ = agent.accept()
        with worker:
            worker.sendall(b'{"order": "join"}\n')
            assert ended.wait(20)
    assert connection._socket is not None
    connection._socket.close()
    for pipe in (connection._woken, connection._waker):
        os.close(pipe)
    assert codes == [1]
    assert "its agent needs 2" in capfd.readouterr().err
