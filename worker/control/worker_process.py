"""The main loop of a worker process, which outlives generations, its agent and its peers.

The fork server imports this module and forks it; the agent assigns it to one generation after the
other. It ignores termination signals, since the agent decides how to react to notices.
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
from worker.control.lossy_output import lose_what_cannot_be_written
from worker.control.preload import preload
from worker.control.work_folder import enter_job


@dataclass(eq=False)
class GenerationLoop:
    """The process: its current generation and the next one."""

    spec: Mapping[str, Any]
    job_cache: JobCache = field(default_factory=JobCache)
    _current: GenerationRun | None = None
    _next: queue.SimpleQueue[GenerationRun] = field(default_factory=queue.SimpleQueue)

    def run(self) -> int:
        """Run one generation after the other; returns when the process cannot be reused."""
        self._connection = AgentConnection(
            self.spec["socket"], self.spec["orphan_s"], self._on_message
        )
        self._join(self.spec)  # Before any command arrives.
        self._connection.open()
        while True:
            generation_run = self._next.get()
            assignment = generation_run.assignment
            print(f"generation {assignment.generation} rank {assignment.rank}", flush=True)
            if not generation_run.run(self.job_cache.open):
                self._connection.flush()
                return int(generation_run.was_bug)

    def _join(self, spec: Mapping[str, Any]) -> None:
        self._current = GenerationRun(Assignment(spec), self._connection.report)
        self._next.put(self._current)

    def _on_message(self, message: AgentMessage) -> None:
        """Handle a command of the agent; called in the connection's thread."""
        generation_run, generation = self._current, message["generation"]
        if generation_run is None:
            return
        if message["order"] == "join":
            current = generation_run.assignment
            if generation > current.generation or message["spec"]["job"] != current.job:
                generation_run.end()
                self._join(message["spec"])
            return
        if generation != generation_run.assignment.generation:
            return  # It was for an earlier generation.
        match message["order"]:
            case "meet":
                generation_run.meet(message["address"])
            case "stop":
                generation_run.stop(message["stop_at"])
            case "replicated":
                generation_run.replicated(message["point"]["step"])
            case "abort":
                generation_run.end()
            case _:
                print(f"unknown command from the agent: {message}", flush=True)


def main(spec: Mapping[str, Any]) -> int:
    """Run a worker and return its exit code."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    lose_what_cannot_be_written()
    enter_job(spec.get("work", {}))
    return GenerationLoop(spec).run()


# The fork server imports this module on behalf of the workers that it forks.
preload()
