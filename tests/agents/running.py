"""Real agents in processes of their own, and the store into which a test writes generations."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from agents.protocol.codec import decode, encode
from agents.protocol.records import (
    FIRST,
    GenerationRecord,
    JobId,
    NodeId,
    NodeRecord,
    Report,
    Taking,
)
from agents.protocol.store_keys import Keys
from agents.rpc.signing import REPLY_HEADER, REQUEST_HEADER, ClusterKey, check_reply, sign_request
from agents.store.factory import open_store
from agents.store.interface import Put
from agents.store.socket_server import serve
from agents.store.sqlite_store import EmbeddedStore
from agents.workers.pidfd import process_start
from simulator.inputs.plan_file import plan_text
from simulator.spec import plan as plans
from simulator.spec.plan import Pipeline, Plan, Stage
from tests.fakes.worker import MEETING
from tests.processes import until

ROOT = Path(__file__).resolve().parents[2]
KEY = ClusterKey("test", (b"a-key-that-is-long-enough",))
OTHER_KEY = ClusterKey("test", (b"another-key-as-long",))
PREFIX = "/sailor/v1/test/"
JOB = JobId("job")
JOB_FILE = """
[model]
family = "gpt2"
layers = 2
hidden = 64
heads = 4
vocab = 256
sequence = 32

[training]
global_batch = 4
sequence = 32
precision = "fp32"
max_tp = 2
"""


@dataclass(eq=False)
class Place:
    """A cluster, with one node ``a`` unless others are started."""

    folder: Path
    store: EmbeddedStore
    http: aiohttp.ClientSession
    environment: dict[str, str] = field(default_factory=dict)
    worker: str = "tests.fakes.worker"
    more: str = ""
    """Further keys of each agent's file."""
    lease_s: float = 2.0
    agents: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(
        self, name: str = "a", *, zone: str = "us-central1-b", memory_mib: int | None = None
    ) -> subprocess.Popen[bytes]:
        """Start an agent; with ``memory_mib`` its snapshots are on a file system of that size."""
        config = self.folder / ("agent.toml" if name == "a" else f"agent-{name}.toml")
        config.write_text(
            f'cluster_name = "test"\nname = "{name}"\nstate = "{self.state(name).name}"\n'
            f'key = "key"\nlease_s = {self.lease_s}\nmemory = "memory-{name}"\n'
            f'worker = "{self.worker}"\nthreads = 1\nstore = "unix://{self.folder}/store.sock"\n'
            f'zone = "{zone}"\n{self.more}[listen]\nport = 0\n',
            encoding="utf-8",
        )
        with (self.folder / "agent.log").open("ab") as log:
            agent = subprocess.Popen(
                [
                    *([] if memory_mib is None else within_tmpfs(self.memory(name), memory_mib)),
                    *(sys.executable, "-m", "agents.main", "run", "--emulate", "2xA100-40"),
                    *("--config", str(config)),
                ],
                cwd=ROOT,
                stdout=log,
                stderr=log,
                env={**os.environ, "GCE_METADATA_HOST": "127.0.0.1:9", **self.environment},
            )
        self.agents.append(agent)
        return agent

    async def nodes(self) -> list[NodeRecord]:
        found = await self.store.snapshot(f"{PREFIX}node/")
        return [decode(NodeRecord, entry.value) for entry in found.entries]

    def state(self, name: str = "a") -> Path:
        """Return the state folder of an agent."""
        return self.folder / ("state" if name == "a" else f"state-{name}")

    def memory(self, name: str = "a") -> Path:
        """Return the folder of its snapshots."""
        return self.folder / f"memory-{name}"

    async def ready(self, name: str = "a") -> NodeRecord:
        async def find() -> NodeRecord | None:
            nodes = [node for node in await self.nodes() if node.name == name]
            return next((node for node in nodes if node.state == "ready"), None)

        node: NodeRecord = await until(find)
        return node

    async def open(
        self,
        node: NodeRecord,
        number: int,
        *,
        ranks: int = 2,
        plan: Plan | None = None,
        **changes: Any,
    ) -> GenerationRecord:
        """Store a generation; without a plan, on two devices of one node."""
        text = plan_text(plan or plan_on(*[node.id] * ranks)).encode()
        record = GenerationRecord(
            **{
                "job": JOB, "number": number, "state": "open",
                "plan": hashlib.sha256(text).hexdigest(),
                "members": (node.id,), "restore": FIRST, "term": 1, "reason": "a test",
                **changes,
            }
        )  # fmt: skip
        job = f"{PREFIX}job/{record.job}"
        puts = [
            Put(Keys("test").plan(record.job, record.plan), text),
            Put(f"{job}/spec", JOB_FILE.encode()),
            Put(f"{job}/gen", encode(record)),
        ]
        await self.store.transact([], puts)
        return record

    async def train(self, **generation: Any) -> tuple[subprocess.Popen[bytes], NodeRecord]:
        """Start agent ``a``, open generation 1 on it, and return when a step is done."""
        agent = self.start()
        node = await self.ready()
        await self.open(node, 1, **generation)
        await until(lambda: self.step(1) > 0)
        return agent, node

    def workers(self, number: int, name: str = "a") -> dict[int, int]:
        """Return the pid of each living rank of a generation."""
        return processes(self.state(name), number)

    def step(self, number: int, *, rank: int = 0, name: str = "a") -> int:
        """Return the last step of a rank; -1: none."""
        path = self.state(name) / "generation" / str(number) / str(rank) / "step"
        return int(path.read_text(encoding="ascii")) if path.exists() else -1

    async def ask(
        self, method: str, path: str, body: bytes = b"", *, key: ClusterKey = KEY, name: str = "a"
    ) -> tuple[int, bytes]:
        node = {node.name: node for node in await self.nodes()}[name]
        header, nonce = sign_request(key, node.address, method, path, body, at=time.time())
        async with self.http.request(
            method, f"http://{node.address}{path}", data=body, headers={REQUEST_HEADER: header}
        ) as reply:
            text = await reply.read()
            if reply.status != 401:
                check_reply(KEY, nonce, reply.status, text, reply.headers.get(REPLY_HEADER))
            return reply.status, text

    async def report(self, name: str = "a") -> Report | None:
        with contextlib.suppress(aiohttp.ClientError, KeyError):
            status, text = await self.ask("GET", "/v1/report", name=name)
            return decode(Report, text) if status == 200 else None
        return None

    async def is_taking(self, taking: Taking, name: str = "a") -> Report | None:
        """Return the report if ``taking`` is this."""
        report = await self.report(name)
        return report if report is not None and report.taking == taking else None


