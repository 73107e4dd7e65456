"""Reads and checks the agent's configuration file, `agent.toml`."""

from __future__ import annotations

import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agents.core.model import Options
from agents.daemon.allowed_uris import MOUNTS, read_allowed
from agents.daemon.credentials import secret_path
from agents.protocol.names import NAME
from agents.rpc.tls_settings import TlsSettings, read_tls
from agents.store.locations import check_address
from simulator.documents.fields import InvalidValue, open_table, quote
from simulator.documents.files import load_document
from simulator.documents.problems import Problems

GPU_ABORT_S = 30.0
"""``abort_s`` on GPUs: an abort of NCCL and the seal of 20 GB take seconds."""
FOLDERS = ("catalogue", "memory", "data", "secrets", "worker_folder")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The agent's configuration."""

    cluster_name: str
    name: str
    state: Path
    store: str
    key: Path
    host: str
    port: int
    address: str | None
    """Where others reach this agent; ``None``: where it listens."""
    zone: str | None
    machine: str | None
    spot: bool
    notice_s: float
    """From the cloud's notice to the end of the instance."""
    shutdown_s: float
    """From the start of a system shutdown to the end of the instance."""
    drain_s: float
    """The longest drain after a stop of the service; workers that still train then go on alone."""
    lease_s: float
    alone_s: float | None
    """Seconds without a leader after which the agent ends its workers and exits, so that a rented
    machine can power off; ``None``: never."""
    orphan_s: float
    """Seconds without an agent after which workers exit."""
    worker_folder: Path | None
    """Where ``sailor-agent workers``, a service of another user, runs workers and setup commands.
    ``None``: they run as the agent's user, in ``state``."""
    worker: str
    """The worker's module; its ``main`` runs one worker."""
    emulate: str | None
    """Devices to emulate, such as ``2xA100-40``; ``None``: the driver is asked for real ones."""
    catalogue: Path | None
    """A file of GPUs and machine types that extends the built-in catalogue."""
    memory: Path | None
    """A folder in memory for snapshots. ``None``: below ``/dev/shm``, or in the state folder where
    devices are emulated."""
    data: Path | None
    """The folder that relative paths of a job refer to; ``None``: jobs give absolute paths."""
    secrets: Path | None
    """The folder with the values of secrets that jobs name, each a file."""
    mounts: tuple[str, ...]
    """Prefixes of URIs where jobs may have data."""
    copy_mb_s: float
    """The highest rate at which snapshots are copied to other nodes."""
    threads: int | None
    """CPU threads of each worker; ``None``: its share of the cores."""
    options: Options
    unread: tuple[str, ...] = ()
    """Where the file has keys that are no longer read."""
    tls: TlsSettings | None
    """``None``: plain HTTP."""

    def options_on(self, *, is_emulated: bool) -> Options:
        """Return the time limits; on GPUs ``abort_s`` is ``GPU_ABORT_S``."""
        return self.options if is_emulated else replace(self.options, abort_s=GPU_ABORT_S)

    @property
    def shared(self) -> Path:
        """The folder of everything that workers read and write, except snapshots."""
        return self.worker_folder or self.state


def load_config(path: Path, *, opens_store: bool = True) -> Config:
    """Read the file; ``InputError`` lists all mistakes in it.

    Without ``opens_store`` the secrets that the store's address names need not be readable.
    """
    problems = Problems()
    top = open_table(load_document(path, flaws_raise=False), problems)
    cluster_name = top.value("cluster_name", _name, required=True)
    name = top.value("name", _name)
    host_name = socket.gethostname().partition(".")[0].lower()
    if name is None and "name" not in top and not NAME.match(host_name):
        top.report("name", "is missing, and the host name is not a valid node name", "set name")
    state = top.text("state", required=True)
    store = top.text("store", required=True)
    key = top.text("key", required=True)
    notice_s = top.number("notice_s", default=30.0, above=0.0, most=3600.0)
    shutdown_s = top.number("shutdown_s", default=min(notice_s, 30.0), above=0.0, most=3600.0)
    folders = {name: top.text(name) for name in FOLDERS}
    rest: dict[str, Any] = {
        "zone": top.text("zone"),
        "machine": top.text("machine"),
        "spot": top.flag("spot", default=False),
        "drain_s": top.number("drain_s", default=150.0, above=0.0, most=1e6),
        "lease_s": top.number("lease_s", default=10.0, least=1.0, most=600.0),
        "alone_s": top.number("alone_s", above=0.0, most=1e7),
        "orphan_s": top.number("orphan_s", default=1800.0, above=0.0, most=1e6),
        "emulate": top.text("emulate"),
        "worker": top.text("worker", default="worker.control.worker_process"),
        "copy_mb_s": top.number("copy_mb_s", default=1000.0, above=0.0, most=1e6),
        "threads": top.integer("threads", least=1, most=4096),
    }
    listen = top.section("listen")
    rest["host"] = listen.text("host", default="127.0.0.1")
    rest["port"] = listen.integer("port", default=7078, least=0, most=65535)
    rest["address"] = listen.text("address")
    listen.finish()
    rest["mounts"] = read_allowed(top.section("mounts"), MOUNTS)
    rest["tls"] = read_tls(
        top, path.parent, None if state is None else path.parent / state, may_sign=False,
        store=store,
        named={"listen.host": rest["host"], "listen.address": rest["address"]},
    )  # fmt: skip
    options = top.section("options")
    rest["unread"] = tuple(options.no_longer_read(Options.__annotations__))
    testing = options.section("testing")
    park_s = testing.number("park_s", default=Options().park_s, above=0.0, most=1e6)
    for table in (testing, options, top):
        table.finish()
    if store is not None and opens_store:
        later = None if rest["tls"] is None else rest["tls"].made_in
        check_address(store, problems, top.place_of("store"), made_later=later)
    if store is not None and store.startswith("embedded:"):
        # Only one process can open it: an agent that did would keep sailord from starting.
        what = "is a store that sailord alone opens"
        top.report("store", what, "give its socket: unix:///FOLDER/store.sock")
    problems.raise_if_any()
    assert cluster_name is not None
    assert state is not None
    assert store is not None
    assert key is not None
    catalogue, memory, data, secrets, worker_folder = (
        None if each is None else path.parent / each for each in folders.values()
    )
    return Config(
        cluster_name=cluster_name,
        name=name or host_name,
        state=(path.parent / state).resolve(),
        store=store,
        key=secret_path(key, path.parent),
        notice_s=notice_s,
        shutdown_s=shutdown_s,
        catalogue=catalogue,
        memory=memory and memory.resolve(),
        data=data and data.resolve(),
        secrets=secrets and secrets.resolve(),
        worker_folder=worker_folder and worker_folder.resolve(),
        options=Options(park_s=park_s),
        **rest,
    )


def _name(value: object) -> str:
    if not isinstance(value, str) or not NAME.match(value):
        raise InvalidValue(f"is {quote(value)}", "use lower-case letters, digits and hyphens")
    return value
