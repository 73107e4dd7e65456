"""What is known of a job with a deadline: plain data.

Fields of ``PaceRecord`` are keys in the store.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sailord.providers.interface import Pool


@dataclass(frozen=True, slots=True)
class Choice:
    """Instances to have, and what the best plan on them does."""

    target: Mapping[Pool, int]
    step_s: float
    usd_per_hour: float | None = None


@dataclass(frozen=True, slots=True)
class DeadlineOptions:
    """What a job with a deadline could run on; ``None``: there is no plan."""

    job: str
    spot: Mapping[Pool, int]
    """Instances to have while the job does without on-demand ones."""
    spot_now: Choice | None
    """The best plan on those of them that the job could use now."""
    on_demand: Choice | None
    """The best plan on on-demand instances alone, by the job's goal."""
    fastest: Choice | None
    why_not: str = ""
    """Why there is no plan on on-demand instances."""
    is_spot_dear: bool = False
    """Spot instances cost as much by the step as on-demand ones: none of them is wanted."""


@dataclass(frozen=True, slots=True)
class JobProgress:
    """The active job's deadline and budget, and how far it is."""

    job: str
    begun_at: float
    """When it was submitted: its time to spare counts from here."""
    step: int
    """Steps done since then: one that continues from a checkpoint began with the checkpoint's."""
    steps: int | None
    """All that it does from then on."""
    deadline: float | None
    is_running: bool = False
    starting_since: float | None = None
    """Since when a generation is being opened, if one is."""
    slower: float = 1.0
    """Measured over predicted seconds of a step."""
    redo_s: float = 0.0
    """Training since the last checkpoint: the worst loss repeats it."""
    move_s: float = 60.0
    usd_left: float | None = None
    """Of the job's own budget."""
    usd_per_hour: float = 0.0


@dataclass(frozen=True, slots=True)
class DeadlineState:
    """How the deadline of a job is kept."""

    job: str
    spot_periods: int = 0
    """How often spot instances have come on which the job could run."""
    had_spot: bool = False
    spot_s: float = 0.0
    """Seconds in which the job could run on spot instances, counted until ``judged_at``."""
    judged_at: float | None = None
    """When that was last counted."""
    is_committed: bool = False
    """Only on-demand instances can make it; they are kept to the end."""
    slack_s: float = 0.0
    """Seconds until only on-demand instances can make it."""
    is_paid_for: bool = False
    """The budget has paid for all steps on demand, and is kept such that it still does."""
    uses_on_demand: bool = False
    why: str = ""
    """What is rented for the deadline, and why."""
    said: str = ""
    """What was told last, without its figures."""
    is_late: bool = False
    """As judged now, on-demand instances cannot make it either."""
    is_risk_told: bool = False
    """It was told once that the deadline is at risk."""
    can_rent: bool = True
    """As far as known, on-demand instances can be had for it, and its budget pays for them."""


@dataclass(frozen=True, slots=True)
class PaceRecord:
    """What the next leader must know of a ``DeadlineState``."""

    job: str
    spot_periods: int = 0
    is_committed: bool = False
    is_paid_for: bool = False
    spot_s: float = 0.0
    """Rounded down, so that the record seldom changes."""
