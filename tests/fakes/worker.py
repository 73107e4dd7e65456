"""An emulated worker: trains nothing, but counts steps in lockstep with its generation.

It speaks the protocol of ``agents.workers.gang``, so that everything around a worker can be tested
without a model or a device. The ranks meet in a folder: that of their node, or the one that the
environment names for all nodes of a machine. Each step ends in a vote there, like a real one: the
step counts once all ranks have entered it, and all stop at its end if one of them wants to.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fakes.worker_state import Share, fetch, seal, share_of

STEP_S = 0.02
MEETING = "SAILOR_FAKE_MEETING"


SEAL_EVERY = 10
"""The smallest number of steps between two snapshots."""


@dataclass(eq=False)
class Part:
    """One rank in one generation."""

    spec: dict[str, Any]
    step: int
    share: Share
    taking: str = "fetching"
    failure: str = ""
    broken_peers: list[str] = field(default_factory=list)
    meeting: str = ""
    stop_at: int | None = None
    votes: dict[int, bool] = field(default_factory=dict)
    """By step that was entered: whether to stop at its end."""
    sealed_at: int | None = None

    @property
    def folder(self) -> Path:
        return Path(self.spec["folder"])

    @property
    def votes_file(self) -> Path:
        """The file in the shared folder in which the other ranks read its votes."""
        shared = os.environ.get(MEETING)
        home = self.folder.parent / "meeting"
        if shared is not None:
            home = Path(shared) / f"{self.spec['job']}-{self.spec['generation']}"
        home.mkdir(parents=True, exist_ok=True)
        return home / str(self.spec["rank"])

    def begin(self) -> None:
        """Fetch the state; rank 0 opens the rendezvous."""
        self.failure, self.broken_peers = fetch(self.share)
        self.taking = "rebuilding"
        if self.failure:
            self.taking = "broken" if self.broken_peers else "failed"
        if self.spec["rank"] == 0:
            self.meeting = f"{self.spec['host']}:{self.spec['generation']}"
        self.write_step()

    def go_on(self) -> None:
        """Enter the next step, and end it once all ranks have entered it."""
        following = self.step + 1
        if following not in self.votes:
            self.vote(following)
        files = [file for file in self.votes_file.parent.iterdir() if not file.suffix]
        said = [json.loads(file.read_bytes()) for file in files]
        if len(said) < self.spec["ranks"] or any(str(following) not in votes for votes in said):
            return
        self.taking, self.step = "running", following
        self.write_step()
        print(f"step {self.step}", flush=True)
        if any(votes[str(following)] for votes in said):
            self.taking = "stopped"
        if self.taking == "stopped" or self.step % max(self.spec["memory_every"], SEAL_EVERY) == 0:
            seal(self.share, self.step)
            self.sealed_at = self.step

    def vote(self, step: int) -> None:
        """Enter a step; ranks that are still in the step before need that vote too."""
        is_wished = self.stop_at is not None and self.stop_at <= step
        self.votes = {s: wish for s, wish in self.votes.items() if s == step - 1}
        self.votes[step] = is_wished
        _write(self.votes_file, json.dumps(self.votes))

    def write_step(self) -> None:
        """Write the step to a file, for people and tests."""
        _write(self.folder / "step", str(self.step))

    def status(self) -> dict[str, Any]:
        """Return its status."""
        generation = self.spec["generation"]
        status = {
            "generation": generation,
            "rank": self.spec["rank"],
            "taking": self.taking,
            "step": self.step,
            "meeting": self.meeting,
            "failure": self.failure,
            "broken_peers": self.broken_peers,
            "loss": 1.0 / (1 + self.step),
        }
        if self.sealed_at is not None:
            status["sealed_at"] = {"step": self.sealed_at, "generation": generation}
        return status


@dataclass(eq=False)
class FakeWorker:
    """One worker process, over all its generations."""

    part: Part
    waiting: bytes = b""
    line: socket.socket | None = None
    agent_seen_s: float = field(default_factory=time.monotonic)

    def run(self) -> int:
        """Count steps until no agent has answered for ``orphan_s``; otherwise the agent kills
        it."""
        self._begin(self.part.spec)
        while time.monotonic() < self.agent_seen_s + self.part.spec["orphan_s"]:
            self._send_status()
            self._listen()
            time.sleep(STEP_S)
            part = self.part
            if part.meeting and part.taking in {"rebuilding", "running"}:
                part.go_on()
        print("no agent came back", flush=True)
        return 0

    def _begin(self, spec: dict[str, Any]) -> None:
        print(f"generation {spec['generation']} rank {spec['rank']} pid {os.getpid()}", flush=True)
        self.part = Part(spec, spec["restore"]["step"], share_of(spec))
        self.part.begin()

    def _send_status(self) -> None:
        try:
            if self.line is None:
                self.line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self.line.settimeout(1.0)
                self.line.connect(self.part.spec["socket"])
                self.waiting = b""
            self.line.sendall(json.dumps(self.part.status()).encode() + b"\n")
        except OSError:
            self._disconnect()

    def _listen(self) -> None:
        if self.line is None:
            return
        if select.select([self.line], [], [], 0)[0]:
            try:
                data = self.line.recv(1 << 16)
            except OSError:
                data = b""
            if not data:
                self._disconnect()
                return
            *lines, self.waiting = (self.waiting + data).split(b"\n")
            for line in lines:
                self._follow_order(json.loads(line))
        self.agent_seen_s = time.monotonic()

    def _follow_order(self, order: dict[str, Any]) -> None:
        part = self.part
        if order["order"] == "join":
            if order["generation"] != part.spec["generation"]:
                self._begin(order["spec"])
            return
        if order["generation"] != part.spec["generation"]:
            return  # For an earlier generation.
        match order["order"]:
            case "meet":
                part.meeting = order["address"]
            case "stop":
                part.stop_at = order["stop_at"]
            case "abort":
                print(f"aborted at step {part.step}", flush=True)
                part.taking = "idle"
            case "replicated":
                pass
            case _:
                print(f"unknown order: {order}", flush=True)

    def _disconnect(self) -> None:
        if self.line is not None:
            self.line.close()
            self.line = None


def main(spec: dict[str, Any]) -> int:
    """Run one worker; return the exit code of the process."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return FakeWorker(Part(spec, spec["restore"]["step"], share_of(spec))).run()


def _write(path: Path, text: str) -> None:
    early = path.with_suffix(".new")
    early.write_text(text, encoding="ascii")
    early.rename(path)
