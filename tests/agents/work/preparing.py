"""A node that prepares for a job, and fakes of the sources from which it fetches."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from agents.core.model import UnfitChanged
from agents.daemon.allowed_uris import ANY
from agents.daemon.clock import Clock
from agents.protocol.records import PREPARING, JobId, JobRecord
from agents.rpc.client import CallFailed
from agents.work.archive import pack
from agents.work.fetch import PackageFetcher
from agents.work.package import package_of, read_part
from agents.work.preparation import Preparation

JOB = JobId("j")
RUNNING = {JOB: JobRecord(JOB, "running")}


class Sources:
    """Fakes of sailord and of other agents: packages by address."""

    def __init__(self) -> None:
        self.packages: dict[str, dict[str, Path]] = {}
        self.asked: list[tuple[str, str]] = []

    async def call(self, address: str, _: str, path: str, **__: Any) -> tuple[int, bytes]:
        self.asked.append((address, path))
        if address not in self.packages:
            raise CallFailed(f"{address}{path}: refused")
        name, _, part = path.removeprefix("/v1/packages/").partition("/")
        found = self.packages[address].get(name)
        part_bytes = None if found is None else read_part(found, int(part))
        return (404, b"") if part_bytes is None else (200, part_bytes)

    async def addresses(self) -> list[str]:
        return ["leader:1", "other:1"]


def packed(tmp_path: Path, **files: bytes) -> Path:
    root = tmp_path / "source"
    root.mkdir(exist_ok=True)
    for name, content in files.items():
        (root / name).write_bytes(content)
    with (tmp_path / "packed").open("wb") as out:
        pack(root, files, out)
    return tmp_path / "packed"


class Node:
    """A preparation, with the job's text and what it reported."""

    def __init__(self, folder: Path, fetcher: PackageFetcher) -> None:
        self.text: str | None = None
        self.store: dict[JobId, str] = {}
        """The packages of the job's first node; nodes may share it."""
        self.told: asyncio.Queue[str] = asyncio.Queue()
        self.preparation = Preparation(
            folder=folder,
            fetcher=fetcher,
            read_job=self.read,
            agreed=self.agree,
            feed=self.hear,
            clock=Clock(),
            allowed=(ANY,),
            retry_s=0.01,
        )

    async def agree(self, job: JobId, mine: str | None) -> str | None:
        return self.store.get(job, "") if mine is None else self.store.setdefault(job, mine)

    async def read(self, _: JobId) -> str | None:
        return self.text

    def hear(self, event: object) -> None:
        assert isinstance(event, UnfitChanged)
        self.told.put_nowait(event.why)

    def job(self, archive: Path, **work: Any) -> None:
        values = {"package": str(package_of(archive)), **work}
        self.text = "[work]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in values.items())

    async def prepared(self) -> Any:
        """Return what workers are told, once the node is prepared."""
        self.preparation.look(RUNNING)
        while isinstance(view := await self.preparation.view(JOB), str):
            assert view == PREPARING
            await self.told.get()
        return view
