"""What becomes of a worker whose connection to its agent fails in its own code."""

from __future__ import annotations

import fcntl
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from worker.control import agent_connection
from worker.control.agent_connection import AgentConnection, AgentMessage

FAR = 1024
"""The first number of an open file that ``select`` does not take."""


def ends_with(
    folder: Path, monkeypatch: pytest.MonkeyPatch, hear: Callable[[AgentMessage], None]
) -> list[int]:
    """Send an order that ends the worker; return with which codes it ended."""
    ended, codes = threading.Event(), []

    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    monkeypatch.setattr(agent_connection.os, "_exit", end)
    with socket.socket(socket.AF_UNIX) as agent:
        agent.bind(str(folder / "workers.sock"))
        agent.listen()
        connection = AgentConnection(str(folder / "workers.sock"), 60.0, hear)
        connection.open()
        worker, _ = agent.accept()
        with worker:
            worker.sendall(b'{"order": "join"}\n')
            assert ended.wait(20)
    assert connection._socket is not None
    connection._socket.close()
    for pipe in (connection._woken, connection._waker):
        os.close(pipe)
    return codes


def test_worker_that_cannot_follow_an_order_ends_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As one that an agent of a later version reuses: nobody could direct it any more."""

    def refuse(_: AgentMessage) -> None:
        raise ValueError("this node's workers speak protocol 1, and its agent needs 2")

    assert ends_with(tmp_path, monkeypatch, refuse) == [1]
    assert "its agent needs 2" in capfd.readouterr().err


@pytest.mark.usefixtures("descriptors")
def test_a_worker_with_a_thousand_open_files_hears_an_agent_that_has_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of a thousand ranks, which has a connection to each other one."""
    heard = []

    def hear(message: AgentMessage) -> None:
        heard.append(message)
        raise ValueError("that is enough")

    def far(*kind: int) -> socket.socket:
        with socket.socket(*kind) as near:
            return socket.socket(fileno=fcntl.fcntl(near, fcntl.F_DUPFD_CLOEXEC, FAR))

    kinds = {"AF_UNIX": socket.AF_UNIX, "SOCK_STREAM": socket.SOCK_STREAM}
    monkeypatch.setattr(agent_connection, "socket", SimpleNamespace(socket=far, **kinds))
    ends_with(tmp_path, monkeypatch, hear)
    assert heard == [{"order": "join"}]
