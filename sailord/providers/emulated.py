"""A provider of emulated instances: each is an agent on this host, in a folder of its own.

The folders hold the state, so that a restarted sailord finds its instances and repeats no request.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from agents.daemon.process_cleanup import kill_all, mark
from sailord.providers.interface import (
    DeleteResult,
    Granted,
    Instance,
    InstanceRequest,
    Observation,
    Pool,
    Provider,
    QuotaUsage,
    Refused,
    RequestOutcome,
)
from worker.atomic_file import replace_file

CARD = "instance.json"
ENDED = "ended.json"
"""When instances ended, by id, for the next leader, as a cloud's log of operations tells it."""
ENDED_MAX = 1000


@dataclass(frozen=True, slots=True)
class EmulatedPool:
    """A pool of the provider, with its price and its stock."""

    pool: Pool
    usd_per_hour: float
    machines_max: int


@dataclass(eq=False)
class EmulatedProvider(Provider):
    """Starts agents as processes, and ends them with all their children."""

    folder: Path
    agent: str
    """Text of the agents' configuration without name, zone, machine and spot; paths in it are
    relative to an instance's folder."""
    kinds: tuple[EmulatedPool, ...]
    now: Callable[[], float]
    _processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _ended_at: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        with suppress(FileNotFoundError, ValueError):  # ValueError: the file was damaged.
            self._ended_at = json.loads((self.folder / ENDED).read_bytes())

    @property
    def pools(self) -> Sequence[Pool]:
        return tuple(kind.pool for kind in self.kinds)

    async def observe(self) -> Observation:
        at = self.now()
        found = []
        for instance, pid in self._cards():
            if self._is_up(instance.id, pid):
                found.append(instance)
            else:
                await self._end(instance.id)
        return Observation(at, tuple(found), ended_at=dict(self._ended_at))

    async def create(self, ask: InstanceRequest) -> RequestOutcome:
        there = [instance for instance, _ in self._cards()]
        made = tuple(i for i in there if i.request_id == ask.request_id)
        if made:
            return Granted(ask.request_id, made)
        most = {kind.pool: kind.machines_max for kind in self.kinds}.get(ask.pool)
        if most is None:
            return Refused(ask.request_id, "bad_request", f"the provider has no pool {ask.pool}")
        count = min(ask.count, most - sum(i.pool == ask.pool for i in there))
        if count <= 0:
            return Refused(ask.request_id, "stockout", f"all {most} of {ask.pool} are up")
        return Granted(ask.request_id, tuple(self._start(ask) for _ in range(count)))

    async def delete(self, ids: Sequence[str]) -> DeleteResult:
        for id_ in ids:
            await self._end(id_)
        return DeleteResult(tuple(ids), {})

    async def prices(self) -> Mapping[Pool, float]:
        return {kind.pool: kind.usd_per_hour for kind in self.kinds}

    async def quotas(self) -> Sequence[QuotaUsage]:
        used = [instance.pool for instance, _ in self._cards()]
        return tuple(
            QuotaUsage(f"machines of {kind.pool}", (kind.pool,), kind.machines_max * kind.pool.gpus,
                  used.count(kind.pool) * kind.pool.gpus)
            for kind in self.kinds
        )  # fmt: skip

    # ---- folders and processes ----------------------------------------------------------------

    def _cards(self) -> Iterator[tuple[Instance, int]]:
        """Yield every instance that has a folder, and its process id."""
        for path in sorted(self.folder.glob(f"*/{CARD}")):
            with suppress(FileNotFoundError):  # Removed just now.
                card: dict[str, Any] = json.loads(path.read_bytes())
                pool = Pool(**card["pool"])
                yield (
                    Instance(card["id"], card["name"], pool, "running", card["created_at"],
                             card["request_id"], card["name"]),
                    card["pid"],
                )  # fmt: skip

    def _is_up(self, id_: str, pid: int) -> bool:
        process = self._processes.get(id_)
        if process is not None:
            return process.poll() is None
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return False
        ((name, value),) = mark(self.folder / id_).items()
        return f"{name}={value}".encode() in environment.split(b"\0")

    def _start(self, ask: InstanceRequest) -> Instance:
        id_, pool = secrets.token_hex(6), ask.pool
        name, folder = f"m-{id_}", self.folder / id_
        folder.mkdir(mode=0o700, parents=True)
        spot = "true" if pool.spot else "false"
        config = folder / "agent.toml"
        config.write_text(
            f'name = "{name}"\nzone = "{pool.zone}"\nmachine = "{pool.machine}"\n'
            f"spot = {spot}\n{self.agent}",
            encoding="utf-8",
        )
        words = ["agents.main", "run", "--config", str(config)]
        with (folder / "agent.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *words, "--emulate", f"{pool.gpus}x{pool.gpu}"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **mark(folder), "GCE_METADATA_HOST": "127.0.0.1:9"},
                start_new_session=True,
            )
        self._processes[id_] = process
        created_at = self.now()
        # The previous version does not know of queues.
        told = {name: value for name, value in asdict(pool).items() if name != "flex"}
        card = {"id": id_, "name": name, "pool": told, "created_at": created_at,
                "request_id": ask.request_id, "pid": process.pid}  # fmt: skip
        replace_file(folder / CARD, json.dumps(card), is_durable=False)
        return Instance(id_, name, pool, "running", created_at, ask.request_id, name)

    async def _end(self, id_: str) -> None:
        folder = self.folder / id_
        if not (folder / CARD).is_file():
            return  # Already ended, or not ours.
        await asyncio.to_thread(kill_all, folder)
        process = self._processes.pop(id_, None)
        if process is not None:
            await asyncio.to_thread(process.wait)
        self._ended_at.setdefault(id_, self.now())
        while len(self._ended_at) > ENDED_MAX:
            del self._ended_at[next(iter(self._ended_at))]
        replace_file(self.folder / ENDED, json.dumps(self._ended_at), is_durable=False)
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
