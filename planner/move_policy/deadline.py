"""Finish a job's steps by a deadline as cheaply as possible, on spot GPUs, on-demand GPUs, or none.

Spot GPUs are cheap and may be lost, on-demand GPUs are always available. All rules have a safety
net: when only on-demand GPUs can still meet the deadline, the job changes to them for good.
Otherwise it runs on spot GPUs while there are any; the rules differ in what they do while there
are none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DeadlineRule = Literal["sailor", "uniform-progress", "safety-net"]
"""While there are no spot GPUs, ``uniform-progress`` buys on demand if the job is behind an even
pace (Can't Be Late, NSDI'24); ``sailor`` only if, in addition, the spot time expected until the
deadline does not suffice; ``safety-net`` only when it must."""
DEADLINE_RULES: tuple[DeadlineRule, ...] = ("sailor", "uniform-progress", "safety-net")
Use = Literal["spot", "on demand", "wait"]
SPOT_SLOWDOWN_MAX = 2.0
"""Spot GPUs are not used alone if a step takes more than this multiple of one on demand."""
PRIOR_S = 2 * 3600.0
"""Weight of the prior of spot availability, in seconds observed."""
PRIOR_SHARE = 0.5
"""Assumed share of time with spot GPUs before anything was observed."""


@dataclass(frozen=True, slots=True)
class DeadlineView:
    """What is left to do until the deadline, and on what; seconds count from the job's start."""

    now_s: float
    deadline_s: float
    steps: int
    """Steps of the job from second 0 to its end."""
    done: float
    on_demand_each_s: float
    """Seconds of a step on the on-demand GPUs."""
    spot_each_s: float | None
    """Seconds of a step on the spot GPUs that are up; ``None``: they are too few for the job."""
    is_on_demand: bool
    """The job runs on the on-demand GPUs, or is about to."""
    change_s: float
    """Worst-case seconds until on-demand GPUs train, repeated work included."""
    back_s: float
    """Worst-case seconds of a change to spot GPUs and back."""
    spot_s: float = 0.0
    """Seconds so far in which the job could run on spot GPUs."""
    is_committed: bool = False
    """The safety net was taken."""
    ahead_s: float = 0.0
    """Seconds ahead of an even pace at which a job leaves on-demand GPUs, so that it does not pay
    for the next change at once."""


@dataclass(frozen=True, slots=True)
class DeadlineVerdict:
    """What the job should run on now."""

    use: Use
    slack_s: float
    """Time to spare if the job changed to on-demand GPUs now, after the worst loss."""
    behind_s: float
    """Seconds that the job is behind an even pace; negative if it is ahead."""
    is_committed: bool = False


def can_run_on_spot(view: DeadlineView) -> bool:
    """Return whether the spot GPUs that are up are worth running on alone."""
    return (
        view.spot_each_s is not None
        and view.spot_each_s <= SPOT_SLOWDOWN_MAX * view.on_demand_each_s
    )


def judge_deadline(view: DeadlineView, rule: DeadlineRule = "sailor") -> DeadlineVerdict:
    """Return what the job should run on now, by the rule."""
    left = max(0.0, view.steps - view.done)
    slack_s = view.deadline_s - view.now_s - left * view.on_demand_each_s - view.change_s
    behind_s = view.now_s - view.deadline_s * view.done / view.steps
    if view.is_committed or slack_s <= 0:
        return DeadlineVerdict("on demand", slack_s, behind_s, is_committed=True)
    if can_run_on_spot(view):
        # From on demand to spot only if that leaves time to come back.
        stays = view.is_on_demand and slack_s <= view.back_s
        return DeadlineVerdict("on demand" if stays else "spot", slack_s, behind_s)
    buys = behind_s > -view.ahead_s and _buys(view, left, rule)
    return DeadlineVerdict("on demand" if buys else "wait", slack_s, behind_s)


def _buys(view: DeadlineView, left: float, rule: DeadlineRule) -> bool:
    """Return whether a job behind an even pace runs on demand while there are no spot GPUs."""
    if rule != "sailor":
        return rule == "uniform-progress"
    share = (view.spot_s + PRIOR_SHARE * PRIOR_S) / (view.now_s + PRIOR_S)
    return left > share * (view.deadline_s - view.now_s) / view.on_demand_each_s
