"""Why a job moves, in a few words."""

from __future__ import annotations

from collections.abc import Sequence

STATES = {
    "is lost": "lost",
    "is draining": "draining",
    "is preempted": "preempted",
    "is slow": "slow",
    "is quarantined": "quarantined",
    "failed": "failed",
    "could help": "added",
    "could help again": "back",
}
"""The words of a trigger about a node, and their short form."""
NAMES_MAX = 4


def short_cause(reason: str) -> str:
    """Return a trigger's reason without explanations, with nodes of the same state named together.

    ``a2 is lost: its lease expired; a3 is lost: the same`` becomes ``a2, a3 lost``.
    Of a failure the explanation stays.
    """
    names: dict[str, list[str]] = {}
    for part in reason.split("; "):
        said, _, why = part.partition(": ")
        state = next((state for state in STATES if said.endswith(f" {state}")), None)
        if state is None:
            names.setdefault(said, [])
        else:
            # A failure may be an error of the user's script.
            word = f"failed: {why}" if state == "failed" and why else STATES[state]
            names.setdefault(word, []).append(said.removesuffix(f" {state}"))
    return "; ".join(f"{some(who)} {word}" if who else word for word, who in names.items())


def some(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    rest = len(names) - NAMES_MAX
    return ", ".join(names[:NAMES_MAX]) + (f" and {rest} more" if rest > 0 else "")
