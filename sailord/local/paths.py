"""The folders and configuration files of a local cluster."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import tempfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path

from sailord.client import LOCAL_SOCKET
from sailord.local.control_client import CONTROL_SOCKET
from sailord.local.zone_file import Zones
from simulator.documents.problems import InputError, Problem

DATA = Path(__file__).resolve().parent / "data"
MEMORY = Path("/dev/shm")
LOOPBACK = "127.0.0.1"
SOCKET_PATH_MAX = 107
"""Longest path of a Unix socket."""
TEMPORARY = "tmp"
LONGEST = f"{TEMPORARY}/pymp-12345678/listener-12345678"
"""The longest path of a socket in the folder, made by Python's process pools."""
LEASE_S = 4.0
MARKER = "made-by-sailorctl-up"
PROFILES = 'profiles = "profiles"\n'
BUILT_IN_ZONES = '["zone-a", "zone-b", "zone-c"]'


def temporary(folder: Path) -> dict[str, str]:
    """Return the environment that puts temporary files into the folder, to be deleted with it.

    Python's process pools and torch leave some behind when a process is killed.
    """
    return {"TMPDIR": str(folder / TEMPORARY)}


def free_port() -> int:
    """Return a port that is free at this moment."""
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        port: int = listener.getsockname()[1]
        return port


