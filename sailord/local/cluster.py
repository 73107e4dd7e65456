"""A local cluster's processes: started, counted, killed one node at a time, and all ended."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agents.daemon.process_cleanup import children_of, end_all, kill, mark_of, reap
from sailord.client import Client, ServerProblem
from sailord.local.paths import Place, temporary
from simulator.documents.problems import InputError, Problem

_PR_SET_CHILD_SUBREAPER = 36
NO_CLOUD = "127.0.0.1:9"
"""Where no metadata server answers, whatever this machine is."""
START_S = 60.0
KINDS: Mapping[str, str] = {"large": "emulated-large", "small": "emulated-small"}
ZONES = ("zone-a", "zone-b", "zone-c")
FIRST_NODES = (
    *(("large", "zone-a"),) * 3,
    *(("large", "zone-b"),) * 2,
    *(("small", "zone-c"),) * 3,
)


class Failed(Exception):  # noqa: N818 - what happened, in a sentence for a person
    """A process of the cluster did not come up, or ended."""


@dataclass(eq=False)
class Node:
    """One emulated machine."""

    name: str
    kind: str
    zone: str
    words: tuple[str, ...]
    """The command line of its agent."""
    agent: subprocess.Popen[bytes]
    nursery: int


@dataclass(eq=False)
class LocalCluster:
    """All processes of one local cluster; a context in which it lives."""

    place: Place
    machines: Sequence[tuple[str, str]] = FIRST_NODES
    """Kind and zone of those that are there at the beginning."""
    nodes: dict[str, Node] = field(default_factory=dict)
    gone: list[str] = field(default_factory=list)
    """Machines that were taken away."""
    _head: subprocess.Popen[bytes] | None = None
    _hatchery: subprocess.Popen[bytes] | None = None
    _guard: subprocess.Popen[bytes] | None = None
    _lock: int | None = None
    _orphans: set[int] = field(default_factory=set)

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def client(self) -> Client:
        """Speaks to the cluster's sailord."""
        return Client(f"unix://{self.place.socket}")

    # ---- beginning ------------------------------------------------------------------------------

    def claim(self) -> None:
        """Take the folder, or refuse it; nothing runs before."""
        if importlib.util.find_spec("torch") is None:
            what, cure = "torch is not installed", "install the group worker: make install"
            raise InputError(Problem("workers", what, cure))
        self._take_place()

    def start(self) -> None:
        """Start sailord and the first nodes; return when all of it is ready."""
        if self._lock is None:
            self.claim()
        # Whoever loses its parent becomes our child, so that none is left without one.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        place = self.place
        self._guard = self._run("guard", "sailord.local.guard", str(place.folder), is_marked=False)
        self._hatchery = self._run(
            "hatchery", "agents.workers.shared_fork_server", place.worker, answers=True
        )
        self._head = self._run_head()
        for kind, zone in self.machines:
            self.add_node(kind, zone)
        self.wait("sailord", lambda: self.client.ask("GET", "/readyz"))
        self.wait("the nodes", lambda: self.ready_nodes() >= set(self.nodes))

    def _run_head(self) -> subprocess.Popen[bytes]:
        config = str(self.place.folder / "sailord.toml")
        return self._run("sailord", "sailord.main", "run", "--config", config)

    def _take_place(self) -> None:
        place = self.place
        path = place.folder.with_name(f"{place.folder.name}.lock")
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            what, cure = f"cannot be made: {error.strerror}", "name another with --folder"
            raise InputError(Problem(str(place.folder), what, cure)) from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            what = "another cluster runs there"
            cure = "stop it with Ctrl-C where it runs, or name another folder with --folder"
            raise InputError(Problem(str(place.folder), what, cure)) from None
        self._lock = descriptor
        # What a killed launcher and its killed guard have left goes now.
        end_all(place.folder)
        place.remove()
        if place.folder.exists():
            what = "is there already, and no cluster's"
            cure = "name one that is not there, with --folder"
            raise InputError(Problem(str(place.folder), what, cure))
        place.make()

    def _run(
        self, name: str, module: str, *words: str, is_marked: bool = True, answers: bool = False
    ) -> subprocess.Popen[bytes]:
        folder = self.place.folder
        mark = mark_of(folder) if is_marked else {}
        with (folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", module, *words],
                stdin=subprocess.PIPE if answers or not is_marked else subprocess.DEVNULL,
                stdout=subprocess.PIPE if answers else log,
                stderr=log,
                env={**os.environ, **mark, **temporary(folder), "GCE_METADATA_HOST": NO_CLOUD},
                start_new_session=True,
            )

    # ---- nodes ----------------------------------------------------------------------------------

    def add_node(self, kind: str, zone: str) -> str:
        """Start a node's agent; return the node's name."""
        if kind not in KINDS or zone not in ZONES:
            cure = f"give one of {', '.join(KINDS)} at one of {', '.join(ZONES)}"
            raise InputError(Problem(f"{kind}@{zone}", "is no such machine", cure))
        letter, number = zone[-1], 1
        while f"{letter}{number}" in (*self.nodes, *self.gone):
            number += 1
        name = f"{letter}{number}"
        config = self.place.write_agent(name, KINDS[kind], zone, spot=kind == "small")
        warm = self.place.node(name) / "fork_server.sock"
        nursery = self._hatch(warm)
        self.wait(f"the warm parent of {name}", warm.exists)  # Or the agent starts its own.
        words = ("run", "--config", str(config), "--emulate", f"1x{KINDS[kind]}")
        agent = self._run(name, "agents.main", *words)
        self.nodes[name] = Node(name, kind, zone, words, agent, nursery)
        return name

    def _hatch(self, path: Path) -> int:
        assert self._hatchery is not None
        assert self._hatchery.stdin is not None
        assert self._hatchery.stdout is not None
        try:
            self._hatchery.stdin.write(bytes(path) + b"\n")
            self._hatchery.stdin.flush()
            answer = self._hatchery.stdout.readline()
        except BrokenPipeError:
            answer = b""
        if not answer:
            raise Failed(f"the warm parent ended: {self._last_steering_orders('hatchery')}")
        return int(answer)

    def kill_node(self, name: str) -> None:
        """Take a machine away: kill all that runs on it, and remove what it had in memory."""
        node, folder = self.nodes.pop(name), self.place.folder
        ours = set(children_of(os.getpid()))
        workers = children_of(node.nursery)
        for pid in (node.agent.pid, node.nursery, *workers):
            kill(pid, folder)
        # Whoever was being forked meanwhile has become our child.
        workers += [pid for pid in children_of(os.getpid()) if pid not in ours]
        for pid in workers:
            kill(pid, folder)
        node.agent.wait()
        self._orphans.update((node.nursery, *workers))
        self.gone.append(name)
        self.place.forget_memory(name)

    def hang_workers(self, name: str) -> None:
        """Stop a machine's workers as something in the kernel might: they hear nothing."""
        for pid in children_of(self.nodes[name].nursery):
            os.kill(pid, signal.SIGSTOP)

    def ready_nodes(self) -> set[str]:
        """The names of the nodes that are ready for work."""
        nodes = self.client.ask("GET", "/v1/nodes")["nodes"]
        return {node["name"] for node in nodes if node["state"] == "ready"}

    # ---- living ---------------------------------------------------------------------------------

    def look_after(self) -> list[str]:
        """Bury what ended; tell of processes that should not have.

        A killed service is started again, as systemd does on a real machine.
        """
        reap(self._orphans)
        told = []
        if self._head is not None and (code := self._head.poll()) is not None:
            if code >= 0:
                raise Failed(f"sailord ended: {self._last_steering_orders('sailord')}")
            self._head = self._run_head()
            told.append(f"sailord {_killed(code)}")
        for name, node in list(self.nodes.items()):
            code = node.agent.poll()
            if code is not None and code < 0:
                node.agent = self._run(name, "agents.main", *node.words)
                told.append(f"the agent of {name} {_killed(code)}")
            elif code is not None:
                told.append(f"the agent of {name} ended: {self._last_steering_orders(name)}")
                self.kill_node(name)
        return told

    def play_cloud(self, status: Mapping[str, Any]) -> list[str]:
        """Take away the machines whose notice has run out; tell which."""
        taken = [
            node["name"]
            for node in status["leaving"]
            if node["leaves_at"] is not None
            and node["leaves_at"] <= time.time()
            and node["name"] in self.nodes
        ]
        for name in taken:
            self.kill_node(name)
        return taken

    def wait(self, what: str, holds: Callable[[], object]) -> None:
        """Return once something holds; ``Failed`` if it does not in time."""
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            with contextlib.suppress(ServerProblem):
                if holds():
                    return
            for told in self.look_after():
                raise Failed(told)
            time.sleep(0.02)
        raise Failed(f"{what} did not come up within {START_S:.0f} s")

    def _last_steering_orders(self, name: str) -> str:
        try:
            lines = (self.place.folder / f"{name}.log").read_text(errors="replace").splitlines()
        except OSError:
            return "it left no log"
        return lines[-1] if lines else "it said nothing"

    # ---- ending ---------------------------------------------------------------------------------

    def close(self) -> None:
        """End all processes and remove all files."""
        if self._lock is None:
            return
        for process in (self._head, self._hatchery):
            if process is not None:
                process.send_signal(signal.SIGKILL)
        end_all(self.place.folder)
        reap(self._orphans)
        self.place.remove()
        # Last of all: whoever kills us before this has the guard do it.
        for process in (self._hatchery, self._guard):
            for end in () if process is None else (process.stdin, process.stdout):
                if end is not None:
                    with contextlib.suppress(OSError):
                        end.close()
        for process in (self._guard, self._hatchery, self._head):
            if process is not None:
                process.wait()
        for node in self.nodes.values():
            node.agent.poll()
        self.place.folder.with_name(f"{self.place.folder.name}.lock").unlink(missing_ok=True)
        os.close(self._lock)
        self._lock = None


def _killed(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}, and is started again"
