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
"""Where a rank passes from one state of its snapshots, or of a change of plan, to the next."""
MILESTONES: tuple[Milestone, ...] = get_args(Milestone)


@dataclass(frozen=True, slots=True)
class FailPoint:
    """Where a rank is to die, so that tests can see what the others make of it."""

    rank: int | None
    """``None``: whichever it is."""
    activity: Activity | Milestone
    step: int | None
    """``None``: at the first that comes."""
    generation: int | None = 0
    """``None``: whichever it is."""

    @classmethod
    def parse(cls, text: str) -> FailPoint | None:
        """Read ``RANK:WHERE:STEP``, as in ``2:backward:3``, and ``@GENERATION`` if it is not 0.

        Rank, step and generation may be ``*``. ``None``: it is not so.
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
        """Does a rank stand there now?"""
        is_here = self.activity == place and self.generation in {None, generation}
        return is_here and self.rank in {None, rank} and self.step in {None, step}


@dataclass(frozen=True, slots=True)
class FailFile:
    """A file in which a fail point may be written at any time; who removes it is the one to die."""

    path: Path

    def is_at(self, rank: int, place: Activity | Milestone, step: int, generation: int) -> bool:
        """Does a rank stand there now, as the first that does?"""
        try:
            point = FailPoint.parse(self.path.read_text(encoding="utf-8"))
            if point is None or not point.is_at(rank, place, step, generation):
                return False
            self.path.unlink()
        except FileNotFoundError:
            return False
        return True


def parse_fail_point(text: str) -> FailPoint | FailFile | None:
    """Read either: beside the agent's file stands its workers'. ``None``: it is neither."""
    return FailFile(Path(f"{text}.worker")) if text.startswith("/") else FailPoint.parse(text)
