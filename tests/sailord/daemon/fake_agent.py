"""An agent that trains nothing: it registers, joins generations, counts steps, and reports.

``python -m tests.sailord.daemon.fake_agent STORE KEY_FILE NAME COUNT_FILE`` runs one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp
from aiohttp import web

from agents.protocol.codec import WireError, decode, encode
from agents.protocol.records import (
    Abort,
    Fence,
    GenerationRecord,
    Holding,
    Leader,
    NodeId,
    NodeRecord,
    Output,
    OutputPart,
    Point,
    Report,
    Sealed,
)
from agents.protocol.store_keys import Keys
from agents.rpc.signing import (
    REPLY_HEADER,
    REQUEST_HEADER,
    ClusterKey,
    Verifier,
    check_reply,
    sign_reply,
    sign_request,
)
from agents.store.factory import open_store
from agents.store.interface import Put, Store, StoreError

STEP_S = 0.02
LOOK_S = 0.1
AWAY = StoreError, WireError, aiohttp.ClientError, OSError, TimeoutError
WHOLE = (Holding(0, 0, 64),)


@dataclass(eq=False)
class FakeAgent:
    """One node of two emulated GPUs."""

    store: Store
    keys: Keys
    key: ClusterKey
    name: str
    count_file: Path
    lease_s: float = 3.0
    record: NodeRecord = field(init=False)
    generation: GenerationRecord | None = None
    taking: str = "idle"
    step: int = 0
    sealed: tuple[Sealed, ...] = ()
    number: int = 0
    heard: Fence = field(default_factory=lambda: Fence(0, 0))

    async def run(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._serve)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        self.record = NodeRecord(
            NodeId(f"{self.name}.{os.getpid()}"), self.name, "us-central1-b", "A100-40x2",
            "A100-40", 2, f"127.0.0.1:{port}", "ready",
        )  # fmt: skip
        try:
            async with asyncio.TaskGroup() as group:
                for work in (self._register(), self._look(), self._train(), self._tell()):
                    group.create_task(work)
        finally:
            await runner.cleanup()

    async def _register(self) -> None:
        lease = 0
        while True:
            with contextlib.suppress(StoreError):
                if not lease or not await self.store.keep(lease):
                    lease = (await self.store.grant(self.lease_s)).id
                    node = self.keys.nodes + self.record.id
                    await self.store.transact([], [Put(node, encode(self.record), lease)])
            await asyncio.sleep(self.lease_s / 4)

    async def _look(self) -> None:
        while True:
            with contextlib.suppress(StoreError, WireError):
                for entry in (await self.store.snapshot(self.keys.jobs)).entries:
                    if entry.key.endswith("/gen"):
                        self._see(decode(GenerationRecord, entry.value))
            await asyncio.sleep(LOOK_S)

    def _see(self, record: GenerationRecord) -> None:
        before = self.generation
        if before is not None and record.job == before.job and record.number < before.number:
            raise AssertionError("a generation went back")
        name = record.job, record.number
        if record.state == "closed" and before and name == (before.job, before.number):
            self.generation, self.taking = None, "idle"
        elif record.state == "closed" or self.record.id not in record.members:
            return
        elif before is None or before.number != record.number or before.job != record.job:
            self.generation, self.taking, self.step = record, "running", record.restore.point.step
        else:
            self.generation = record

    async def _train(self) -> None:
        count = 0
        while True:
            await asyncio.sleep(STEP_S)
            record = self.generation
            if record is None or self.taking != "running":
                continue
            self.step, count = self.step + 1, count + 1
            early = self.count_file.with_suffix(".new")
            early.write_text(f"{record.number} {self.step} {count} {os.getpid()}")
            early.rename(self.count_file)
            point = Point(self.step, record.number)
            holds = tuple(replace(WHOLE[0], layer=layer) for layer in range(64))
            self.sealed = (Sealed(point, holds),)
            if record.state == "stopping":
                self.taking = "stopped"

    def _report(self) -> Report:
        self.number += 1
        number = 0 if self.generation is None else self.generation.number
        return Report(
            self.record.id, int(time.time() * 1e6) + self.number, self.heard, number,
            self.taking, self.step, self.sealed,
        )  # type: ignore[arg-type] # a text that is one of the words  # fmt: skip

    async def _tell(self) -> None:
        async with aiohttp.ClientSession() as session:
            while True:
                with contextlib.suppress(*AWAY):
                    entry = await self.store.get(self.keys.leader)
                    if entry is not None:
                        await self._post(session, decode(Leader, entry.value).address)
                await asyncio.sleep(LOOK_S)

    async def _post(self, session: aiohttp.ClientSession, address: str) -> None:
        path, body = "/v1/agents/report", encode(self._report())
        header, nonce = sign_request(self.key, address, "POST", path, body, at=time.time())
        async with session.post(
            f"http://{address}{path}", data=body, headers={REQUEST_HEADER: header},
            timeout=aiohttp.ClientTimeout(total=1.0),
        ) as reply:  # fmt: skip
            text = await reply.read()
            if reply.status in (200, 409):
                check_reply(self.key, nonce, reply.status, text, reply.headers.get(REPLY_HEADER))

    async def _serve(self, request: web.Request) -> web.Response:
        body = await request.read()
        nonce = Verifier(self.key, lambda: self.record.address).check_request(
            request.method, request.raw_path, body, request.headers[REQUEST_HEADER], at=time.time()
        )
        text = b"{}"
        if request.path == "/v1/report":
            text = encode(self._report())
        elif request.path == "/v1/abort":
            self.heard = max(self.heard, decode(Abort, body).fence)
        elif request.path.startswith("/v1/logs"):
            parts = () if request.query else (OutputPart(0, "step by step\n"),)
            text = encode(Output((0,), parts, "0:process:13"))
        return web.Response(
            body=text, headers={REPLY_HEADER: sign_reply(self.key, nonce, 200, text)}
        )


async def main(store: str, key: str, name: str, count_file: str) -> None:
    agent = FakeAgent(
        await open_store(store),
        Keys("test"),
        ClusterKey.read(Path(key), "test"),
        name,
        Path(count_file),
    )
    await agent.run()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
