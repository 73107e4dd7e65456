"""The measurement of the control plane with many nodes."""

from __future__ import annotations

import multiprocessing
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, ClassVar

from benchmarks import control


class _Process:
    """Stands for a process of agents; has its end of the pipe."""

    has_ended: ClassVar[list[bool]] = []
    """Of each process that was killed, whether its pipe had ended before."""

    def __init__(self, *, target: Any, args: tuple[Any, ...], daemon: bool) -> None:
        del target, daemon
        self.orders = args[-1]

    def start(self) -> None:
        pass

    def kill(self) -> None:
        self.has_ended.append(self.orders.poll())  # A pipe that ended has something to read.

    def join(self) -> None:
        self.orders.close()


def test_pipes_to_agents_stay_open_until_their_processes_are_killed(monkeypatch):
    monkeypatch.setattr(_Process, "has_ended", [])
    context = SimpleNamespace(Pipe=multiprocessing.Pipe, Process=_Process)
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: context)
    with ExitStack() as stack:
        control.begin_agents("unix:///nowhere", 2, stack)
    assert _Process.has_ended == [False] * control.PROCESSES
