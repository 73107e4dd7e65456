"""One worker process: its spec, its last status, and how it ended."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agents.workers.pidfd import ProcessHandle
from agents.workers.status import WorkerStatus
from worker.plain_file import read_plain

EXIT_WRITTEN_S = 0.5
LOOK_S = 0.02


@dataclass(eq=False)
class WorkerProcess:
    """One worker process, and the rank that it has in its generation."""

    home: Path
    """The folder of the process, which it keeps over generations."""
    process: ProcessHandle
    spec: Mapping[str, Any]
    """The spec of its present rank."""
    status: WorkerStatus | None = None
    line: asyncio.StreamWriter | None = None
    """Its connection to the agent; ``None``: it is not connected."""
    orders: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The last order of each kind, which are sent again when it reconnects."""
    is_dismissed: bool = False
    """It is not needed any more, and was killed."""

    @property
    def rank(self) -> int:
        return int(self.spec["rank"])

    @property
    def device(self) -> int:
        return int(self.spec["device"])

    def check_rank(self, status: WorkerStatus) -> None:
        """Raise ``ValueError`` if it speaks for another rank of its generation."""
        if status.generation == self.spec["generation"] and status.rank != self.rank:
            raise ValueError(f"rank {self.rank} speaks for rank {status.rank}")

    def present_status(self) -> WorkerStatus | None:
        """Return its last status, if that is about the generation of its spec."""
        status = self.status
        is_present = status is not None and status.generation == self.spec["generation"]
        return status if is_present else None

    def is_idle(self) -> bool:
        """Return whether it has left its generation and is connected."""
        status = self.present_status()
        has_left = status is not None and status.taking == "idle"
        return has_left and self.line is not None and not self.is_dismissed

    def dismiss(self) -> None:
        """Kill the process, which is not needed any more."""
        self.is_dismissed = True
        self.process.kill_group()

    def send(self, order: dict[str, Any]) -> None:
        """Send an order now, and again each time the process reconnects."""
        self.orders[order["order"]] = order
        if self.line is not None:
            write_order(self.line, order)


def join_order(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the order that gives an idle worker its next spec."""
    return {"order": "join", "generation": spec["generation"], "spec": spec}


def write_order(writer: asyncio.StreamWriter, order: dict[str, Any]) -> None:
    """Write an order as one line."""
    writer.write(json.dumps(order).encode() + b"\n")


async def wait_exit_code_written(home: Path) -> None:
    """Return when the fork server has written the exit code, or after ``EXIT_WRITTEN_S``."""
    for _ in range(int(EXIT_WRITTEN_S / LOOK_S)):
        if (home / "exit").exists():
            return
        await asyncio.sleep(LOOK_S)


def describe_exit(home: Path) -> str:
    """Say how the process ended, as a predicate."""
    code = _exit_code(home)
    if code is None:
        return "ended with an unknown exit code"
    return f"was killed by signal {-code}" if code < 0 else f"exited with {code}"


def is_bug(home: Path) -> bool:
    """Return whether the process ended itself with an error; one that was killed did not."""
    return (_exit_code(home) or 0) > 0


def _exit_code(home: Path) -> int | None:
    try:
        return int(read_plain(home / "exit"))
    except (OSError, ValueError):
        return None
