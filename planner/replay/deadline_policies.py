"""Policies that finish a job's steps by a deadline, as cheaply as possible, on a trace."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.library.plan_library import PlanLibrary
from planner.move_policy.deadline import DeadlineRule, DeadlineVerdict, DeadlineView, judge_deadline
from planner.replay.policies import CheckpointIntervals, plan_to_run
from simulator.traces.play_types import (
    Decision,
    PlanFigures,
    PolicyInput,
    ReconfigurationCosts,
    RunLimits,
)

SIMILAR = 1.05
"""A running spot plan is kept unless the best one is faster by more than this factor."""
WAIT_MIN_S = 1.0
"""Least seconds between two decisions while there is time to spare."""


@dataclass(slots=True, eq=False)
class DeadlinePolicy:
    """One of the rules, changing between spot and on-demand GPUs.

    Of the plans on demand it takes the one that the job's goal prefers while that leaves time to
    spare, else the fastest; to the end it stays on the fastest, unless the budget pays for the
    preferred one only.
    """

    rule: DeadlineRule
    plans: PlanLibrary
    figures: Sequence[PlanFigures]
    costs: ReconfigurationCosts
    intervals: CheckpointIntervals
    limits: RunLimits
    deadline_s: float
    is_live: bool = True
    is_committed: bool = False
    """The safety net was taken."""
    looked_s: float = 0.0
    had_spot: bool = False
    spot_s: float = 0.0
    """Seconds so far in which a plan could run on spot GPUs."""
    quickest_s: float = math.inf
    """The shortest iteration of all plans that ran."""
    durable_s: float = 0.0
    """The most seconds of training between two checkpoints that were written."""

    @property
    def name(self) -> str:
        return self.rule

    def decide(self, view: PolicyInput) -> Decision:
        plans = self.plans
        on_demand = plans.on_demand_only(view.state)
        spot = plans.best(plans.spot_only(view.state))
        preferred, fastest = plans.best(on_demand), plans.fastest(on_demand)
        self._observe(view, has_spot=spot is not None)
        if preferred is None or fastest is None:
            return self._run(plans.best(view.state), view)
        steady, verdict = self._judged(view, spot, preferred, fastest)
        if verdict.use == "wait" and not any(pool.spot for pool in plans.pools):
            verdict = replace(verdict, use="on demand")  # There is nothing to wait for.
        # Once committed, on-demand GPUs do all steps; until then spot GPUs do, if there are any.
        by = steady if verdict.is_committed or spot is None else spot
        is_paid = verdict.use != "on demand" or self._is_paid(view, by)
        self.is_committed = is_paid and verdict.is_committed
        if self.is_committed:
            return self._run(steady, view)
        if not is_paid:
            return self._run(spot, view, view.now_s + 60.0)
        # Ask again before the slack can be used up; it shrinks by at most a second each second.
        wait_s = max(WAIT_MIN_S, verdict.slack_s)
        if verdict.use == "spot":
            assert spot is not None
            plan = view.plan if self._is_as_good(view, spot) else spot
        elif verdict.use == "on demand":
            plan, wait_s = steady, max(60.0, verdict.slack_s / 2)
        else:
            # Ask again also when the job falls behind an even pace.
            plan, wait_s = None, min(wait_s, max(60.0, -verdict.behind_s))
        return self._run(plan, view, view.now_s + wait_s)

    def _run(self, plan: int | None, view: PolicyInput, wake_s: float = math.inf) -> Decision:
        plan = plan_to_run(self.plans, plan, view)
        if plan is None or (plan == view.plan and view.leaves_s == math.inf):
            return Decision(plan, wake_s)
        self.durable_s = max(self.durable_s, self._durable_s(plan, view.now_s))
        return Decision(plan, wake_s, self.intervals.every_s(plan, view.now_s))

    def _durable_s(self, plan: int, now_s: float) -> float:
        """Seconds of training on a plan until the next checkpoint is written, at worst."""
        figures = self.figures[plan]
        return self.intervals.every_s(plan, now_s) + figures.checkpoint_s + figures.iteration_s

    def _judged(
        self, view: PolicyInput, spot: int | None, preferred: int, fastest: int
    ) -> tuple[int, DeadlineVerdict]:
        """The on-demand plan to count on, and what to run on now."""
        if preferred != fastest and (not self.is_committed or view.plan == preferred):
            verdict = judge_deadline(self._view(view, spot, preferred), self.rule)
            # The next decision may come too late, by the least wait and a step.
            late_s = WAIT_MIN_S + self._each_s(preferred)
            is_last = verdict.slack_s > -late_s and not self._is_paid(view, fastest)
            if verdict.slack_s > 0 or is_last:
                return preferred, verdict
        return fastest, judge_deadline(self._view(view, spot, fastest), self.rule)

    def _view(self, view: PolicyInput, spot: int | None, steady: int) -> DeadlineView:
        is_on_demand = view.plan is not None and not self._uses(view.plan, spot=True)
        assert self.limits.steps is not None, "a deadline needs steps"
        return DeadlineView(
            view.now_s,
            self.deadline_s,
            self.limits.steps,
            view.steps,
            self._each_s(steady),
            None if spot is None else self._each_s(spot),
            is_on_demand,
            max(0.0, view.resumes_s - view.now_s)
            if view.plan == steady
            else self._change_s(view, steady),
            0.0 if spot is None else self._back_s(view.now_s, spot, steady),
            self.spot_s,
            self.is_committed,
            2 * self._most_s if is_on_demand else 0.0,
        )

    def _is_paid(self, view: PolicyInput, by: int) -> bool:
        """Whether what is left of the budget pays for the steps left, and their checkpoints."""
        usd_per_s = self.figures[by].usd_per_running_s
        if self.limits.max_usd is None or view.usd is None or usd_per_s is None:
            return True
        assert self.limits.steps is not None
        each_s = self.costs.step_s(
            self.figures[by].iteration_s, self.intervals.every_s(by, view.now_s)
        )
        usd = (self.limits.steps - view.steps) * each_s * usd_per_s
        return usd <= self.limits.max_usd - view.usd

    def _is_as_good(self, view: PolicyInput, spot: int) -> bool:
        """Whether the running spot plan is about as fast as the best one, and may go on."""
        if view.plan is None or view.leaves_s < math.inf:
            return False
        if self._uses(view.plan, spot=False):
            return False
        return self._each_s(view.plan) <= SIMILAR * self._each_s(spot)

    def _uses(self, plan: int, *, spot: bool) -> bool:
        """Whether a plan takes GPUs of this contract."""
        gpus = self.figures[plan].gpus
        return any(
            count and pool.spot == spot for count, pool in zip(gpus, self.plans.pools, strict=True)
        )

    def _each_s(self, plan: int) -> float:
        return self.figures[plan].iteration_s * (1 + self.costs.checkpoint_share)

    def _change_s(self, view: PolicyInput, steady: int) -> float:
        """Worst-case seconds of a change to on-demand GPUs, repeated work included."""
        running_s = 0.0 if view.plan is None else self._each_s(view.plan)
        redo_s = 0.0 if view.is_cold else self._redo_s(steady, self.quickest_s, self.durable_s)
        return redo_s + self._most_s + running_s + self._each_s(steady)

    def _back_s(self, now_s: float, spot: int, steady: int) -> float:
        """Most seconds that a change to spot GPUs and back can cost."""
        quickest_s = min(self.quickest_s, self.figures[spot].iteration_s)
        durable_s = max(self.durable_s, self._durable_s(spot, now_s))
        redo_s = self._redo_s(steady, quickest_s, durable_s)
        return self.costs.planned_s + redo_s + self._each_s(spot) + 2 * self._most_s

    def _redo_s(self, steady: int, quickest_s: float, durable_s: float) -> float:
        """Worst-case slack that a rollback to the last durable checkpoint costs.

        Work of slower spot GPUs is repeated faster on demand; that of faster ones had added slack.
        """
        return durable_s * min(1.0, self._each_s(steady) / quickest_s)

    @property
    def _most_s(self) -> float:
        return max(self.costs.restart_s, self.costs.planned_s, self.costs.unplanned_s)

    def _observe(self, view: PolicyInput, *, has_spot: bool) -> None:
        self.intervals.observe(view)
        if view.plan is not None:
            self.quickest_s = min(self.quickest_s, self.figures[view.plan].iteration_s)
        if self.had_spot:
            self.spot_s += view.now_s - self.looked_s
        self.looked_s, self.had_spot = view.now_s, has_spot