@dataclass(frozen=True, slots=True)
class LocalFolders:
    """One local cluster's folders."""

    folder: Path
    worker: str = "worker.control.worker_process"
    """The module that workers run."""
    port: int = field(default_factory=free_port)
    memory_gib: float = 1.408
    """Memory of an emulated GPU; it decides how many stages a pipeline needs."""
    tls: bool = False
    """All speak TLS, with certificates of the cluster's own authority in the folder ``ca``."""

    @property
    def socket(self) -> Path:
        """The socket of sailord's API."""
        return self.folder / LOCAL_SOCKET

    @property
    def page(self) -> str:
        """The address of the page in the browser, which signs in; only this user can read it."""
        token = (self.folder / "token").read_text(encoding="ascii")
        return f"{'https' if self.tls else 'http'}://{LOOPBACK}:{self.port}/#token={token}"

    @property
    def control(self) -> Path:
        """The control socket of the launcher."""
        return self.folder / CONTROL_SOCKET

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints of `sailorctl up`."""
        return self.folder / "checkpoints"

    @property
    def memory(self) -> Path:
        """The folder of all nodes' snapshots, in memory."""
        name = f"sailor-local-{os.getuid()}-{zlib.crc32(bytes(self.folder)):08x}"
        return (MEMORY if MEMORY.is_dir() else self.folder) / name

    def node(self, name: str) -> Path:
        """Return the folder of one node's agent."""
        return self.folder / name

    def make(self) -> None:
        """Create both folders and the files that do not depend on nodes."""
        if odd := set('#?%"\\\n').intersection(str(self.folder)):
            what = f"has {' '.join(sorted(odd))!r}, which the addresses of its sockets cannot hold"
            raise InputError(Problem(str(self.folder), what, "name another with --folder"))
        if len(bytes(self.folder / LONGEST)) > SOCKET_PATH_MAX:
            what = "is too long for the paths of the sockets in it"
            raise InputError(Problem(str(self.folder), what, "set TMPDIR to a shorter one"))
        try:
            self.folder.mkdir(mode=0o700, parents=True)
            (self.folder / MARKER).touch()
            (self.folder / TEMPORARY).mkdir()
            self.memory.mkdir(mode=0o700)
        except OSError as error:
            what = f"cannot be created: {error.strerror}"
            raise InputError(Problem(str(error.filename), what)) from None
        (self.folder / "key").touch(mode=0o600)
        (self.folder / "key").write_text(secrets.token_hex(32), encoding="ascii")
        (self.folder / "token").touch(mode=0o600)
        (self.folder / "token").write_text(secrets.token_hex(16), encoding="ascii")
        shutil.copyfile(DATA / "cluster.toml", self.folder / "cluster.toml")
        (self.folder / "catalogue.toml").write_text(self.catalogue(), encoding="utf-8")
        if self.tls:
            from sailord.authority import Authority  # noqa: PLC0415 - slow to import

            Authority.create(self.folder / "ca", "local")
        self._write_text()
        self.write_head(LOOPBACK)

    def catalogue(self) -> str:
        """The text of the catalogue of the emulated kinds of GPU, with as much memory as chosen."""
        text = (DATA / "catalogue.toml").read_text(encoding="utf-8")
        return text.replace("= 1.408", f"= {self.memory_gib}")

    def write_head(self, host: str) -> None:
        """Write sailord's configuration; it uses the folder ``profiles`` if there is one."""
        has_profiles = (self.folder / "profiles").is_dir()
        (self.folder / "sailord.toml").write_text(
            f'cluster_name = "local"\nstate = "head"\nkey = "key"\ncluster = "cluster.toml"\n'
            f"{PROFILES if has_profiles else ''}"
            f'log = "json"\n[checkpoints]\nallowed = ["*"]\n[mounts]\nallowed = ["*"]\n'
            f'[listen]\nhost = "{host}"\nport = {self.port}\n'
            'token_file = "token"\n'
            # Nodes that share cores differ in speed at random.
            f"[options]\nlease_s = {LEASE_S}\nadditions_gather_s = 2.0\nslow_times = 3.0\n"
            "[options.testing]\ngrace_s = 0.5\nstart_gather_s = 0.5\n"
            "failure_pause_s = 0.2\nbroken_s = 0.3\nprobe_s = 0.1\n"
            f"{self._tls(authority='ca')}",
            encoding="utf-8",
        )

    def _tls(self, **keys: str) -> str:
        """Return the section of a configuration that switches TLS on."""
        lines = (f"{key} = {json.dumps(value)}\n" for key, value in keys.items())
        return "[tls]\n" + "".join(lines) if self.tls else ""

    def write_zones(self, zones: Zones) -> None:
        """Write the pools and the catalogue of a shaped cluster."""
        pools = (
            f'[[pool]]\nzone = "{zone.name}"\nmachine = "emulated-{zone.kind}"\n'
            f"machines = {zone.nodes}\nspot = {'true' if zone.kind == 'small' else 'false'}\n"
            for zone in zones.zones.values()
        )
        text = 'catalogue = "catalogue.toml"\n' + "".join(pools)
        (self.folder / "cluster.toml").write_text(text, encoding="utf-8")
        file = self.folder / "catalogue.toml"
        found = file.read_text(encoding="utf-8")
        named = json.dumps(list(zones.zones))
        file.write_text(found.replace(BUILT_IN_ZONES, named), encoding="utf-8")

    @property
    def slow(self) -> Path:
        """The file that says how many times slower than this computer the nodes are."""
        return self.folder / "slow"

    def slow_down(self, node: str, times: float) -> None:
        """Slow a node's workers down by a factor."""
        with self.slow.open("a", encoding="utf-8") as file:
            file.write(f"{node} {times}\n")

    def _write_text(self) -> None:
        import numpy as np  # noqa: PLC0415 - the command line imports this module for a path

        text = np.frombuffer((DATA / "text.txt").read_bytes(), dtype=np.uint8)
        np.save(self.folder / "text.npy", text.astype(np.uint16))

    def job(self, name: str, *, persist_every: int | None = None) -> str:
        """Return an example job, with the absolute path of its data and checkpoints every
        ``persist_every`` steps."""
        text = (DATA / name).read_text(encoding="utf-8")
        text = text.replace('"text.npy"', json.dumps(str(self.folder / "text.npy")))
        if persist_every is None:
            return text
        where = json.dumps(f"file://{self.checkpoints}")
        return f"{text}\n[checkpoint]\nuri = {where}\npersist_every = {persist_every}\n"

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
        """Write the configuration of a node's agent."""
        folder, memory = self.node(name), self.memory / name
        folder.mkdir(mode=0o700)
        memory.mkdir(mode=0o700)
        config = folder / "agent.toml"
        config.write_text(
            f'cluster_name = "local"\nname = "{name}"\nstate = "."\nkey = "../key"\n'
            f'store = "unix://{self.folder}/head/store.sock"\ncatalogue = "../catalogue.toml"\n'
            f'zone = "{zone}"\nmachine = "{gpu}"\nspot = {"true" if spot else "false"}\n'
            f'worker = "{self.worker}"\nmemory = "{memory}"\nthreads = 1\n'
            f'lease_s = {LEASE_S}\norphan_s = 10.0\n[mounts]\nallowed = ["*"]\n'
            f'[listen]\nhost = "{host}"\nport = 0\n'
            f"{self._tls(ca='../ca/ca.pem', enrol=f'{head}:{self.port}')}",
            encoding="utf-8",
        )
        return config

    def forget_memory(self, name: str) -> None:
        """Delete the snapshots of a killed node; its logs stay."""
        shutil.rmtree(self.memory / name, ignore_errors=True)

    def keep_logs(self) -> Path | None:
        """Copy the logs to a new folder beside this one, and return it; ``None``: there are none,
        or they cannot be copied."""
        logs = sorted(self.folder.glob("*.log"))
        if not logs:
            return None
        try:
            near = self.folder.parent
            kept = Path(tempfile.mkdtemp(prefix=f"{self.folder.name}.logs-", dir=near))
            for log in logs:
                shutil.copy(log, kept)
        except OSError:
            return None
        return kept

    def remove(self) -> None:
        """Delete both folders, if they belong to a local cluster."""
        if self.is_ours:
            shutil.rmtree(self.memory, ignore_errors=True)
            shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def is_ours(self) -> bool:
        """Whether a launcher created the folder."""
        return (self.folder / MARKER).is_file()
