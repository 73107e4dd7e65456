"""A local cluster of which any part can be killed, stopped for a while, and come back."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest.mock import patch

from agents.daemon.failpoints import FAIL_AT
from agents.daemon.process_cleanup import children_of, cluster_pids, kill, reap
from sailord.local.cluster import KINDS, LocalCluster, Node
from sailord.local.paths import Place
from tests.chaos.faulty import TROUBLE
from tests.chaos.members import Members
from tests.chaos.net import SAILORD, Ways, etcd_address

MEMORY_BYTES = 256 << 20
"""Of a node's own file system for snapshots, so that one can be full and no other."""
ROOT = Path(__file__).resolve().parents[2]
SITE = Path(__file__).resolve().parent / "site"
CLOCK = "SAILOR_CHAOS_CLOCK"
STEPS_OF_HEALTH = 2
ORPHAN_S = 60.0
"""An agent may need longer than usual to come back where so much goes on."""
SPARE_BYTES = 64 << 10
MS_REMOUNT, MS_BIND, MS_RDONLY = 32, 4096, 1


@dataclass(frozen=True, slots=True)
class ChaosPlace(Place):
    """The snapshots of each node have a file system of their own, where that can be had."""

    ways: Ways = field(kw_only=True)
    """Through which all reach each other."""
    has_mounts: bool = False

    def make(self) -> None:
        """Steps are slow where everything is harmed: a few are enough to forgive a failure."""
        Place.make(self)
        path = self.folder / "sailord.toml"
        text = path.read_text(encoding="utf-8")
        self.ways.open()
        text = self.ways.of_sailord(text)
        path.write_text(f"{text}steps_of_health = {STEPS_OF_HEALTH}\n", encoding="utf-8")
        site = self.site
        site.mkdir()
        shutil.copyfile(SITE / "sitecustomize.py", site / "sitecustomize.py")
        about = site / "chaos-0.dist-info"  # Where fsspec looks for kinds of storage.
        about.mkdir()
        points = "[fsspec.specs]\nfaulty = tests.chaos.faulty.Faulty\n"
        (about / "entry_points.txt").write_text(points, encoding="utf-8")

    @property
    def site(self) -> Path:
        """What Python finds first in the cluster's processes."""
        return self.folder / "site"

    def write_agent(self, name: str, gpu: str, zone: str, *, spot: bool) -> Path:
        config = Place.write_agent(self, name, gpu, zone, spot=spot)
        text = config.read_text(encoding="utf-8")
        text = self.ways.of_agent(text, name)
        config.write_text(text.replace("orphan_s = 10.0", f"orphan_s = {ORPHAN_S}"))
        if self.has_mounts:
            mount("tmpfs", self.memory / name, "tmpfs", 0, f"size={MEMORY_BYTES}")
        return config

    def forget_memory(self, name: str) -> None:
        if self.has_mounts:
            unmount(self.memory / name)
        Place.forget_memory(self, name)

    def remove(self) -> None:
        for folder in self.memory.glob("*") if self.has_mounts else ():
            unmount(folder)
        Place.remove(self)


