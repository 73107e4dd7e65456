"""Policies that finish a job's steps by a deadline, as cheaply as possible.

Spot GPUs are cheap and come and go, on-demand GPUs are always available. All policies have a safety
net: when only on-demand GPUs can still meet the deadline, the job changes to them for good.
Otherwise it runs on spot GPUs while there are any; the policies differ in what they do while there
are none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from planner.replay.plan_library import TracePlans
from simulator.traces.play_types import (
    Decision,
    PlanFigures,
    PolicyInput,
    ReconfigurationCosts,
)

Rule = Literal["sailor", "uniform-progress", "safety-net"]
"""While there are no spot GPUs, ``uniform-progress`` buys on demand if the job is behind an even
pace (Can't Be Late, NSDI'24); ``sailor`` only if, in addition, the spot time expected until the
deadline does not suffice; ``safety-net`` only when it must."""
DEADLINE_RULES: tuple[Rule, ...] = ("sailor", "uniform-progress", "safety-net")
LITTLE = 2.0
"""Spot GPUs on which a step takes this multiple of one on demand are not used alone."""
SIMILAR = 1.05
"""A running plan is kept unless another is faster by this factor."""
PRIOR_S = 2 * 3600.0
"""Weight of the prior of spot availability, in seconds observed."""
PRIOR_SHARE = 0.5
"""Assumed share of time with spot GPUs before anything was observed."""


@dataclass(slots=True, eq=False)
class DeadlinePolicy:
    """One of the rules, on spot GPUs and on-demand GPUs by turns."""

    rule: Rule
    plans: TracePlans
    figures: Sequence[PlanFigures]
    costs: ReconfigurationCosts
    steps: int
    deadline_s: float
    is_live: bool = True
    is_committed: bool = False
    """Whether the job has changed to on-demand GPUs for good."""
    looked_s: float = 0.0
    had_spot: bool = False
    spot_s: float = 0.0
    """Seconds so far in which a plan could run on spot GPUs."""

    @property
    def name(self) -> str:
        return self.rule

    def decide(self, view: PolicyInput) -> Decision:
        spot = self.plans.best(self.plans.spot_only(view.state))
        steady = self.plans.best(self.plans.on_demand_only(view.state))
        self._observe(view.now_s, has_spot=spot is not None)
        if steady is None:
            return Decision(self.plans.best(view.state))
        if spot is not None and self._each_s(spot) > LITTLE * self._each_s(steady):
            spot = None
        slack_s = self._slack_s(view, steady)
        if self.is_committed or slack_s <= 0:
            self.is_committed = True
            return Decision(steady)
        if spot is not None:
            if self._is_as_good(view, spot):
                return self._wake(view, view.plan, slack_s, steady)
            # From on demand to spot only if there is time to change back.
            if view.plan == steady and slack_s <= self._back_s(spot):
                return self._wake(view, steady, slack_s, steady)
            return self._wake(view, spot, slack_s, steady)
        if self._buys(view, steady):
            return self._wake(view, steady, slack_s, steady)
        return self._wake(view, None, slack_s, steady)

    def _is_as_good(self, view: PolicyInput, spot: int) -> bool:
        """Whether the running spot plan is about as fast as the best one, and may go on."""
        if view.plan is None or view.leaves_s < math.inf:
            return False
        uses_others = any(
            count and not pool.spot
            for count, pool in zip(self.figures[view.plan].gpus, self.plans.pools, strict=True)
        )
        return not uses_others and self._each_s(view.plan) <= SIMILAR * self._each_s(spot)

    def _each_s(self, plan: int) -> float:
        return self.figures[plan].iteration_s * (1 + self.costs.checkpoint_share)

    def _slack_s(self, view: PolicyInput, steady: int) -> float:
        """Time to spare if the job changed to on-demand GPUs now, after the worst loss."""
        left = max(0, self.steps - view.steps)
        needs_s = left * self._each_s(steady)
        if view.plan == steady:
            return self.deadline_s - view.now_s - max(0.0, view.resumes_s - view.now_s) - needs_s
        redo_s = 0.0 if view.is_cold else self.costs.checkpoint_every_s
        return self.deadline_s - view.now_s - needs_s - redo_s - self._change_s(view, steady)

    def _change_s(self, view: PolicyInput, steady: int) -> float:
        running_s = 0.0 if view.plan is None else self.figures[view.plan].iteration_s
        most_s = max(self.costs.restart_s, self.costs.planned_s, self.costs.unplanned_s)
        return most_s + running_s + self.figures[steady].iteration_s

    def _back_s(self, spot: int) -> float:
        """Most seconds that a change to spot GPUs and back can cost."""
        costs = self.costs
        most_s = max(costs.restart_s, costs.planned_s, costs.unplanned_s)
        return costs.planned_s + 2 * most_s + costs.checkpoint_every_s + self._each_s(spot)

    def _wake(self, view: PolicyInput, plan: int | None, slack_s: float, steady: int) -> Decision:
        """Ask again before the slack can be used up; it shrinks by at most a second each second."""
        if plan == steady:
            return Decision(plan, view.now_s + max(60.0, slack_s / 2))
        return Decision(plan, view.now_s + max(1.0, slack_s))

    def _observe(self, now_s: float, *, has_spot: bool) -> None:
        if self.had_spot:
            self.spot_s += now_s - self.looked_s
        self.looked_s, self.had_spot = now_s, has_spot

    def _buys(self, view: PolicyInput, steady: int) -> bool:
        """Whether to run on demand while there are no spot GPUs."""
        left = self.steps - view.steps
        if self.rule == "safety-net":
            return False
        is_behind = view.steps < self.steps * view.now_s / self.deadline_s
        if self.rule == "uniform-progress" or not is_behind:
            return is_behind
        share = (self.spot_s + PRIOR_SHARE * PRIOR_S) / (view.now_s + PRIOR_S)
        expected = share * (self.deadline_s - view.now_s) / self._each_s(steady)
        return left > expected
