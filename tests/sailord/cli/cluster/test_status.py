"""``status -w`` draws where it can, and prints everywhere else."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest

from sailord.cli.main import main
from tests.sailord.cli.cluster.test_orders import Reply, head, refused, said
from tests.sailord.screen.test_view import STORM


class DumbTerminal(io.StringIO):
    """As in an editor's shell: what is printed appears, and the cursor cannot move."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_that_cannot_be_drawn_on_gets_the_status_as_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = [said(STORM["status"])]

    def reply(_method: str, path: str, _body: Any) -> Reply:
        if path == "/v1/status":
            return left.pop() if left else refused("the token has expired", 401)
        return said({"events": [], "nodes": [], "moves": []})

    terminal = DumbTerminal()
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr("sailord.cli.cluster.status.WATCH_S", 0.0)
    with head(reply) as server:
        address = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(SystemExit):
            main(["status", "-w", "--server", address], standalone_mode=False)
    assert terminal.getvalue().startswith("cluster ")
