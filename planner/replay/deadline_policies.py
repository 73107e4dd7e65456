"""Policies that finish a job's steps by a deadline, as cheaply as possible, on a trace."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.library.plan_library import PlanLibrary
from planner.move_policy.deadline import (
    SPOT_SLOWDOWN_MAX,
    DeadlineRule,
    DeadlineVerdict,
    DeadlineView,
    expected_spot_share,
    judge_deadline,
    slack_reserve_s,
    steps_on_spot,
)
from planner.replay.policies import CheckpointIntervals, plan_to_run
from simulator.traces.play_types import (
    Decision,
    PlanFigures,
    PolicyInput,
    ReconfigurationCosts,
    RunLimits,
)

SIMILAR = 1.05
"""A running spot plan is kept unless the best one is faster, or saves more with goal ``cost``, by
more than this factor."""
WAIT_MIN_S = 1.0
"""Least seconds between two decisions while there is time to spare."""


@dataclass(slots=True, eq=False)
class DeadlinePolicy:
    """One of the rules, changing between spot and on-demand GPUs.

    Of the plans on demand it takes the one that the job's goal prefers while that leaves time to
    spare, else the fastest; to the end it stays on the fastest, unless the budget pays for the
    preferred one only. Spot GPUs are used if they are cheaper, and not much slower. Once the budget
    pays for all steps on demand, what that takes is not spent on anything else.
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
    """Whether the safety net was taken."""
    is_paid_for: bool = False
    """Whether the budget has paid for all steps on demand, and is kept such that it still does."""
    looked_s: float = 0.0
    had_spot: bool = False
    periods: int = 0
    """How often there have been spot GPUs for a plan."""
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
        preferred, fastest = plans.best(on_demand), plans.fastest(on_demand)
        self._observe(view)
        if preferred is None or fastest is None:
            self._note_spot(has_spot=plans.best(plans.spot_only(view.state)) is not None)
            return self._run(plans.best(view.state), view)
        spot = self._spot(view, preferred, fastest)
        self._note_spot(has_spot=spot is not None)
        steady, verdict = self._judge(view, spot, preferred, fastest)
        if verdict.use == "wait" and not any(pool.spot for pool in plans.pools):
            verdict = replace(verdict, use="on demand")  # There is nothing to wait for.
        # Once committed, on-demand GPUs do all steps; until then spot GPUs do, if there are any.
        by = steady if verdict.is_committed or spot is None else spot
        is_paid = verdict.use != "on demand" or self._is_paid(view, by)
        self.is_committed = is_paid and verdict.is_committed
        if self.is_committed:
            return self._run(steady, view)
        if not is_paid:
            return self._run(plans.best(plans.spot_only(view.state)), view, view.now_s + 60.0)
        # Ask again before the slack can be used up; it shrinks by at most a second each second.
        wait_s = max(WAIT_MIN_S, verdict.slack_s)
        if verdict.use == "spot":
            plan = spot
        elif verdict.use == "on demand":
            plan, wait_s = steady, max(60.0, verdict.slack_s / 2)
        else:
            plan, wait_s = None, min(wait_s, max(60.0, verdict.buys_after_s))
        return self._run(plan, view, view.now_s + wait_s)

    def _spot(self, view: PolicyInput, preferred: int, fastest: int) -> int | None:
        """The best plan on spot GPUs that is cheaper than on demand, and not much slower.

        With goal ``cost`` it is the one that is expected to save the most dollars.
        """
        plans = self.plans
        found = plans.within(
            plans.spot_only(view.state),
            iteration_s=SPOT_SLOWDOWN_MAX * self.figures[fastest].iteration_s,
            usd=plans.known[preferred].usd,
        )
        if plans.goal == "cost":
            worth = {plan: self._saved_usd(view, plan, preferred, fastest) for plan in found}
            best = max(found, key=worth.__getitem__, default=None)
            if best is None or worth[best] <= 0:
                return plans.best_of(found, plans.goal)  # Dollars are not known, or time is short.
        else:
            worth = {plan: self.figures[plan].rate for plan in found}
            best = plans.best_of(found, plans.goal)
        running = view.plan if view.leaves_s == math.inf else None
        if best is None or running not in worth or worth[running] * SIMILAR < worth[best]:
            return best
        return running

    def _saved_usd(self, view: PolicyInput, spot: int, preferred: int, fastest: int) -> float:
        """Dollars that a plan on spot GPUs is expected to save until the deadline."""
        usd, other_usd = (self.plans.known[plan].usd for plan in (spot, preferred))
        assert self.limits.steps is not None
        by_spot = steps_on_spot(
            self.limits.steps - view.steps,
            self.deadline_s - view.now_s,
            expected_spot_share(self.spot_s, view.now_s),
            self._each_s(spot),
            self._each_s(fastest),
        )
        return by_spot * ((other_usd or 0.0) - (usd or 0.0))

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

    def _judge(
        self, view: PolicyInput, spot: int | None, preferred: int, fastest: int
    ) -> tuple[int, DeadlineVerdict]:
        """The on-demand plan to count on, and what to run on now."""
        if preferred != fastest and (not self.is_committed or view.plan == preferred):
            given = self._view(view, spot, preferred)
            verdict = judge_deadline(given, self.rule)
            # If only dollars are short, a faster plan does not help.
            slack_s = judge_deadline(replace(given, paid_s=math.inf), self.rule).slack_s
            # The next decision may come too late, by the least wait and a step.
            late_s = WAIT_MIN_S + self._each_s(preferred)
            if slack_s > 0 or (slack_s > -late_s and not self._is_paid(view, fastest)):
                return preferred, verdict
        return fastest, judge_deadline(self._view(view, spot, fastest), self.rule)

    def _view(self, view: PolicyInput, spot: int | None, steady: int) -> DeadlineView:
        is_on_demand = view.plan is not None and not self._uses(view.plan, spot=True)
        assert self.limits.steps is not None, "a deadline needs steps"
        change_s = (
            max(0.0, view.resumes_s - view.now_s)
            if view.plan == steady
            else self._change_s(view, steady)
        )
        back_s = self._back_s(view.now_s, steady if spot is None else spot, steady)
        return DeadlineView(
            view.now_s,
            self.deadline_s,
            self.limits.steps,
            view.steps,
            self._each_s(steady),
            None if spot is None else self._each_s(spot),
            is_on_demand,
            change_s,
            back_s,
            self.is_committed,
            2 * self._most_s if is_on_demand else 0.0,
            is_on_demand,
            slack_reserve_s(back_s, self.periods, view.now_s, self.deadline_s - view.now_s),
            self._paid_s(view, steady, change_s),
            self.plans.known[steady].usd,
            None if spot is None else self.plans.known[spot].usd,
        )

    def _paid_s(self, view: PolicyInput, steady: int, change_s: float) -> float:
        """Seconds on demand that the budget pays for; infinite if it never paid for all steps."""
        spare_s = self._spare_s(view, steady)
        self.is_paid_for |= spare_s > change_s or (view.now_s == 0 and spare_s >= 0)
        if not self.is_paid_for or spare_s == math.inf:
            return math.inf
        assert self.limits.steps is not None
        return spare_s + (self.limits.steps - view.steps) * self._each_s(steady)

    def _is_paid(self, view: PolicyInput, by: int) -> bool:
        """Whether what is left of the budget pays for the steps left, and their checkpoints."""
        return self._spare_s(view, by) >= 0

    def _spare_s(self, view: PolicyInput, by: int) -> float:
        """Seconds on a plan that the budget pays for beyond the steps and checkpoints left."""
        usd_per_s = self.figures[by].usd_per_running_s
        if self.limits.max_usd is None or view.usd is None or not usd_per_s:
            return math.inf
        assert self.limits.steps is not None
        each_s = self.costs.step_s(
            self.figures[by].iteration_s, self.intervals.every_s(by, view.now_s)
        )
        paid_s = (self.limits.max_usd - view.usd) / usd_per_s
        return paid_s - (self.limits.steps - view.steps) * each_s

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

    def _observe(self, view: PolicyInput) -> None:
        self.intervals.observe(view)
        if view.plan is not None:
            self.quickest_s = min(self.quickest_s, self.figures[view.plan].iteration_s)
        if self.had_spot:
            self.spot_s += view.now_s - self.looked_s
        self.looked_s = view.now_s

    def _note_spot(self, *, has_spot: bool) -> None:
        self.periods += has_spot and not self.had_spot
        self.had_spot = has_spot
