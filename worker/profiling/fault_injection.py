"""Fault injection for tests: kills a rank at a named point of a step or of a generation."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from worker.types import ACTIVITIES, Activity

Milestone = Literal[
    "joined",
    "meeting",
    "met",
    "fetched",
    "filled",
    "reserved",
    "verified",
    "copying",
    "copied",
    "sealing",
    "sealed",
    "stopping",
    "stopped",
    "broken",
    "left",
]
"""Fail points outside of the steps: stages of a snapshot or of a reconfiguration."""
MILESTONES: tuple[Milestone, ...] = get_args(Milestone)
FAIL_POINT = "SAILOR_FAIL_AT"
"""Environment variable for tests: ``RANK:WHERE:STEP@GENERATION``, or the path of a fail file."""


@dataclass(frozen=True, slots=True)
class FailPoint:
    """Where a test wants a rank to be killed."""

    rank: int | None
    """``None``: any rank."""
    activity: Activity | Milestone
    step: int | None
    """``None``: any step."""
    generation: int | None = 0
    """``None``: any generation."""

    @classmethod
    def parse(cls, text: str) -> FailPoint | None:
        """Parse ``RANK:WHERE:STEP``, such as ``2:backward:3``, with ``@GENERATION`` if it is not 0.

        Rank, step and generation may be ``*``. Returns ``None`` for invalid text.
        """
        found = re.fullmatch(r"([0-9]+|\*):([a-z]+):([0-9]+|\*)(?:@([0-9]+|\*))?", text)
        places = (*ACTIVITIES, *MILESTONES)
        known = next((known for known in places if found and known == found[2]), None)
        if found is None or known is None:
            return None
        numbers = (found[1], found[3], found[4] or "0")
        rank, step, generation = (None if text == "*" else int(text) for text in numbers)
        return cls(rank, known, step, generation)

    def is_at(self, rank: int, place: Activity | Milestone, step: int, generation: int) -> bool:
        """Return whether the fail point is here."""
        is_here = self.activity == place and self.generation in {None, generation}
        return is_here and self.rank in {None, rank} and self.step in {None, step}


@dataclass(frozen=True, slots=True)
class FailFile:
    """A file that may receive a fail point at any time; the rank that removes it is killed."""

    path: Path

    def is_at(self, rank: int, place: Activity | Milestone, step: int, generation: int) -> bool:
        """Return whether the fail point is here and this rank is the first to reach it."""
        try:
            point = FailPoint.parse(self.path.read_text(encoding="utf-8"))
            if point is None or not point.is_at(rank, place, step, generation):
                return False
            self.path.unlink()
        except FileNotFoundError:
            return False
        return True


def parse_fail_point(text: str) -> FailPoint | FailFile | None:
    """Parse a fail point, or the path of an agent's fail file: workers' have ``.worker`` added."""
    return FailFile(Path(f"{text}.worker")) if text.startswith("/") else FailPoint.parse(text)
