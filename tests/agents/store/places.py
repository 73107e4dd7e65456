"""The stores under test; most can be killed and restarted."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import grpc
import grpc.aio
import pytest

from agents.store.etcd_connection import STATUS, STATUS_REQUEST
from agents.store.etcd_messages import message, method
from agents.store.factory import open_store
from agents.store.interface import Snapshot, Store, StoreUnavailable
from agents.store.sqlite_store import EmbeddedStore

ROOT = Path(__file__).resolve().parents[3]
ETCD = shutil.which("etcd")
NEEDS_ETCD = pytest.mark.skipif(ETCD is None, reason="no `etcd` here; apt-get install etcd-server")
COMPACT = method("KV", "Compact")
PATIENCE_S = 60.0
"""How long a test waits for an answer."""
TIMEOUT_S = 5.0
"""The timeout of each call, which tests of outages wait for."""
HISTORY_MAX = 50
"""Small, so that embedded stores compact soon."""


class Place(Protocol):
    """A store under test."""

    async def open(self) -> Store:
        """Open another client."""
        ...

    async def compact(self, store: Store) -> None:
        """Compact all changes so far."""
        ...

    def close(self) -> None:
        """Stop the store and delete its files."""
        ...


class Server(Place, Protocol):
    """A store in processes of its own, which can be killed."""

    def start(self) -> None: ...

    def kill(self) -> None: ...


class Embedded:
    """An embedded store in this process, shared by all clients."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "store.db"
        self._store: EmbeddedStore | None = None

    async def open(self) -> Store:
        if self._store is None:
            self._store = await EmbeddedStore.open(self.file, history_max=HISTORY_MAX)
        return self._store

    async def compact(self, store: Store) -> None:
        await write_much(store)

    def close(self) -> None:
        pass


class Socket:
    """An embedded store in another process, behind its socket."""

    def __init__(self) -> None:
        # The path of a socket must be short; pytest's folders may be too long.
        self._folder = tempfile.TemporaryDirectory(prefix="sailor-")
        self.folder = Path(self._folder.name)
        self.socket = self.folder / "store.sock"
        self.start()

    async def open(self) -> Store:
        return await open_store(f"unix://{self.socket}?timeout_s={TIMEOUT_S}")

    async def compact(self, store: Store) -> None:
        await write_much(store)

    def start(self) -> None:
        script = ROOT / "tests" / "agents" / "store" / "serving.py"
        command = [sys.executable, str(script), str(self.folder / "store.db"), str(self.socket)]
        command.append(str(HISTORY_MAX))
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(command, env=environment)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        self._folder.cleanup()


class Cluster:
    """One etcd member or several, on free ports of this machine."""

    def __init__(
        self, size: int = 1, *, arguments: Sequence[str] = (), scheme: str = "http"
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="sailor-")
        self.folder = Path(self._folder.name)
        ports = _free_ports(2 * size)
        self.endpoints = [f"127.0.0.1:{port}" for port in ports[:size]]
        self._peers = [f"http://127.0.0.1:{port}" for port in ports[size:]]
        self._arguments, self._scheme = arguments, scheme
        self.credentials: grpc.ChannelCredentials | None = None
        """Of a client, where the members ask for certificates."""
        self.processes: list[subprocess.Popen[bytes] | None] = [None] * size
        self.start()

    @property
    def url(self) -> str:
        return f"etcd://{','.join(self.endpoints)}?timeout_s={TIMEOUT_S}"

    async def open(self) -> Store:
        return await open_store(self.url)

    def channel(self) -> grpc.aio.Channel:
        """A connection to the first member."""
        if self.credentials is None:
            return grpc.aio.insecure_channel(self.endpoints[0])
        return grpc.aio.secure_channel(self.endpoints[0], self.credentials)

    async def compact(self, store: Store) -> None:
        revision = (await store.snapshot("/none")).revision
        async with grpc.aio.insecure_channel(self.endpoints[0]) as channel:
            ask = channel.unary_unary(COMPACT.path, COMPACT.serialize, COMPACT.read)
            await ask(message("CompactionRequest")(revision=revision, physical=True))

    async def leader(self) -> int:
        """Return the index of the leading member."""
        while True:
            for i, endpoint in enumerate(self.endpoints):
                async with grpc.aio.insecure_channel(endpoint) as channel:
                    ask = channel.unary_unary(STATUS.path, STATUS.serialize, STATUS.read)
                    status = await ask(STATUS_REQUEST(), timeout=5)
                if status.leader == status.header.member_id:
                    return i
            await asyncio.sleep(0.1)

    def start(self, members: Sequence[int] | None = None) -> None:
        for i in range(len(self.endpoints)) if members is None else members:
            self.processes[i] = subprocess.Popen(
                [ETCD or "etcd", *self._options(i), *self._arguments],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )

    def _options(self, i: int) -> list[str]:
        cluster = ",".join(f"m{j}={peer}" for j, peer in enumerate(self._peers))
        return [
            *("--name", f"m{i}", "--data-dir", str(self.folder / f"m{i}")),
            *("--listen-client-urls", f"{self._scheme}://{self.endpoints[i]}"),
            *("--advertise-client-urls", f"{self._scheme}://{self.endpoints[i]}"),
            *("--listen-peer-urls", self._peers[i]),
            *("--initial-advertise-peer-urls", self._peers[i]),
            *("--initial-cluster", cluster),
            # These allow leases of one second.
            *("--heartbeat-interval", "60", "--election-timeout", "600"),
        ]

    def pause(self, i: int) -> None:
        """Stop a member and wait until all its threads stand still."""
        process = self.processes[i]
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        # On a busy machine its threads run on for milliseconds, enough to commit a write.
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)

    def resume(self, i: int) -> None:
        """Let a paused member go on."""
        process = self.processes[i]
        assert process is not None
        process.send_signal(signal.SIGCONT)

    def restore(self, snapshot: str) -> None:
        """Make all members anew from a snapshot, while none runs."""
        cluster = ",".join(f"m{j}={peer}" for j, peer in enumerate(self._peers))
        for i, peer in enumerate(self._peers):
            folder = self.folder / f"m{i}"
            shutil.rmtree(folder)
            subprocess.run(
                ["etcdctl", "snapshot", "restore", snapshot, "--name", f"m{i}",
                 "--initial-cluster", cluster, "--initial-advertise-peer-urls", peer,
                 "--data-dir", str(folder)],
                env={**os.environ, "ETCDCTL_API": "3"}, check=True, capture_output=True,
            )  # fmt: skip

    def kill(self, members: Sequence[int] | None = None) -> None:
        for i in range(len(self.endpoints)) if members is None else members:
            process = self.processes[i]
            if process is not None:
                process.kill()
                process.wait()

    def close(self) -> None:
        self.kill()
        self._folder.cleanup()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


async def write_much(store: Store) -> None:
    """Write more changes than an embedded store of these tests keeps."""
    for _ in range(HISTORY_MAX + 1):
        await store.put("/elsewhere", b"")


async def wait_answer(store: Store) -> Snapshot:
    """Return when the store answers."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                return await store.snapshot("/sailor/")
            except StoreUnavailable:
                await asyncio.sleep(0.05)
