"""Starts, watches and ends the processes of a local cluster."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agents.daemon.process_cleanup import children_of, kill, kill_all, mark, reap
from agents.daemon.state_folder import lock_file
from sailord.client import Client, ServerProblem
from sailord.local.paths import LOOPBACK, LocalFolders, temporary
from sailord.local.shaped_network import NodeAddress, ShapedNetwork, check_can_shape
from sailord.local.zone_file import EmulatedLink, Zones
from simulator.documents.problems import InputError, Problem

_PR_SET_CHILD_SUBREAPER = 36
NO_CLOUD = "127.0.0.1:9"
"""An address without a metadata server, so that no node takes itself to be in a cloud."""
START_S = 180.0
"""How long a part of the cluster may take to start; one that ends is noticed at once."""
GUARD_S = 2.0
"""How long cleaning up after a killed launcher may take before its folder counts as in use."""
SLOW = "SAILOR_SLOW"
"""The variable that tells workers how slow their node is (``worker.profiling.compute_time``)."""
KINDS: Mapping[str, str] = {"large": "emulated-large", "small": "emulated-small"}
ZONES = ("zone-a", "zone-b", "zone-c")
FIRST_NODES = (
    *(("large", "zone-a"),) * 3,
    *(("large", "zone-b"),) * 2,
    *(("small", "zone-c"),) * 3,
)


class ClusterError(Exception):
    """A process of the cluster did not start in time, or ended unexpectedly."""


@dataclass(eq=False)
class EmulatedNode:
    """One emulated node: its agent and its fork server."""

    name: str
    kind: str
    zone: str
    words: tuple[str, ...]
    """The command line of its agent."""
    agent: subprocess.Popen[bytes]
    fork_server: int
    address: NodeAddress | None = None
    """Its network namespace, in a shaped cluster."""


@dataclass(eq=False)
class LocalCluster:
    """All processes of one local cluster; a context manager that ends them."""

    place: LocalFolders
    machines: Sequence[tuple[str, str]] = FIRST_NODES
    """Kind and zone of the nodes at the start."""
    zones: Zones | None = None
    """Of a shaped cluster, whose nodes these are; ``None``: all nodes share the loopback device."""
    network: ShapedNetwork | None = None
    """Of a shaped cluster that has started."""
    nodes: dict[str, EmulatedNode] = field(default_factory=dict)
    gone: list[str] = field(default_factory=list)
    """Names of killed nodes."""
    _head: subprocess.Popen[bytes] | None = None
    _shared_fork_server: subprocess.Popen[bytes] | None = None
    _guard: subprocess.Popen[bytes] | None = None
    _head_address: NodeAddress | None = None
    _lock: int | None = None
    _orphans: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        if self.zones is not None:
            self.machines = self.zones.machines
            # Their addresses are not this machine's.
            self.place = replace(self.place, tls=True)

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def client(self) -> Client:
        """A client of the cluster's sailord."""
        return Client(f"unix://{self.place.socket}")

    @property
    def head_pid(self) -> int:
        """The process id of sailord, which runs."""
        assert self._head is not None
        return self._head.pid

    # ---- starting -------------------------------------------------------------------------------

    def claim(self) -> None:
        """Lock and create the folder; raise if another cluster uses it."""
        if importlib.util.find_spec("torch") is None:
            what, cure = "torch is not installed", "install the group worker: make install"
            raise InputError(Problem("workers", what, cure))
        if self.zones is not None:
            check_can_shape()
        place = self.place
        try:
            self._lock = self._lock_folder()
        except OSError as error:
            what, cure = f"cannot be created: {error.strerror}", "name another with --folder"
            raise InputError(Problem(str(place.folder), what, cure)) from None
        if self._lock is None:
            what = "another cluster runs there"
            cure = "stop it with Ctrl-C where it runs, or name another folder with --folder"
            raise InputError(Problem(str(place.folder), what, cure))
        # Remove what a killed launcher and its killed guard have left.
        kill_all(place.folder)
        place.remove()
        if place.folder.exists():
            what = "exists, and is not a local cluster's folder"
            cure = "name a new one with --folder"
            raise InputError(Problem(str(place.folder), what, cure))
        place.make()
        if self.zones is not None:
            place.write_zones(self.zones)

    def _lock_folder(self) -> int | None:
        """Lock the folder; a killed launcher's guard has the lock until it has cleaned up."""
        path = self.place.folder.with_name(f"{self.place.folder.name}.lock")
        deadline = time.monotonic() + GUARD_S
        while (lock := lock_file(path)) is None and time.monotonic() < deadline:
            time.sleep(0.1)
        return lock

    def start(self) -> None:
        """Start sailord and the first nodes; return when all are ready."""
        if self._lock is None:
            self.claim()
        # Orphans become our children, so that they can be reaped.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        place = self.place
        self._guard = self._run("guard", "sailord.local.guard", str(place.folder), is_marked=False)
        if self.zones is not None:
            router = self._run("router", "sailord.local.router", answers=True)
            self.network = ShapedNetwork(self.zones, router)
            try:
                self.network.begin()
                self._head_address = self.network.add_node("head", next(iter(self.zones.zones)))
            except BrokenPipeError:
                raise ClusterError(f"the router ended: {self._last_line('router')}") from None
            place.write_head(self._head_address.address)
        self._shared_fork_server = self._run(
            "fork_server", "agents.workers.shared_fork_server", place.worker, answers=True
        )
        self._head = self._run_head()
        for kind, zone in self.machines:
            self.add_node(kind, zone)
        self.wait("sailord", lambda: self.client.ask("GET", "/readyz"))
        self.wait("the nodes", lambda: self.ready_nodes() >= set(self.nodes), self.ready_nodes)

    def _run_head(self) -> subprocess.Popen[bytes]:
        config = str(self.place.folder / "sailord.toml")
        return self._run(
            "sailord", "sailord.main", "run", "--config", config, address=self._head_address
        )

    def _run(
        self,
        name: str,
        module: str,
        *words: str,
        is_marked: bool = True,
        answers: bool = False,
        address: NodeAddress | None = None,
    ) -> subprocess.Popen[bytes]:
        folder = self.place.folder
        marked = mark(folder) if is_marked else {}
        within = () if address is None else ("nsenter", f"--net={address.namespace}")
        slow = {} if self.zones is None else {SLOW: str(self.place.slow)}
        with (folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [*within, sys.executable, "-m", module, *words],
                stdin=subprocess.PIPE if answers or not is_marked else subprocess.DEVNULL,
                stdout=subprocess.PIPE if answers else log,
                stderr=log,
                env={
                    **os.environ,
                    **marked,
                    **slow,
                    **temporary(folder),
                    "GCE_METADATA_HOST": NO_CLOUD,
                },
                start_new_session=True,
                # The folder stays locked until the guard has cleaned up.
                pass_fds=() if is_marked or self._lock is None else (self._lock,),
            )

    # ---- nodes ----------------------------------------------------------------------------------

    def add_node(self, kind: str, zone: str) -> str:
        """Start a node's agent; return the node's name."""
        zones = ZONES if self.zones is None else tuple(self.zones.zones)
        if kind not in KINDS or zone not in zones:
            cure = f"give one of {', '.join(KINDS)} at one of {', '.join(zones)}"
            raise InputError(Problem(f"{kind}@{zone}", "is not a kind of node", cure))
        letter, number = zone[-1], 1
        while f"{letter}{number}" in (*self.nodes, *self.gone):
            number += 1
        name = f"{letter}{number}"
        address = None
        if self.network is not None and self.zones is not None:
            settings = self.zones.zones[zone]
            address = self.network.add_node(name, zone, settings.nic_mbit_per_s)
            self.place.slow_down(name, settings.times_slower)
        host = LOOPBACK if address is None else address.address
        head = LOOPBACK if self._head_address is None else self._head_address.address
        config = self.place.write_agent(
            name, KINDS[kind], zone, spot=kind == "small", host=host, head=head
        )
        warm = self.place.node(name) / "fork_server.sock"
        fork_server = self._fork_node_server(warm, address)
        self.wait(f"the fork server of {name}", warm.exists)  # Otherwise the agent starts its own.
        words = ("run", "--config", str(config), "--emulate", f"1x{KINDS[kind]}")
        agent = self._run(name, "agents.main", *words, address=address)
        self.nodes[name] = EmulatedNode(name, kind, zone, words, agent, fork_server, address)
        return name

    def _fork_node_server(self, path: Path, address: NodeAddress | None = None) -> int:
        assert self._shared_fork_server is not None
        assert self._shared_fork_server.stdin is not None
        assert self._shared_fork_server.stdout is not None
        try:
            where = "" if address is None else address.namespace
            self._shared_fork_server.stdin.write(f"{path}\t{where}\n".encode())
            self._shared_fork_server.stdin.flush()
            answer = self._shared_fork_server.stdout.readline()
        except BrokenPipeError:
            answer = b""
        if not answer:
            raise ClusterError(f"the fork server ended: {self._last_line('fork_server')}")
        return int(answer)

    def kill_node(self, name: str) -> None:
        """Kill all processes of a node, and delete its snapshots in memory."""
        node, folder = self.nodes.pop(name), self.place.folder
        ours = set(children_of(os.getpid()))
        workers = children_of(node.fork_server)
        for pid in (node.agent.pid, node.fork_server, *workers):
            kill(pid, folder)
        # A worker forked meanwhile has become our child.
        workers += [pid for pid in children_of(os.getpid()) if pid not in ours]
        for pid in workers:
            kill(pid, folder)
        node.agent.wait()
        self._orphans.update((node.fork_server, *workers))
        self.gone.append(name)
        if self.network is not None:
            self.network.remove_node(name)
        self.place.forget_memory(name)

    def hang_workers(self, name: str) -> None:
        """Stop a node's workers with SIGSTOP, like a hang in the kernel."""
        for pid in children_of(self.nodes[name].fork_server):
            os.kill(pid, signal.SIGSTOP)

    def set_link(self, one: str, other: str, link: EmulatedLink | None) -> None:
        """Set the link between two zones, both ways; ``None``: it carries nothing."""
        if self.network is None or self.zones is None:
            raise ClusterError("this cluster has no links; start one with sailorctl up --zones")
        for zone in (one, other):
            if zone not in self.zones.zones:
                raise ClusterError(f"there is no {zone}; zones: {', '.join(self.zones.zones)}")
        for ends in {(one, other), (other, one)}:
            self.network.set_link(*ends, link or EmulatedLink(), is_down=link is None)

    def ready_nodes(self) -> set[str]:
        """Return the names of the ready nodes."""
        nodes = self.client.ask("GET", "/v1/nodes")["nodes"]
        return {node["name"] for node in nodes if node["state"] == "ready"}

    # ---- running --------------------------------------------------------------------------------

    def look_after(self) -> list[str]:
        """Reap ended processes, and report those that should still run.

        A killed sailord or agent is restarted, as systemd does on a real machine.
        """
        reap(self._orphans)
        told = []
        if self._head is not None and (code := self._head.poll()) is not None:
            if code >= 0:
                raise ClusterError(f"sailord ended: {self._last_line('sailord')}")
            self._head = self._run_head()
            told.append(f"sailord {_describe_kill(code)}")
        for name, node in list(self.nodes.items()):
            code = node.agent.poll()
            if code is not None and code < 0:
                node.agent = self._run(name, "agents.main", *node.words, address=node.address)
                told.append(f"the agent of {name} {_describe_kill(code)}")
            elif code is not None:
                told.append(f"the agent of {name} ended: {self._last_line(name)}")
                self.kill_node(name)
        return told

    def play_cloud(self, status: Mapping[str, Any]) -> list[str]:
        """Kill the nodes whose notice has run out; return their names."""
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

    def wait(
        self, what: str, holds: Callable[[], object], progress: Callable[[], object] = lambda: None
    ) -> None:
        """Wait until ``holds`` returns true; raise ``ClusterError`` if it does not within
        ``START_S`` after ``progress`` last returned something new."""
        end, last = time.monotonic() + START_S, None
        while time.monotonic() < end:
            with contextlib.suppress(ServerProblem):
                if holds():
                    return
                if (now := progress()) != last:
                    end, last = time.monotonic() + START_S, now
            for told in self.look_after():
                raise ClusterError(told)
            time.sleep(0.02)
        raise ClusterError(f"{what} did not start within {START_S:.0f} s")

    def _last_line(self, name: str) -> str:
        try:
            lines = (self.place.folder / f"{name}.log").read_text(errors="replace").splitlines()
        except OSError:
            return "it has no log"
        return lines[-1] if lines else "its log is empty"

    # ---- ending ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Kill all processes and delete all files."""
        if self._lock is None:
            return
        router = None if self.network is None else self.network.process
        for process in (self._head, self._shared_fork_server, router):
            if process is not None:
                process.send_signal(signal.SIGKILL)
        kill_all(self.place.folder)
        reap(self._orphans)
        self.place.remove()
        # Last: if we are killed before this, the guard cleans up.
        for process in (self._shared_fork_server, router, self._guard):
            for end in () if process is None else (process.stdin, process.stdout):
                if end is not None:
                    with contextlib.suppress(OSError):
                        end.close()
        for process in (self._guard, self._shared_fork_server, router, self._head):
            if process is not None:
                process.wait()
        for node in self.nodes.values():
            node.agent.poll()
        self.place.folder.with_name(f"{self.place.folder.name}.lock").unlink(missing_ok=True)
        os.close(self._lock)
        self._lock = None


def _describe_kill(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name} and is restarted"
