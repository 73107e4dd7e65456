"""Which GPUs finish a job by its deadline at the least cost: spot, on-demand, or none for now.

Spot GPUs are cheap and may be lost, on-demand GPUs are always available. All rules have a safety
net: when only on-demand GPUs can still meet the deadline, the job changes to them for good.
Otherwise it runs on spot GPUs while there are any; the rules differ in what they do while there
are none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

DeadlineRule = Literal["sailor", "uniform-progress", "safety-net"]
"""While there are no spot GPUs, ``uniform-progress`` buys on demand if the job is behind an even
pace (Can't Be Late, NSDI'24); ``sailor`` once little time to spare is left (``slack_reserve_s``,
at most half of what the job had), and then until there are spot GPUs; ``safety-net`` only when it
must."""
DEADLINE_RULES: tuple[DeadlineRule, ...] = ("sailor", "uniform-progress", "safety-net")
Use = Literal["spot", "on demand", "wait"]
SPOT_SLOWDOWN_MAX = 2.0
"""Spot GPUs are not used if a step takes more than this multiple of one on demand."""
PRIOR_S = 2 * 3600.0
"""Weight of the prior of spot availability, in seconds observed."""
RESERVE_FACTOR = 2.0
"""Factor on the reserve, since spot GPUs may be slower, and come more often, than expected."""
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
    """Whether the job runs on the on-demand GPUs, or is about to."""
    change_s: float
    """Worst-case seconds until on-demand GPUs train, repeated work included."""
    back_s: float
    """Worst-case seconds of a change to spot GPUs and back."""
    is_committed: bool = False
    """Whether the safety net was taken."""
    ahead_s: float = 0.0
    """Seconds ahead of an even pace at which ``uniform-progress`` leaves on-demand GPUs, so that it
    does not pay for the next change at once."""
    is_buying: bool = False
    """Whether on-demand GPUs were bought for lack of spot GPUs."""
    reserve_s: float = 0.0
    """Time to spare that is kept for spot GPUs that are still to come, see ``slack_reserve_s``."""
    paid_s: float = math.inf
    """Seconds on the on-demand GPUs that the budget still pays for; infinite: there is no budget,
    or it never paid for all steps."""
    on_demand_usd: float | None = None
    """Dollars of a step on the on-demand GPUs, if known."""
    spot_usd: float | None = None
    """Dollars of a step on the spot GPUs that are up, if known."""


@dataclass(frozen=True, slots=True)
class DeadlineVerdict:
    """What the job should run on now."""

    use: Use
    slack_s: float
    """Time to spare if the job changed to on-demand GPUs now, after the worst loss; less, if the
    budget pays for less."""
    is_committed: bool = False
    buys_after_s: float = math.inf
    """Seconds until the rule may buy on demand, if it waits."""


def can_run_on_spot(view: DeadlineView) -> bool:
    """Return whether the spot GPUs that are up are worth running on: not slow, and cheaper."""
    if view.spot_each_s is None or view.spot_each_s > SPOT_SLOWDOWN_MAX * view.on_demand_each_s:
        return False
    return view.spot_usd is None or view.on_demand_usd is None or view.spot_usd < view.on_demand_usd


def judge_deadline(view: DeadlineView, rule: DeadlineRule = "sailor") -> DeadlineVerdict:
    """Return what the job should run on now, by the rule."""
    left = max(0.0, view.steps - view.done)
    needed_s = left * view.on_demand_each_s + view.change_s
    time_slack_s = view.deadline_s - view.now_s - needed_s
    slack_s = min(time_slack_s, view.paid_s - needed_s)
    if view.is_committed or slack_s <= 0:
        return DeadlineVerdict("on demand", slack_s, is_committed=True)
    if can_run_on_spot(view):
        # Change from on demand to spot only if that leaves time to come back.
        stays = view.is_on_demand and slack_s <= view.back_s
        return DeadlineVerdict("on demand" if stays else "spot", slack_s)
    even_pace_s = view.deadline_s * view.done / view.steps
    # Waiting costs no dollars, so that only the time to spare counts.
    most_s = (view.deadline_s - view.steps * view.on_demand_each_s) / 2
    buys_after_s = {
        "sailor": time_slack_s - min(view.reserve_s, most_s),
        "uniform-progress": even_pace_s - view.now_s - view.ahead_s,
        "safety-net": math.inf,
    }[rule]
    buys = buys_after_s <= 0 or (rule == "sailor" and view.is_buying)
    use: Use = "on demand" if buys else "wait"
    return DeadlineVerdict(use, slack_s, buys_after_s=buys_after_s)


def slack_reserve_s(back_s: float, periods: int, now_s: float, left_s: float) -> float:
    """Return the time to spare that changes to spot GPUs and back may cost until the deadline.

    ``periods`` is how often there have been spot GPUs so far.
    """
    expected = (periods + 1) * left_s / (now_s + PRIOR_S)
    return RESERVE_FACTOR * back_s * (2 + expected)


def expected_spot_share(spot_s: float, now_s: float) -> float:
    """The share of the time to come with spot GPUs, by the seconds with them so far."""
    return (spot_s + PRIOR_SHARE * PRIOR_S) / (now_s + PRIOR_S)


def steps_on_spot(
    left: float, left_s: float, share: float, spot_each_s: float, on_demand_each_s: float
) -> float:
    """Return how many of the steps that are left spot GPUs will do, in expectation.

    They are there for a share of the time. If they are slower, each of their steps takes some of
    the time to spare.
    """
    steps = min(left, share * left_s / spot_each_s)
    slower_s = spot_each_s - on_demand_each_s
    if slower_s > 0:
        steps = min(steps, (left_s - left * on_demand_each_s) / slower_s)
    return max(0.0, steps)
