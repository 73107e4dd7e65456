"""A worker that trains nothing: it counts steps, in lockstep with its node's other workers.

It speaks the protocol of ``agents.workers``, so that all around a worker can be tried without
a model or a device.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STEP_S = 0.02


@dataclass(eq=False)
class FakeWorker:
    """One rank of one generation."""

    spec: dict[str, Any]
    folder: Path
    step: int
    taking: str = "running"
    stop_at: int | None = None
    is_aborted: bool = False
    waiting: bytes = b""
    line: socket.socket | None = None
    agent_seen_s: float = field(default_factory=time.monotonic)

    def run(self) -> int:
        """Count until told to end, or until nobody has asked for long."""
        while not self.is_aborted:
            self._speak()
            self._listen()
            if time.monotonic() > self.agent_seen_s + self.spec["orphan_s"]:
                print("no agent came back", flush=True)
                return 0
            time.sleep(STEP_S)
            if self.taking == "running" and self._may_step():
                self._count()
        print(f"aborted at step {self.step}", flush=True)
        return 0

    def _may_step(self) -> bool:
        for rank in range(self.spec["workers"]):
            with contextlib.suppress(OSError, ValueError):
                other = (self.folder.parent / str(rank) / "step").read_text(encoding="ascii")
                if int(other) < self.step:
                    return False
                continue
            return False
        return True

    def _count(self) -> None:
        if self.stop_at is not None and self.step >= self.stop_at:
            self.taking = "stopped"
            return
        self.step += 1
        self.write_step()
        print(f"step {self.step}", flush=True)

    def write_step(self) -> None:
        """Let the others see how far this one is."""
        early = self.folder / "step.new"
        early.write_text(str(self.step), encoding="ascii")
        early.rename(self.folder / "step")

    def _speak(self) -> None:
        word = {
            "generation": self.spec["generation"],
            "rank": self.spec["rank"],
            "taking": self.taking,
            "step": self.step,
        }
        if self.taking == "stopped":
            point = {"step": self.step, "generation": self.spec["generation"]}
            whole = {"layer": 0, "first": 0, "end": 1}
            word["sealed"] = [{"point": point, "holds": [whole]}]
        try:
            if self.line is None:
                self.line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self.line.settimeout(1.0)
                self.line.connect(self.spec["socket"])
                self.waiting = b""
            self.line.sendall(json.dumps(word).encode() + b"\n")
        except OSError:
            self._hang_up()

    def _listen(self) -> None:
        if self.line is None:
            return
        if select.select([self.line], [], [], 0)[0]:
            try:
                data = self.line.recv(4096)
            except OSError:
                data = b""
            if not data:
                self._hang_up()
                return
            *lines, self.waiting = (self.waiting + data).split(b"\n")
            for line in lines:
                self._obey(json.loads(line))
        self.agent_seen_s = time.monotonic()

    def _obey(self, order: dict[str, Any]) -> None:
        match order["order"]:
            case "stop":
                self.stop_at = order["stop_at"]
            case "abort":
                self.is_aborted = True
            case _:
                print(f"an order that nobody knows: {order}", flush=True)

    def _hang_up(self) -> None:
        if self.line is not None:
            self.line.close()
            self.line = None


def main(spec: dict[str, Any]) -> int:
    """Be one worker; the return value is the process's exit code."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    worker = FakeWorker(spec, Path(spec["folder"]), spec["step"])
    print(f"generation {spec['generation']} rank {spec['rank']} pid {os.getpid()}", flush=True)
    worker.write_step()
    return worker.run()
