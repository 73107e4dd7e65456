"""Finds the rank to blame for a hang, from what each rank has started and waits for. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RankPosition:
    """How far one rank is: what it has started, and what it waits for."""

    counts: Mapping[str, int]
    """How many operations it has started in each of its groups."""
    waiting: tuple[str, int] | None
    """The group and number of the operation that it waits for."""
    what: str
    """That operation in words or, if it waits for none, what it does."""

    def to_json(self) -> dict[str, Any]:
        """Return the message for a peer."""
        return {"counts": dict(self.counts), "waiting": self.waiting, "what": self.what}

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> RankPosition:
        """Read a peer's message."""
        waiting = said["waiting"]
        return cls(
            said["counts"], None if waiting is None else (waiting[0], waiting[1]), said["what"]
        )


@dataclass(frozen=True, slots=True)
class HangCause:
    """The ranks to blame for a hang."""

    ranks: tuple[int, ...]
    text: str


def find_blame(
    first: int,
    positions: Mapping[int, RankPosition],
    members: Mapping[str, tuple[int, ...]],
    *,
    queues: bool,
) -> HangCause | None:
    """Return which ranks make rank ``first`` wait; ``None``: it does not wait.

    From each waiting rank the path leads to one that has not started what it waits for. It ends at
    a rank that waits for nothing or does not answer (it has no position), in a circle, or where all
    have started: then all members are to blame. ``queues``: operations are started long before the
    device reaches them, so a rank that waits for another operation has not reached this one.
    """
    path: list[int] = [first]
    while True:
        rank = path[-1]
        here = positions[rank]
        if here.waiting is None:
            return (
                HangCause((rank,), f"rank {rank} has not arrived ({here.what})")
                if path[1:]
                else None
            )
        group, number = here.waiting
        others = [each for each in members[group] if each != rank]
        silent = [each for each in others if each not in positions]
        if silent:
            return HangCause((silent[0],), f"rank {silent[0]} does not answer ({here.what})")
        missing = [each for each in others if positions[each].counts.get(group, 0) < number]
        if not missing and queues:
            missing = [
                each for each in others if positions[each].waiting not in {None, here.waiting}
            ]
        if not missing:
            text = f"all have started {here.what}: the link between them is slow, or a kernel hangs"
            return HangCause(tuple(sorted(members[group])), text)
        # Prefer a rank that computes to one that waits itself.
        missing.sort(key=lambda each: (positions[each].waiting is not None, each))
        following = missing[0]
        if following in path:
            circle = tuple(sorted(path[path.index(following) :]))
            return HangCause(circle, f"ranks {circle} wait for each other ({here.what})")
        path.append(following)
