"""A cluster of real processes on this machine: sailords, agents, and workers that count steps."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agents.workers.pidfd import process_start
from tests.fakes.worker import MEETING
from tests.processes import wait_until
from tests.sailord.daemon.running import ROOT, Place

LEASE_S = 2.0
PARK_S = 1.5
# A model for which the planner takes all devices that it is given.
JOB = """
[model]
family = "gpt2"
layers = 24
hidden = 1024
heads = 16
vocab = 50272
sequence = 1024

[training]
global_batch = 128
sequence = 1024
precision = "fp32"
max_tp = 2
"""


@dataclass(eq=False)
class Agent:
    """One node of two emulated GPUs."""

    folder: Path
    name: str
    store: str
    metadata: str = "127.0.0.1:9"
    """Address of its metadata server; by default nothing listens there."""
    process: subprocess.Popen[bytes] | None = None
    environment: dict[str, str] = field(default_factory=dict)
    """Variables of the agent, in addition to this process's."""
    lease_s: float = LEASE_S
    enrols_at: str = ""
    """With TLS: the address of its sailord. Then it has copies of the key and of ``ca.pem``."""

    def start(self) -> None:
        """Start the agent, or restart it with the same node id."""
        config, key, tls = self.folder / f"{self.name}.toml", "key", ""
        if self.enrols_at:
            key, ca = f"{self.name}.key", f"{self.name}.ca.pem"
            tls = f'[tls]\nca = "{ca}"\nenrol = "{self.enrols_at}"\n'
            for copy, source in ((key, "key"), (ca, "ca/ca.pem")):
                if not (self.folder / copy).exists():
                    shutil.copy(self.folder / source, self.folder / copy)
        config.write_text(
            f'cluster_name = "test"\nname = "{self.name}"\nstate = "{self.name}"\nkey = "{key}"\n'
            f'lease_s = {self.lease_s}\nstore = "{self.store}"\nzone = "us-central1-b"\n'
            f'worker = "tests.fakes.worker"\n'
            f"[listen]\nport = 0\n[options.testing]\npark_s = {PARK_S}\n{tls}"
        )
        with (self.folder / f"{self.name}.log").open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "agents.main", "run", "--emulate", "2xA100-40",
                 "--config", config],
                cwd=ROOT, stdout=out, stderr=out,
                env={**os.environ, "GCE_METADATA_HOST": self.metadata,
                     MEETING: str(self.folder / "meeting"), **self.environment},
            )  # fmt: skip

    def kill(self) -> None:
        """Kill the agent's own process; its children live on."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def kill_node(self) -> None:
        """Kill the agent and all its children, as a power cut does."""
        self.kill()
        for pid in self._family():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def workers(self) -> dict[str, int]:
        """Return the process ids of all live workers, by generation and rank."""
        found = {}
        for path in _found(self.folder / self.name, "process.json"):
            said = json.loads(path.read_text(encoding="utf-8"))
            if process_start(said["pid"]) == said["start"]:
                found["/".join(path.parts[-3:-1])] = said["pid"]
        return found

    def count(self) -> tuple[int, int]:
        """Return the newest generation that counted a step here, and the step; or zeros."""
        home = self.folder / self.name / "generation"
        for generation in sorted(map(int, os.listdir(home)) if home.exists() else (), reverse=True):
            for rank in "01":
                with contextlib.suppress(OSError, ValueError):
                    text = (home / str(generation) / rank / "step").read_text(encoding="ascii")
                    return generation, int(text)
        return 0, 0

    def _family(self) -> list[int]:
        """Return the fork server and its children, found by their arguments."""
        sought = str(self.folder / self.name).encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().split(b"\0")
            except OSError:
                continue
            if b"agents.workers.fork_server" in words and any(
                word.startswith(sought) for word in words
            ):
                found.append(int(path.parent.name))
        return found


@dataclass(eq=False)
class Cluster:
    """One or several sailords, and nodes."""

    folder: Path
    heads: list[Place]
    agents: dict[str, Agent] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    """Addresses of metadata servers, by node."""
    agents_lease_s: float = LEASE_S
    """Longer where agents are restarted: on a busy machine that takes seconds."""
    agents_enrol: bool = False
    """At the first sailord, which has an authority in the folder ``ca``."""

    @property
    def head(self) -> Place:
        """The only sailord, or the leader."""
        if len(self.heads) == 1:
            return self.heads[0]
        leaders = [head for head in self.heads if is_leader(head)]
        assert leaders, "no leader elected"
        return leaders[0]

    def begin(self, *names: str, heads: bool = True, job: str = JOB) -> None:
        """Start what does not run yet; return when the job runs on all nodes."""
        for head in self.heads if heads else ():
            head.start()
        wait_until(lambda: is_leader(self.head))
        self.join(*names)
        code, said = self.head.ask("POST", "/v1/jobs", {"job": job, "id": "j"})
        assert code == 201, said
        wait_until(self.is_running)
        assert sorted(self.job()["members"]) == sorted(self.agents), "the plan leaves nodes out"

    def join(self, *names: str) -> None:
        """Start nodes, and return when they are ready."""
        for name in names:
            self.agents[name] = Agent(self.folder, name, self.heads[0].store_url)
            self.agents[name].lease_s = self.agents_lease_s
            if self.agents_enrol:
                self.agents[name].enrols_at = f"127.0.0.1:{self.heads[0].port}"
            self.agents[name].metadata = self.metadata.get(name, Agent.metadata)
            self.agents[name].start()
        wait_until(lambda: self.head.status()["nodes"].get("ready") == len(self.agents))

    def job(self) -> Any:
        """Return the job as the leader reports it."""
        return self.head.status()["job"]

    def is_running(self, *, beyond: int = 0) -> bool:
        """Return whether the job runs beyond this step, by the leader's knowledge."""
        job = self.job()
        return bool(job) and job["phase"]["name"] == "running" and job["step"] > beyond

    def count(self) -> tuple[int, int]:
        """Return the newest generation, and the step that it has counted."""
        return max(agent.count() for agent in self.agents.values())

    def wait_steps(self, steps: int = 3) -> None:
        """Return after this many more steps."""
        before = self.count()
        wait_until(lambda: self.count() >= (before[0], before[1] + steps))

    def history(self) -> list[str]:
        """Return the job's history, line by line."""
        code, said = self.head.ask("GET", "/v1/jobs/j/history")
        assert code == 200, said
        return [line["text"] for line in said["history"]]

    def workers(self) -> dict[str, dict[str, int]]:
        """Return all live workers, by node."""
        return {name: agent.workers() for name, agent in self.agents.items()}

    def end(self) -> None:
        """End all processes."""
        for agent in self.agents.values():
            agent.kill_node()
        for head in self.heads:
            head.stop_all()


def is_leader(head: Place) -> bool:
    """Return whether this sailord is up and the leader."""
    try:
        return bool(head.ask("GET", "/readyz")[1].get("leads"))
    except OSError:
        return False


def restart(head: Place, process: subprocess.Popen[bytes]) -> tuple[subprocess.Popen[bytes], float]:
    """Kill a sailord and start it again; return the new process and the time."""
    process.kill()
    process.wait()
    return head.start(), time.monotonic()


def left_behind(leader: int) -> list[int]:
    """Return what is still alive of the session that a process began."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] not in "ZX" and int(fields[3]) == leader:
            found.append(int(path.parent.name))
    return found


def _found(folder: Path, name: str) -> Iterator[Path]:
    """Yield files of that name; unlike ``glob``, tolerate folders that vanish meanwhile."""
    for parent, _, names in os.walk(folder):
        if name in names:
            yield Path(parent, name)
