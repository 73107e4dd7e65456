"""Policies that finish a job's steps by a deadline, as cheaply as possible, on a trace."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from planner.move_policy.deadline import DeadlineView, Rule, judge_deadline
from planner.replay.plan_library import TracePlans
from simulator.traces.play_types import (
    Decision,
    PlanFigures,
    PolicyInput,
    ReconfigurationCosts,
)

SIMILAR = 1.05
"""A running plan is kept unless another is faster by this factor."""


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
    """The safety net was taken."""
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
        verdict = judge_deadline(self._view(view, spot, steady), self.rule)
        self.is_committed = verdict.is_committed
        if self.is_committed:
            return Decision(steady)
        if verdict.use == "spot":
            assert spot is not None
            plan = view.plan if self._is_as_good(view, spot) else spot
        else:
            plan = steady if verdict.use == "on demand" else None
        # Ask again before the slack can be used up; it shrinks by at most a second each second.
        wait_s = max(60.0, verdict.slack_s / 2) if plan == steady else max(1.0, verdict.slack_s)
        return Decision(plan, view.now_s + wait_s)

    def _view(self, view: PolicyInput, spot: int | None, steady: int) -> DeadlineView:
        is_on_demand = view.plan == steady
        return DeadlineView(
            view.now_s,
            self.deadline_s,
            self.steps,
            view.steps,
            self._each_s(steady),
            None if spot is None else self._each_s(spot),
            is_on_demand,
            max(0.0, view.resumes_s - view.now_s) if is_on_demand else self._change_s(view, steady),
            0.0 if spot is None else self._back_s(spot),
            self.spot_s,
            self.is_committed,
            2 * self._most_s if is_on_demand else 0.0,
        )

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

    def _change_s(self, view: PolicyInput, steady: int) -> float:
        """What a change to on-demand GPUs costs at worst, with what is done again."""
        running_s = 0.0 if view.plan is None else self.figures[view.plan].iteration_s
        redo_s = 0.0 if view.is_cold else self.costs.checkpoint_every_s
        return redo_s + self._most_s + running_s + self.figures[steady].iteration_s

    def _back_s(self, spot: int) -> float:
        """Most seconds that a change to spot GPUs and back can cost."""
        costs = self.costs
        once_s = costs.planned_s + costs.checkpoint_every_s + self._each_s(spot)
        return once_s + 2 * self._most_s

    @property
    def _most_s(self) -> float:
        return max(self.costs.restart_s, self.costs.planned_s, self.costs.unplanned_s)

    def _observe(self, now_s: float, *, has_spot: bool) -> None:
        if self.had_spot:
            self.spot_s += now_s - self.looked_s
        self.looked_s, self.had_spot = now_s, has_spot
