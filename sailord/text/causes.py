"""Why a job moves, in a few words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

NodeCause = Literal[
    "is lost",
    "is draining",
    "is preempted",
    "goes to another job",
    "is slow",
    "is quarantined",
    "failed",
    "could help",
    "could help again",
]
"""What a trigger says of a node."""
SHORT: Mapping[NodeCause, str] = {
    "is lost": "lost",
    "is draining": "drained",
    "is preempted": "preempted",
    "goes to another job": "given to another job",
    "is slow": "slow",
    "is quarantined": "quarantined",
    "failed": "failed",
    "could help": "added",
    "could help again": "back",
}
"""The short form of each."""
NAMES_MAX = 4


def node_cause(names: str, cause: NodeCause, why: object = "") -> str:
    """Return a trigger's reason about nodes, as ``short_cause`` reads it."""
    return f"{names} {cause}: {why}" if why else f"{names} {cause}"


def joined_reasons(reasons: Iterable[str]) -> str:
    """Return several reasons as one, what they have in common once."""
    return "; ".join(dict.fromkeys(part for each in reasons for part in each.split("; ")))


def short_cause(reason: str) -> str:
    """Return a trigger's reason without explanations, with nodes of the same state named together.

    ``a2 is lost: its lease expired; a3 is lost: the same`` becomes ``a2, a3 lost``.
    Of a failure the explanation stays.
    """
    names: dict[str, list[str]] = {}
    for part in reason.split("; "):
        said, _, why = part.partition(": ")
        cause = next((cause for cause in SHORT if said.endswith(f" {cause}")), None)
        if cause is None:
            names.setdefault(said, [])
        else:
            # A failure may be an error of the user's script.
            word = f"failed: {why}" if cause == "failed" and why else SHORT[cause]
            names.setdefault(word, []).append(said.removesuffix(f" {cause}"))
    return "; ".join(f"{first_names(who)} {word}" if who else word for word, who in names.items())


def first_names(names: Sequence[str], most: int = NAMES_MAX) -> str:
    """Return the first names, and how many more there are."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
