"""Real agents as processes of their own, and the store that a test writes generations into."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from agents.processes import process_start
from agents.protocol import FIRST, GenerationRecord, JobId, NodeRecord, Report
from agents.signing import REPLY_HEADER, REQUEST_HEADER, check_reply, sign_request
from agents.store import EmbeddedStore, Put, open_store, serve
from agents.wire import decode, encode

ROOT = Path(__file__).resolve().parents[2]
KEY = b"a-key-that-is-long-enough"
PREFIX = "/sailor/v1/test/"
JOB = JobId("job")


@dataclass(eq=False)
class Place:
    """One cluster of one node."""

    folder: Path
    store: EmbeddedStore
    http: aiohttp.ClientSession
    environment: dict[str, str] = field(default_factory=dict)
    agents: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self) -> subprocess.Popen[bytes]:
        with (self.folder / "agent.log").open("ab") as log:
            agent = subprocess.Popen(
                [
                    *(sys.executable, "-m", "agents.service", "run", "--emulate", "2xA100-40"),
                    *("--config", str(self.folder / "agent.toml")),
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

    async def ready(self) -> NodeRecord:
        async def find() -> NodeRecord | None:
            return next((node for node in await self.nodes() if node.state == "ready"), None)

        node: NodeRecord = await until(find)
        return node

    async def open(self, node: NodeRecord, number: int, **changes: Any) -> None:
        record = GenerationRecord(
            **{
                "job": JOB, "number": number, "state": "open", "plan": "abc",
                "members": (node.id,), "restore": FIRST, "term": 1, "reason": "a test",
                **changes,
            }
        )  # fmt: skip
        await self.store.transact([], [Put(f"{PREFIX}job/{record.job}/gen", encode(record))])

    def workers(self, number: int) -> dict[int, int]:
        """Each rank's process, of those that live."""
        found = {}
        for path in (self.folder / "state" / "generation" / str(number)).glob("*/process.json"):
            said = json.loads(path.read_text(encoding="utf-8"))
            if process_start(said["pid"]) == said["start"]:
                found[said["rank"]] = said["pid"]
        return found

    def step(self, number: int) -> int:
        path = self.folder / "state" / "generation" / str(number) / "0" / "step"
        return int(path.read_text(encoding="ascii")) if path.exists() else -1

    async def ask(self, method: str, path: str, body: bytes = b"", *, key: bytes = KEY) -> tuple:
        node = await self.ready()
        header, nonce = sign_request(key, method, path, body, at=time.time())
        async with self.http.request(
            method, f"http://{node.address}{path}", data=body, headers={REQUEST_HEADER: header}
        ) as reply:
            text = await reply.read()
            if reply.status != 401:
                check_reply(KEY, nonce, reply.status, text, reply.headers.get(REPLY_HEADER))
            return reply.status, text

    async def report(self) -> Report | None:
        with contextlib.suppress(aiohttp.ClientError):
            status, text = await self.ask("GET", "/v1/report")
            return decode(Report, text) if status == 200 else None
        return None


async def until(holds: Callable[[], Any], *, within_s: float = 20.0) -> Any:
    """The first true answer."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        value = holds()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return value
        await asyncio.sleep(0.02)
    raise TimeoutError("it never held")


@contextlib.asynccontextmanager
async def place(folder: Path) -> AsyncIterator[Place]:
    """One cluster; whatever it started is over at its end."""
    (folder / "key").write_bytes(KEY)
    (folder / "agent.toml").write_text(
        f'cluster_name = "test"\nname = "a"\nstate = "state"\nkey = "key"\nlease_s = 2.0\n'
        f'store = "unix://{folder}/store.sock"\nzone = "us-central1-b"\n[listen]\nport = 0\n',
        encoding="utf-8",
    )
    store = await open_store(f"embedded://{folder}/store.db")
    assert isinstance(store, EmbeddedStore)
    server = await serve(store, folder / "store.sock")
    async with aiohttp.ClientSession() as http:
        here = Place(folder, store, http)
        try:
            yield here
        finally:
            for agent in here.agents:
                agent.kill()
                agent.wait()
            for path in folder.glob("state/generation/*/*/process.json"):
                said = json.loads(path.read_text(encoding="utf-8"))
                if process_start(said["pid"]) == said["start"]:
                    os.kill(said["pid"], signal.SIGKILL)
            await end_nursery(folder / "state" / "nursery.sock")
            await server.close()
            await store.close()


async def end_nursery(path: Path) -> None:
    with contextlib.suppress(OSError):
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b'{"ask": "end"}\n')
        await reader.readline()
        writer.close()
