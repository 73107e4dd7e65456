"""The goodput ledger as the API shows it."""

from __future__ import annotations

from dataclasses import dataclass

from sailord.goodput.core.causes import Cause


@dataclass(frozen=True, slots=True)
class CauseView:
    """What was booked on one cause."""

    cause: Cause
    text: str
    gpu_s: float
    """GPU seconds."""
    usd: float
    """Without the time at unknown prices."""
    share: float
    """Of all GPU seconds."""
    label: str
    """The cause as people read it."""


@dataclass(frozen=True, slots=True)
class ShareCause:
    """What was booked on one cause of a day or a job."""

    cause: Cause
    gpu_s: float
    usd: float


@dataclass(frozen=True, slots=True)
class ShareView:
    """What was booked on one day or on one job."""

    name: str
    """The day (UTC) or the job's id; empty: no job had the cluster, or the rest."""
    since: float | None
    """Null: the rest, which belongs to earlier days or jobs that are not told apart any more."""
    until: float | None
    gpu_s: float
    usd: float
    goodput: float | None
    """The share of training; null: no time was booked."""
    causes: tuple[ShareCause, ...]
    """The largest first."""


@dataclass(frozen=True, slots=True)
class GoodputView:
    """What every paid second of every GPU was spent on, since the cluster's ledger began."""

    since: float | None
    """Null: nothing was booked yet."""
    until: float
    gpus: int
    """GPUs that are paid for now."""
    gpu_s: float
    """The sum over causes, less ``ahead_gpu_s``."""
    usd: float
    """The sum over causes, less ``ahead_usd``: what was paid."""
    usd_per_hour: float
    """Now, by the prices of nodes and rented instances."""
    goodput: float | None
    """The share of training; null: nothing was booked yet."""
    unpriced_gpu_s: float
    ahead_usd: float
    """Booked for instances that had already ended; later bookings use it up."""
    ahead_gpu_s: float
    """The same in time."""
    causes: tuple[CauseView, ...]
    """The largest first."""
    not_training_gpu_s: float
    """The sum over all causes but training and the step under way, which is not decided yet."""
    not_training_usd: float
    days: tuple[ShareView, ...] = ()
    """The same sums by day, the newest first."""
    jobs: tuple[ShareView, ...] = ()
    """The same by the job that had the cluster, also of nodes that it did not use."""
    last_hour: ShareView | None = None
    """The same of the last hour, or since this leader began if that is less; null: nothing yet."""
    last_minutes: ShareView | None = None
    """The same of the last ten minutes."""
