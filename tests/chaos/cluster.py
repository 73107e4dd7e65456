"""A local cluster of which any part can be killed, suspended and restarted."""

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
from agents.daemon.process_cleanup import children_of, kill, reap
from sailord.local.cluster import KINDS, EmulatedNode, LocalCluster
from sailord.local.paths import LOOPBACK, LocalFolders
from sailord.local.shaped_network import NodeAddress
from tests.chaos.etcd_members import Members
from tests.chaos.faulty import TROUBLE
from tests.chaos.net import SAILORD, Proxies, etcd_address

MEMORY_BYTES = 256 << 20
"""Size of each node's own file system for snapshots, so that a single one can be full."""
ROOT = Path(__file__).resolve().parents[2]
SITE = Path(__file__).resolve().parent / "site"
CLOCK = "SAILOR_CHAOS_CLOCK"
OPTIONS = "steps_of_health = 2\nfailures_until_held = 5\n"
"""Steps are slow here and faults frequent: failures in a row must not hold the job at once."""
ORPHAN_S = 60.0
"""Agents may take longer than usual to restart on a busy machine."""
SPARE_BYTES = 64 << 10
MS_REMOUNT, MS_BIND, MS_RDONLY = 32, 4096, 1


@dataclass(frozen=True, slots=True)
class ChaosPlace(LocalFolders):
    """A place where each node's snapshots have their own file system, if mounts are possible."""

    proxies: Proxies = field(kw_only=True)
    """The proxies between all processes."""
    has_mounts: bool = False

    def make(self) -> None:
        """Write the configuration."""
        LocalFolders.make(self)
        path = self.folder / "sailord.toml"
        text = path.read_text(encoding="utf-8")
        self.proxies.open()
        text = self.proxies.of_sailord(text)
        path.write_text(text + OPTIONS, encoding="utf-8")
        site = self.site
        site.mkdir()
        shutil.copyfile(SITE / "sitecustomize.py", site / "sitecustomize.py")
        about = site / "chaos-0.dist-info"  # fsspec finds storage kinds by their entry points.
        about.mkdir()
        points = "[fsspec.specs]\nfaulty = tests.chaos.faulty.Faulty\n"
        (about / "entry_points.txt").write_text(points, encoding="utf-8")

    @property
    def site(self) -> Path:
        """The first folder of the module search path in the cluster's processes."""
        return self.folder / "site"

    def write_agent(
        self,
        name: str,
        gpu: str,
        zone: str,
        *,
        spot: bool,
        host: str = LOOPBACK,
        head: str = LOOPBACK,
    ) -> Path:
        config = LocalFolders.write_agent(self, name, gpu, zone, spot=spot, host=host, head=head)
        text = config.read_text(encoding="utf-8")
        text = self.proxies.of_agent(text, name)
        config.write_text(text.replace("orphan_s = 10.0", f"orphan_s = {ORPHAN_S}"))
        if self.has_mounts:
            mount("tmpfs", self.memory / name, "tmpfs", 0, f"size={MEMORY_BYTES}")
        return config

    def forget_memory(self, name: str) -> None:
        if self.has_mounts:
            unmount(self.memory / name)
        LocalFolders.forget_memory(self, name)

    def remove(self) -> None:
        for folder in self.memory.glob("*") if self.has_mounts else ():
            unmount(folder)
        LocalFolders.remove(self)


