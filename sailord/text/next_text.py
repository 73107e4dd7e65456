"""What comes next with a job, and what it cannot do without: for `status`, `why` and the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sailord.text.causes import first_names
from sailord.text.units import duration

NAMES_MAX = 6


def name_some(names: Sequence[str]) -> str:
    """Return the names; of many the first ones, and how many more there are."""
    return first_names(names, NAMES_MAX if len(names) > NAMES_MAX + 2 else len(names))


def needed_text(names: Sequence[str]) -> str:
    """Return which nodes' loss would leave the job without a plan."""
    which = f"any of {name_some(names)}" if len(names) > 1 else names[0]
    return f"without {which} it waits: there is no plan for the other nodes"


class NextText(NamedTuple):
    """What comes next: words, when that is, and further words."""

    before: str
    at: float | None = None
    after: str = ""


def next_texts(
    coming: Mapping[str, Any] | None, at: float | None, *, is_waiting: bool = False
) -> list[str]:
    """Return what comes of checkpoints and questions to the planner; empty of an older sailord."""
    if coming is None or at is None:
        return []
    return [
        f"{each.before}{'' if each.at is None else duration(each.at - at)}{each.after}"
        for each in timed_next_texts(coming, is_waiting=is_waiting)
    ]


def timed_next_texts(coming: Mapping[str, Any], *, is_waiting: bool = False) -> list[NextText]:
    """Return the same with the moments apart, since a page counts them down."""
    texts = []
    if (step := coming.get("written_step")) is not None:
        texts.append(NextText(f"the checkpoint of step {step} is not durable yet"))
    if coming["checkpoint_step"] is not None:
        done_at = coming["checkpoint_at"]
        which = f"a checkpoint at step {coming['checkpoint_step']}"
        texts.append(NextText(which if done_at is None else f"{which} in about ", done_at))
    if coming["question"]:
        asked_at, asked = coming["question_at"], "the planner is asked "
        if asked_at is None:
            texts.append(NextText(f"{asked}once a node can be used"))
        else:
            sooner = "at once if a node joins or returns, else " * is_waiting
            texts.append(NextText(f"{asked}{sooner}in ", asked_at, f": {coming['question']}"))
    return texts
