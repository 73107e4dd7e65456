"""A worker process: it outlives generations, its agent, and the ranks that it works with.

The warm parent imports this and forks it; the agent gives it seats, one generation after the
other. It hears no signal that asks to end: what to do about notices is for the agent to say.
"""

from __future__ import annotations

import queue
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from worker.control.agent_connection import AgentConnection, AgentMessage
from worker.control.assignment import Assignment, JobCache
from worker.control.generation import GenerationRun
from worker.control.preload import preload


@dataclass(eq=False)
class WorkerProcess:
    """The process: what it takes part in now, and what it is told next."""

    spec: Mapping[str, Any]
    job_cache: JobCache = field(default_factory=JobCache)
    _stint: GenerationRun | None = None
    _next: queue.SimpleQueue[GenerationRun] = field(default_factory=queue.SimpleQueue)

    def run(self) -> int:
        """Take part in one generation after the other; returns when it cannot any more."""
        self._line = AgentConnection(self.spec["socket"], self.spec["orphan_s"], self._obey)
        self._join(self.spec)  # Before any order may come.
        self._line.open()
        while True:
            stint = self._next.get()
            about = stint.assignment
            print(f"generation {about.generation} rank {about.rank}", flush=True)
            if not stint.live(self.job_cache.open):
                self._line.flush()
                return 1

    def _join(self, spec: Mapping[str, Any]) -> None:
        self._stint = GenerationRun(Assignment(spec), self._line.say)
        self._next.put(self._stint)

    def _obey(self, order: AgentMessage) -> None:
        """Called in the line's thread."""
        stint, generation = self._stint, order["generation"]
        if stint is None:
            return
        if order["order"] == "join":
            was = stint.assignment
            if generation > was.generation or order["spec"]["job"] != was.job:
                stint.leave()
                self._join(order["spec"])
            return
        if generation != stint.assignment.generation:
            return  # It was meant for what is over.
        match order["order"]:
            case "meet":
                stint.meet(order["address"])
            case "stop":
                stint.stop(order["stop_at"])
            case "replicated":
                stint.replicated(order["point"]["step"])
            case "abort":
                stint.leave()
            case _:
                print(f"an order that nobody knows: {order}", flush=True)


def main(spec: Mapping[str, Any]) -> int:
    """Be a worker; the return value is the process's exit code."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    return WorkerProcess(spec).run()


# The warm parent imports this module for those that it forks.
preload()
