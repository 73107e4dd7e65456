"""One line of the decisions made wrong."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutation:
    """One line of a module made wrong."""

    name: str
    path: str
    old: str
    new: str


def core(module: str, *changes: tuple[str, str, str]) -> list[Mutation]:
    return [Mutation(name, module, old, new) for name, old, new in changes]
