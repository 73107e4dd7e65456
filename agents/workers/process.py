"""One worker process: the seat that it has, what it says, and how it ended."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agents.workers.pidfd import Watched
from agents.workers.status import Word

EXIT_WRITTEN_S = 0.5


@dataclass(eq=False)
class Member:
    """One worker process, and the seat that it has."""

    home: Path
    """Of the process, whatever generations it lives to see."""
    process: Watched
    spec: Mapping[str, Any]
    """What it was told of its seat."""
    word: Word | None = None
    line: asyncio.StreamWriter | None = None
    orders: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The last of each kind, for when it connects again."""
    is_let_go: bool = False
    """It is not needed any more, and was killed."""

    @property
    def rank(self) -> int:
        return int(self.spec["rank"])

    @property
    def device(self) -> int:
        return int(self.spec["device"])

    def own_word(self) -> Word | None:
        """What it said of the generation that it is seated in."""
        word = self.word
        return word if word is not None and word.generation == self.spec["generation"] else None

    def is_idle(self) -> bool:
        """It left its generation, and hears us."""
        word = self.own_word()
        is_left = word is not None and word.taking == "idle"
        return is_left and self.line is not None and not self.is_let_go

    def let_go(self) -> None:
        """End it: nobody needs it any more."""
        self.is_let_go = True
        self.process.kill_group()

    def tell(self, order: dict[str, Any]) -> None:
        """Say it now, and again whenever it connects."""
        self.orders[order["order"]] = order
        if self.line is not None:
            write(self.line, order)


def join_order(spec: Mapping[str, Any]) -> dict[str, Any]:
    """What tells a worker that is idle of its next seat."""
    return {"order": "join", "generation": spec["generation"], "spec": spec}


def write(writer: asyncio.StreamWriter, order: dict[str, Any]) -> None:
    """Put one order on a line."""
    writer.write(json.dumps(order).encode() + b"\n")


async def wait_written(home: Path) -> None:
    """Return when the warm parent has written how the process ended, or is not going to."""
    for _ in range(int(EXIT_WRITTEN_S / 0.02)):
        if (home / "exit").exists():
            return
        await asyncio.sleep(0.02)


def how_it_ended(home: Path) -> str:
    """Say it in words."""
    try:
        code = int((home / "exit").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return "ended, and nobody saw how"
    return f"was killed by signal {-code}" if code < 0 else f"exited with {code}"


def is_bug(home: Path) -> bool:
    """A worker that ends by itself with an error has one; a killed one need not."""
    try:
        return int((home / "exit").read_text(encoding="ascii")) > 0
    except (OSError, ValueError):
        return False
