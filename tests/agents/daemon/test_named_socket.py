"""Who sees a socket's name can connect to it, if its mode allows that."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from agents.daemon.named_socket import named_socket


def test_a_socket_gets_its_name_when_it_listens_and_has_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "sock"
    path.write_text("of the last run")
    (tmp_path / ".sock.new").write_text("of a crash")
    with (
        socket.socket(socket.AF_UNIX) as listener,
        socket.socket(socket.AF_UNIX) as client,
    ):
        with named_socket(path, 0o660) as early:
            listener.bind(str(early))
            listener.listen(1)
            assert path.read_text() == "of the last run"
        assert path.stat().st_mode & 0o777 == 0o660
        client.connect(str(path))
    assert list(tmp_path.iterdir()) == [path]


def test_a_socket_that_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with socket.socket(socket.AF_UNIX) as listener, named_socket(path, 0o600) as early:
            listener.bind(str(early))
            raise RuntimeError

    path = tmp_path / "sock"
    with pytest.raises(RuntimeError):
        fail()
    assert list(tmp_path.iterdir()) == []