@dataclass(eq=False)
class ChaosCluster(LocalCluster):
    """The cluster of `sailorctl up`, with operations that inject faults."""

    stopped: dict[int, float] = field(default_factory=dict)
    """Suspended processes, and since when."""
    lives: dict[str, int] = field(default_factory=dict)
    ahead_s: dict[str, float] = field(default_factory=dict)
    """Daemons with a wrong clock, and its offset in seconds."""

    def __post_init__(self) -> None:
        self.proxies.net.family = self.relatives

    @property
    def proxies(self) -> Proxies:
        """The proxies between all processes."""
        assert isinstance(self.place, ChaosPlace)
        return self.place.proxies

    @property
    def members(self) -> Members | None:
        """The members of the etcd; ``None`` for the embedded store."""
        return self.proxies.members

    def relatives(self) -> dict[int, str]:
        """Return the owner (a node or sailord) of each process that opens connections."""
        found = {node.agent.pid: name for name, node in list(self.nodes.items())}
        return found if self._head is None else found | {self._head.pid: SAILORD}

    @property
    def durable(self) -> Path:
        """The checkpoint folder; it outlives the cluster's folder, so that it can be examined."""
        return self.place.folder.with_name("durable")

    def look_after(self) -> list[str]:
        """Do nothing: the storm killed the process, or reports its end itself."""
        reap(self._orphans)
        return []

    # ---- starting -------------------------------------------------------------------------------

    def _run(
        self,
        name: str,
        module: str,
        *words: str,
        is_marked: bool = True,
        answers: bool = False,
        address: NodeAddress | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a daemon that, like its workers, reads its fail points from a file."""
        modules = self.place.folder / "site"
        more = {
            FAIL_AT: str(self._fail_file(name)),
            TROUBLE: str(self._storage_trouble),
            "PYTHONPATH": os.pathsep.join((str(modules), str(ROOT))),
        }
        if name not in ("guard", "fork_server"):
            more[CLOCK] = str(self._clock(name))
            self.set_clock(name, self.ahead_s.get(name, 0.0))
        with patch.dict(os.environ, more):
            return super()._run(
                name,
                module,
                *words,
                is_marked=is_marked,
                answers=answers,
                address=address,
            )

    # ---- clocks ---------------------------------------------------------------------------------

    def _clock(self, name: str) -> Path:
        return self.place.folder / f"clock.{name}"

    def set_clock(self, name: str, ahead_s: float) -> None:
        """Set the clock offset of sailord or of an agent, now and at its next start."""
        self.ahead_s[name] = ahead_s
        with self._clock(name).open("r+b" if self._clock(name).exists() else "w+b") as file:
            file.write(struct.pack("d", ahead_s))

    # ---- the durable store ----------------------------------------------------------------------

    @property
    def _storage_trouble(self) -> Path:
        return self.place.folder / "objects"

    def set_storage_trouble(self, kind: str) -> None:
        """Make the object store fail in this way; empty: in none."""
        early = self.place.folder / "new.objects"
        early.write_text(kind, encoding="utf-8")
        early.rename(self._storage_trouble)

    # ---- the store ------------------------------------------------------------------------------

    @property
    def store(self) -> str:
        """The store's address without the proxy."""
        if self.members is None:
            return f"unix://{self.place.folder}/head/store.sock"
        return etcd_address(self.members.endpoints)

    # ---- fail points ----------------------------------------------------------------------------

    def _fail_file(self, name: str) -> Path:
        return self.place.folder / f"fails.{name}"  # A node's workers read fails.NODE.worker.

    def arm(self, name: str, where: str) -> None:
        """Arm a fail point of a daemon or a node's workers; the dying process removes the file."""
        file = self._fail_file(name)
        early = file.with_name(f"new.{file.name}")
        early.write_text(where, encoding="utf-8")
        early.rename(file)

    def disarm(self, name: str) -> None:
        """Remove the fail point."""
        self._fail_file(name).unlink(missing_ok=True)

    def is_armed(self, name: str) -> bool:
        """Return whether the fail point has not fired yet."""
        return self._fail_file(name).exists()

    # ---- the head -------------------------------------------------------------------------------

    @property
    def head_pid(self) -> int:
        """Sailord's process."""
        assert self._head is not None
        return self._head.pid

    def kill_head(self) -> None:
        """Kill sailord with SIGKILL; its children end by themselves."""
        assert self._head is not None
        self._head.kill()
        self._head.wait()

    def start_head(self) -> None:
        """Start sailord again."""
        self._head = self._run_head()

    def head_ended(self) -> str:
        """Return the last line of sailord's log if it has ended, else an empty text."""
        assert self._head is not None
        return "" if self._head.poll() is None else self._last_line("sailord")

    def last_line(self, name: str) -> str:
        """Return the last line of a log."""
        return self._last_line(name)

    # ---- agents and workers ---------------------------------------------------------------------

    def kill_agent(self, name: str) -> None:
        """Kill the agent alone with SIGKILL."""
        self.nodes[name].agent.kill()
        self.nodes[name].agent.wait()

    def start_agent(self, name: str) -> None:
        """Start the agent again, with the same node id."""
        node = self.nodes[name]
        node.agent = self._agent(name, node.kind)

    def ask_agent_to_end(self, name: str) -> None:
        """Send SIGTERM to the agent alone."""
        self.nodes[name].agent.terminate()

    def _agent(self, name: str, kind: str) -> subprocess.Popen[bytes]:
        config = str(self.place.node(name) / "agent.toml")
        words = ("run", "--config", config, "--emulate", f"1x{KINDS[kind]}")
        return self._run(name, "agents.main", *words)

    def workers(self, name: str) -> list[int]:
        """Return the process ids of the node's workers."""
        return children_of(self.nodes[name].fork_server)

    def kill_workers(self, name: str) -> None:
        """Kill all workers of the node with SIGKILL."""
        for pid in self.workers(name):
            kill(pid, self.place.folder)

    def family(self, name: str) -> list[int]:
        """Return the ids of all processes of the node."""
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

    def bring_back(self, gone: EmulatedNode) -> None:
        """Start an empty node with the same name."""
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
        """Mount the checkpoint folder read-only, or writable again."""
        flags = MS_REMOUNT | MS_BIND | (MS_RDONLY if is_read_only else 0)
        mount("none", self.durable, "", flags, "")

    @property
    def has_own_memory(self) -> bool:
        """Whether ``/dev/shm`` is a mount of the cluster's own."""
        return isinstance(self.place, ChaosPlace) and self.place.has_mounts

    def servers(self) -> list[int]:
        """Return the processes that may listen at any number of ports."""
        return [] if self.members is None else self.members.pids()

    def close(self) -> None:
        """Resume all suspended processes, then end the cluster."""
        self.go_on(list(self.stopped))
        super().close()
        self.proxies.close()


@contextlib.contextmanager
def full(folder: Path) -> Iterator[None]:
    """Fill a file system for the length of the block."""
    filler = folder / ".filler"
    room = os.statvfs(folder)
    free = room.f_bavail * room.f_frsize - SPARE_BYTES
    descriptor = os.open(filler, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        with contextlib.suppress(OSError):  # Another process may have taken the room meanwhile.
            os.posix_fallocate(descriptor, 0, max(free, 1))
        yield
    finally:
        os.close(descriptor)
        filler.unlink(missing_ok=True)


def mount(what: str, where: Path, kind: str, flags: int, options: str) -> None:
    """Call mount(2); only in a mount namespace of our own."""
    libc = ctypes.CDLL(None, use_errno=True)
    words = (what.encode(), bytes(where), kind.encode(), ctypes.c_ulong(flags), options.encode())
    if libc.mount(*words):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(where))


def unmount(where: Path) -> None:
    """Undo ``mount``; ignore a path that is not mounted."""
    ctypes.CDLL(None).umount2(bytes(where), 2)
