"""Mistakes of a user, collected and told all at once, each with its place and its cure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake: where it stands, what is wrong, and what would make it right."""

    place: str
    what: str
    cure: str = ""

    def __str__(self) -> str:
        sentence = f"{self.place}: {self.what}" if self.place else self.what
        return f"{sentence}; {self.cure}" if self.cure else sentence


class InputError(ValueError):
    """The input cannot be used; every problem that was found is in ``problems``."""

    def __init__(self, problems: Problem | Sequence[Problem]) -> None:
        self.problems = (problems,) if isinstance(problems, Problem) else tuple(problems)
        assert self.problems, "an InputError without a problem says nothing"
        super().__init__("\n".join(str(problem) for problem in self.problems))


@dataclass(slots=True)
class Problems:
    """Collects problems while a file is read, so that all of them are reported together."""

    found: list[Problem] = field(default_factory=list)

    def add(self, place: str, what: str, cure: str = "") -> None:
        self.found.append(Problem(place, what, cure))

    def take(self, error: InputError, *, place: str = "") -> None:
        """Add what another reader found, each prefixed with ``place``."""
        for problem in error.problems:
            where = f"{place} {problem.place}".strip()
            self.found.append(Problem(where, problem.what, problem.cure))

    def raise_if_any(self) -> None:
        if self.found:
            raise InputError(self.found)


def malformed(place: str, error: Exception, chapter: str) -> Problem:
    """What to say of a program's file in which something is missing or of a wrong kind."""
    if isinstance(error, KeyError):
        what = f"a key {error} is missing"
    else:
        what = f"something in it is of a wrong kind ({error})"
    return Problem(place, what, f"see docs/formats.md, {chapter}")


def nearest(name: str, known: Iterable[str]) -> str:
    """Say which of the known names may have been meant."""
    names = sorted(set(known))
    if not names:
        return "none is known here"
    lower = {candidate.lower(): candidate for candidate in names}
    close = difflib.get_close_matches(name.lower(), list(lower), n=3, cutoff=0.55)
    if close:
        return "did you mean " + " or ".join(f'"{lower[candidate]}"' for candidate in close) + "?"
    shown = ", ".join(names[:12])
    rest = len(names) - 12
    return f"known are {shown}" + (f" and {rest} more" if rest > 0 else "")