@dataclass(eq=False)
class ChaosCluster(LocalCluster):
    """The cluster of `sailorctl up`, in the hands of somebody who means it harm."""

    stopped: dict[int, float] = field(default_factory=dict)
    """Processes that stand still, and since when."""
    lives: dict[str, int] = field(default_factory=dict)
    ahead_s: dict[str, float] = field(default_factory=dict)
    """Of whom the clock is wrong, and by how much."""

    def __post_init__(self) -> None:
        self.ways.net.family = self.relatives

    @property
    def ways(self) -> Ways:
        """Through which all reach each other."""
        assert isinstance(self.place, ChaosPlace)
        return self.place.ways

    @property
    def members(self) -> Members | None:
        """Of an etcd; ``None``: the store is sailord's own."""
        return self.ways.members

    def relatives(self) -> dict[int, str]:
        """Whose each process is that speaks for a node, or for sailord."""
        found = {node.agent.pid: name for name, node in list(self.nodes.items())}
        return found if self._head is None else found | {self._head.pid: SAILORD}

    @property
    def durable(self) -> Path:
        """Where checkpoints go; it outlives the cluster's folder, so that it can be looked at."""
        return self.place.folder.with_name("durable")

    def look_after(self) -> list[str]:
        """Whoever ended was killed by us, or is noticed by the storm."""
        reap(self._orphans)
        return []

    # ---- starting -------------------------------------------------------------------------------

    def _run(
        self, name: str, module: str, *words: str, is_marked: bool = True, answers: bool = False
    ) -> subprocess.Popen[bytes]:
        """Start it so that it looks where it is to die, and its workers do."""
        how = {"is_marked": is_marked, "answers": answers}
        site = self.place.folder / "site"
        more = {
            FAIL_AT: str(self._fail_file(name)),
            TROUBLE: str(self._storage_trouble),
            "PYTHONPATH": os.pathsep.join((str(site), str(ROOT))),
        }
        if name not in ("guard", "fork_server"):
            more[CLOCK] = str(self._clock(name))
            self.set_clock(name, self.ahead_s.get(name, 0.0))
        with patch.dict(os.environ, more):
            return super()._run(name, module, *words, **how)

    # ---- clocks ---------------------------------------------------------------------------------

    def _clock(self, name: str) -> Path:
        return self.place.folder / f"clock.{name}"

    def set_clock(self, name: str, ahead_s: float) -> None:
        """Set the clock that sailord or an agent goes by, now and whenever it starts."""
        self.ahead_s[name] = ahead_s
        with self._clock(name).open("r+b" if self._clock(name).exists() else "w+b") as file:
            file.write(struct.pack("d", ahead_s))

    # ---- the durable store ----------------------------------------------------------------------

    @property
    def _storage_trouble(self) -> Path:
        return self.place.folder / "objects"

    def set_storage_trouble(self, kind: str) -> None:
        """Let an object store fail in one way; in none if that is empty."""
        early = self.place.folder / "new.objects"
        early.write_text(kind, encoding="utf-8")
        early.rename(self._storage_trouble)

    # ---- the store ------------------------------------------------------------------------------

    @property
    def store(self) -> str:
        """Where the store is, with nothing in between."""
        if self.members is None:
            return f"unix://{self.place.folder}/head/store.sock"
        return etcd_address(self.members.endpoints)

    # ---- who is to die at a named place ---------------------------------------------------------

    def _fail_file(self, name: str) -> Path:
        return self.place.folder / f"fails.{name}"  # A node's workers look at fails.NODE.worker.

    def arm(self, name: str, where: str) -> None:
        """Let a daemon, or a node's workers, die there; whoever does removes the file."""
        file = self._fail_file(name)
        early = file.with_name(f"new.{file.name}")
        early.write_text(where, encoding="utf-8")
        early.rename(file)

    def disarm(self, name: str) -> None:
        """Nobody is to die there any more."""
        self._fail_file(name).unlink(missing_ok=True)

    def is_armed(self, name: str) -> bool:
        """Nobody has died there yet."""
        return self._fail_file(name).exists()

    # ---- the head -------------------------------------------------------------------------------

    @property
    def head_pid(self) -> int:
        """Sailord's process."""
        assert self._head is not None
        return self._head.pid

    def kill_head(self) -> None:
        """SIGKILL; what it had started ends by itself."""
        assert self._head is not None
        self._head.kill()
        self._head.wait()

    def start_head(self) -> None:
        """Start another in its place."""
        self._head = self._run_head()

    def head_ended(self) -> str:
        """Sailord's last words if it has ended."""
        assert self._head is not None
        return "" if self._head.poll() is None else self._last_line("sailord")

    def last_line(self, name: str) -> str:
        """The last line of a log."""
        return self._last_line(name)

    # ---- agents and workers ---------------------------------------------------------------------

    def kill_agent(self, name: str) -> None:
        """SIGKILL of the agent alone."""
        self.nodes[name].agent.kill()
        self.nodes[name].agent.wait()

    def start_agent(self, name: str) -> None:
        """Start another in its place: the same life goes on."""
        node = self.nodes[name]
        node.agent = self._agent(name, node.kind)

    def ask_agent_to_end(self, name: str) -> None:
        """SIGTERM of the agent alone."""
        self.nodes[name].agent.terminate()

    def _agent(self, name: str, kind: str) -> subprocess.Popen[bytes]:
        config = str(self.place.node(name) / "agent.toml")
        words = ("run", "--config", config, "--emulate", f"1x{KINDS[kind]}")
        return self._run(name, "agents.main", *words)

    def workers(self, name: str) -> list[int]:
        """The node's workers."""
        return children_of(self.nodes[name].fork_server)

    def kill_workers(self, name: str) -> None:
        """SIGKILL of all that computes on the node."""
        for pid in self.workers(name):
            kill(pid, self.place.folder)

    def family(self, name: str) -> list[int]:
        """All processes of the node."""
        node = self.nodes[name]
        return [node.agent.pid, node.fork_server, *self.workers(name)]

    def stop(self, pids: list[int]) -> None:
        """SIGSTOP."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                self.stopped[pid] = time.time()

    def go_on(self, pids: list[int]) -> None:
        """SIGCONT."""
        for pid in pids:
            self.stopped.pop(pid, None)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    # ---- nodes that come and go -----------------------------------------------------------------

    def bring_back(self, gone: Node) -> None:
        """A machine with the same name comes, with nothing on it."""
        name, place = gone.name, self.place
        self.lives[name] = self.lives.get(name, 0) + 1
        place.node(name).rename(place.folder / f"{name}.{self.lives[name]}")
        place.write_agent(name, KINDS[gone.kind], gone.zone, spot=gone.kind == "small")
        warm = place.node(name) / "fork_server.sock"
        fork_server = self._fork_node_server(warm)
        self.wait(f"the fork server of {name}", warm.exists)
        agent = self._agent(name, gone.kind)
        self.nodes[name] = replace(gone, agent=agent, fork_server=fork_server)
        self.gone.remove(name)

    # ---- folders --------------------------------------------------------------------------------

    def set_read_only(self, is_read_only: bool) -> None:
        """Let the durable folder take no writes, or take them again."""
        flags = MS_REMOUNT | MS_BIND | (MS_RDONLY if is_read_only else 0)
        mount("none", self.durable, "", flags, "")

    @property
    def has_own_memory(self) -> bool:
        """Nobody else keeps anything in ``/dev/shm``, as far as we see it."""
        return isinstance(self.place, ChaosPlace) and self.place.has_mounts

    def servers(self) -> list[int]:
        """Processes that may listen wherever they like."""
        return [] if self.members is None else self.members.pids()

    def left_behind(self) -> list[str]:
        """Everything of the cluster that is still there."""
        place = self.place
        return [
            *(f"process {pid}" for pid in cluster_pids(place.folder)),
            *(str(path) for path in (place.folder, place.memory) if path.exists()),
        ]

    def close(self) -> None:
        """Wake all that stands still, then end it."""
        self.go_on(list(self.stopped))
        super().close()
        self.ways.close()


@contextlib.contextmanager
def full(folder: Path) -> Iterator[None]:
    """A file system has no room for a while."""
    filler = folder / ".filler"
    room = os.statvfs(folder)
    free = room.f_bavail * room.f_frsize - SPARE_BYTES
    descriptor = os.open(filler, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        with contextlib.suppress(OSError):  # Somebody else may have taken it just now.
            os.posix_fallocate(descriptor, 0, max(free, 1))
        yield
    finally:
        os.close(descriptor)
        filler.unlink(missing_ok=True)


def mount(what: str, where: Path, kind: str, flags: int, options: str) -> None:
    """The system call; only in a name space of one's own."""
    libc = ctypes.CDLL(None, use_errno=True)
    words = (what.encode(), bytes(where), kind.encode(), ctypes.c_ulong(flags), options.encode())
    if libc.mount(*words):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(where))


def unmount(where: Path) -> None:
    """Undo ``mount``; nothing there is no mistake."""
    ctypes.CDLL(None).umount2(bytes(where), 2)
