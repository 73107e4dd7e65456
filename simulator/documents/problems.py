"""Input errors, collected and reported all at once, each with its place and its cure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake: where it is, what is wrong, and how to correct it."""

    place: str
    what: str
    cure: str = ""

    def __str__(self) -> str:
        sentence = f"{self.place}: {self.what}" if self.place else self.what
        return f"{sentence}; {self.cure}" if self.cure else sentence


class InputError(ValueError):
    """Raised for unusable input; ``problems`` lists everything that was found wrong."""

    def __init__(self, problems: Problem | Sequence[Problem]) -> None:
        self.problems = (problems,) if isinstance(problems, Problem) else tuple(problems)
        assert self.problems, "an InputError needs at least one problem"
        super().__init__("\n".join(str(problem) for problem in self.problems))


@dataclass(slots=True)
class Problems:
    """Collects problems while a file is read, so that all of them are reported together."""

    found: list[Problem] = field(default_factory=list)

    def add(self, place: str, what: str, cure: str = "") -> None:
        self.found.append(Problem(place, what, cure))

    def take(self, error: InputError, *, place: str = "") -> None:
        """Add the problems of another reader, each prefixed with ``place``."""
        for problem in error.problems:
            where = f"{place} {problem.place}".strip() if problem.place else place.rstrip(":")
            self.found.append(Problem(where, problem.what, problem.cure))

    def raise_if_any(self) -> None:
        if self.found:
            raise InputError(self.found)


def malformed(place: str, error: Exception, chapter: str) -> Problem:
    """Describe a machine-written file with a missing key or a value of the wrong type."""
    if isinstance(error, KeyError):
        what = f"the key {error} is missing"
    else:
        what = f"holds a value of the wrong type ({error})"
    return Problem(place, what, f"see docs/formats.md, {chapter}")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a cure that suggests the closest known names, or lists the known ones."""
    names = sorted(set(known))
    if not names:
        return "there is none to choose from"
    close = resembling(name, names)
    if close:
        return "did you mean " + " or ".join(f'"{candidate}"' for candidate in close) + "?"
    shown = ", ".join(names[:12])
    rest = len(names) - 12
    return f"choose from {shown}" + (f" and {rest} more" if rest > 0 else "")


def resembling(name: str, known: Iterable[str], cutoff: float = 0.55) -> list[str]:
    """Return up to three known names that resemble one, the closest first."""
    lower = {candidate.lower(): candidate for candidate in sorted(known)}
    close = difflib.get_close_matches(name.lower(), list(lower), n=3, cutoff=cutoff)
    return [lower[candidate] for candidate in close]
