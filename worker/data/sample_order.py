"""On what the order of a script's samples depends, and whether it is still the same.

It is saved with the number of steps, so that training goes on where it was in the same order.
"""

from __future__ import annotations

from typing import Any

from simulator.documents.problems import InputError, Problem

_CURE = (
    "give what the script gave before; for another order copy the state to a new job, as"
    " docs/own-model.md describes"
)


def order_text(**settings: object) -> str:
    """Return settings as lines, each a name and a value."""
    return "\n".join(f"{name} {value}" for name, value in settings.items())


def order_of(data: Any) -> str:
    """Return on what a source's order depends; empty: on a job file alone."""
    order: str = getattr(data, "order", "")
    return order


def check_order(now: str, before: str, *, step: int) -> None:
    """Raise ``InputError`` if samples would not come in the order of the steps before."""
    what = other_order(now, before, step=step)
    if what:
        raise InputError(Problem("dataset", what, _CURE))


def other_order(now: str, before: str, *, step: int) -> str:
    """Return what differs from the order of the steps before; empty: nothing.

    What only one of the two says is of another version, or of other data, and not compared.
    """
    mine, theirs = _settings(now), _settings(before)
    changed = [
        f"{name} is {value}, and was {theirs[name]}"
        for name, value in mine.items()
        if theirs.get(name, value) != value
    ]
    if not changed or not step:
        return ""
    return f"has another order of samples than in the {step} steps before: {'; '.join(changed)}"


def _settings(text: str) -> dict[str, str]:
    pairs = (line.partition(" ") for line in text.splitlines())
    return {name: value for name, _, value in pairs}