def within_tmpfs(folder: Path, size_mib: int) -> list[str]:
    """Return the start of a command that mounts a small file system in memory for itself."""
    folder.mkdir(exist_ok=True)
    mount = f'mount -t tmpfs -o size={size_mib}m none "$0" && exec "$@"'
    return ["unshare", "-m", "sh", "-c", mount, str(folder)]


def plan_on(*nodes: NodeId) -> Plan:
    """Return a plan with one replica of the model per entry; nodes may repeat."""
    devices: Counter[str] = Counter()
    pipelines = []
    for node in nodes:
        place = plans.Place("A100-40", "box", "us-central1-b", node, (devices[node],))
        devices[node] += 1
        pipelines.append(Pipeline(4 // len(nodes), (Stage((0, 4), 1, (place,)),)))
    return Plan(1, tuple(pipelines))


def processes(state: Path, number: int) -> dict[int, int]:
    """Return the pid of each living rank below an agent's state folder."""
    found = {}
    for home in state.glob("process/*"):
        born = json.loads((home / "process.json").read_text(encoding="utf-8"))
        current = home / "seat.json"
        said = json.loads(current.read_text(encoding="utf-8")) if current.exists() else born
        if said["generation"] == number and process_start(born["pid"]) == born["start"]:
            found[said["rank"]] = born["pid"]
    return found


@contextlib.asynccontextmanager
async def place(folder: Path) -> AsyncIterator[Place]:
    """Yield a cluster, and kill all that it started."""
    (folder / "key").write_bytes(KEY.keys[0])
    (folder / "key").chmod(0o600)
    store = await open_store(f"embedded://{folder}/store.db")
    assert isinstance(store, EmbeddedStore)
    server = await serve(store, folder / "store.sock")
    async with aiohttp.ClientSession() as http:
        here = Place(folder, store, http, {MEETING: str(folder / "meeting")})
        try:
            yield here
        finally:
            for agent in here.agents:
                agent.kill()
                agent.wait()
            for path in folder.glob("state*/process/*/process.json"):
                said = json.loads(path.read_text(encoding="utf-8"))
                if process_start(said["pid"]) == said["start"]:
                    os.kill(said["pid"], signal.SIGKILL)
            kill_fork_servers(folder)
            await server.close()
            await store.close()


def kill_fork_servers(folder: Path) -> None:
    """Kill the fork servers below a folder, also while they start."""
    for pid in fork_servers(folder):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def fork_servers(folder: Path) -> set[int]:
    """Return the fork servers below a folder, and the workers that they forked."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if b"agents.workers.fork_server" in words and any(
                w.startswith(bytes(folder)) for w in words
            ):
                found.add(int(path.parent.name))
    return found
