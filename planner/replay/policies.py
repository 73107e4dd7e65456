"""Policies for a job on changing capacity: which plan to run after every change."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from planner.library.plan_library import PlanLibrary
from planner.move_policy.checkpoint_interval import checkpoint_every_s
from planner.move_policy.decide_move import PossibleMove, Unit, judge_move
from planner.move_policy.leave_time import leave_at_s
from planner.move_policy.node_lifetimes import LifetimeHistory
from simulator.traces.play_types import (
    Decision,
    PlanFigures,
    PolicyInput,
    ReconfigurationCosts,
)
from simulator.traces.trace import GpuCounts


def plan_to_run(plans: PlanLibrary, best: int | None, view: PolicyInput) -> int | None:
    """The best plan; if no plan fits, the running one, which trains until its GPUs are lost."""
    if best is None and view.plan is not None and view.leaves_s < math.inf:
        return None if plans.fits(view.plan, view.state) else view.plan
    return best


@dataclass(frozen=True, slots=True, eq=False)
class Restart:
    """Stop and restart from the durable checkpoint for every better plan.

    After a loss it restarts at once; to use an addition it waits for its next checkpoint, so that
    only the time of the restart is lost.
    """

    plans: PlanLibrary
    name: str = "restart"
    is_live: bool = False

    def decide(self, view: PolicyInput) -> Decision:
        return Decision(plan_to_run(self.plans, self.plans.best(view.state), view))


@dataclass(frozen=True, slots=True, eq=False)
class IgnoreAdditions:
    """Reconfigures in place after a loss, and never uses capacity that was added later."""

    plans: PlanLibrary
    left: tuple[GpuCounts, ...]
    """The GPUs of the initial capacity that are still up, by span."""
    name: str = "ignore-additions"
    is_live: bool = True

    def decide(self, view: PolicyInput) -> Decision:
        if view.plan is not None and view.leaves_s == math.inf:
            return Decision(view.plan)
        best = self.plans.best(self.plans.state(self.left[view.span]))
        return Decision(plan_to_run(self.plans, best, view))


@dataclass(frozen=True, slots=True, eq=False)
class GreedyPolicy:
    """Reconfigures in place for every better plan, at once."""

    plans: PlanLibrary
    name: str = "greedy"
    is_live: bool = True

    def decide(self, view: PolicyInput) -> Decision:
        return Decision(plan_to_run(self.plans, self.plans.best(view.state), view))


@dataclass(slots=True, eq=False)
class SkiRental:
    """Reconfigures for a better plan once the gain forgone equals the cost of the move."""

    plans: PlanLibrary
    figures: Sequence[PlanFigures]
    costs: ReconfigurationCosts
    forgone: float = 0.0
    """Gain forgone since the running plan was chosen, in samples or dollars."""
    looked_s: float = 0.0
    per_s: float = 0.0
    """Gain forgone per second since its last decision."""
    plan: int | None = None
    name: str = "ski-rental"
    is_live: bool = True

    def decide(self, view: PolicyInput) -> Decision:
        if view.plan != self.plan or view.plan is None:
            self.forgone = self.per_s = 0.0
        self.forgone += self.per_s * (view.now_s - self.looked_s)
        self.looked_s, self.plan, self.per_s = view.now_s, view.plan, 0.0
        best = self.plans.best(view.state)
        if view.plan is None or best is None or view.leaves_s < math.inf:
            return Decision(plan_to_run(self.plans, best, view))
        self.per_s, price, _ = gain_and_cost(
            self.plans, self.figures, view.plan, best, self.costs.planned_s
        )
        if self.per_s <= 0:
            self.per_s = 0.0
            return Decision(view.plan)
        wait_s = (price - self.forgone) / self.per_s
        if wait_s <= 1e-6:
            return Decision(best)
        return Decision(view.plan, view.now_s + max(wait_s, 1e-3))


def gain_and_cost(
    plans: PlanLibrary, figures: Sequence[PlanFigures], way: int, best: int, down_s: float
) -> tuple[float, float, Unit]:
    """Gain per second of a better plan, and what its downtime costs, in samples or dollars."""
    old, new = figures[way], figures[best]
    if plans.goal == "cost":
        old_usd, new_usd = (each.usd_per_running_s or 0.0 for each in (old, new))
        return old_usd / old.rate * new.rate - new_usd, down_s * new_usd, "$"
    return new.rate - old.rate, down_s * old.rate, "samples"


@dataclass(slots=True, eq=False)
class CheckpointIntervals:
    """Chooses intervals of durable checkpoints, as sailord does, from losses of the state."""

    figures: Sequence[PlanFigures]
    costs: ReconfigurationCosts
    chooses: bool = True
    """If false, the interval is ``costs.checkpoint_every_s``."""
    cold_losses: int = 0
    """How often the state was lost from memory."""
    warm_s: float = math.inf
    """From when on the state is in memory, as far as known at the last decision."""

    def observe(self, view: PolicyInput) -> None:
        """Count a loss of the state; to be called at each decision."""
        if view.is_cold and view.plan is None and view.now_s >= self.warm_s:
            self.cold_losses += 1
        self.warm_s = view.now_s
        if view.is_cold:
            self.warm_s = math.inf if view.plan is None else view.resumes_s

    def every_s(self, plan: int, now_s: float) -> float:
        """The interval on a plan."""
        if not self.chooses:
            return self.costs.checkpoint_every_s
        figures = self.figures[plan]
        return checkpoint_every_s(
            cost_s=self.costs.checkpoint_share * figures.iteration_s,
            write_s=figures.checkpoint_s,
            observed_s=now_s,
            losses=self.cold_losses,
        )


@dataclass(slots=True, eq=False)
class SailorPolicy:
    """Reconfigures in place: after a loss at once, for a better plan when that is worth it.

    It decides as sailord does (``planner/move_policy``). It leaves announced GPUs in time.
    """

    plans: PlanLibrary
    figures: Sequence[PlanFigures]
    costs: ReconfigurationCosts
    intervals: CheckpointIntervals
    steps: int | None = None
    """Steps of the whole job, if known."""
    history: LifetimeHistory = field(default_factory=LifetimeHistory)
    span: int = -1
    """The last span that it looked at."""
    came_s: list[list[float]] = field(default_factory=list)
    """When each GPU of each pool was added, the oldest first."""
    wished: int | None = None
    """The plan that it last asked to move to voluntarily."""
    moved_s: float | None = None
    """Time of its last voluntary move."""
    name: str = "sailor"
    is_live: bool = True

    def decide(self, view: PolicyInput) -> Decision:
        self._observe(view)
        if view.plan is not None and view.plan == self.wished:
            self.moved_s = view.now_s
        self.wished = None
        best = self.plans.best(view.state)
        if view.plan is None or best is None:
            return self._run(best, view)
        leave_s = self._leave_s(view.plan, view)
        if leave_s <= view.now_s:
            return self._run(best, view)
        if best == view.plan:
            return Decision(best, leave_s, trains_on=True)
        offer = self._offer(best, view.plan, view)
        verdict = judge_move(offer, self.history, now_s=view.now_s, last_move_s=self.moved_s)
        if verdict.moves:
            self.wished = best
            return self._run(best, view)
        if verdict.ask_again_s is None:
            return Decision(view.plan, leave_s, trains_on=True)
        # Wait at least 1 ms: rounding to zero would loop forever.
        again_s = view.now_s + max(verdict.ask_again_s, 1e-3)
        return Decision(view.plan, min(again_s, leave_s), trains_on=True)

    def _leave_s(self, plan: int, view: PolicyInput) -> float:
        """When the job has to leave GPUs of the plan whose loss is announced; infinite: never."""
        costs = self.costs
        down_s = costs.restart_s if view.is_cold else costs.planned_s
        leave_s = leave_at_s(view.leaves_s, down_s, self.figures[plan].iteration_s)
        # A reconfiguration that takes longer than it trains afterwards is not worth finishing.
        left_s = view.resumes_s - view.now_s
        return view.now_s if 0 < left_s > leave_s - view.resumes_s else leave_s

    def _run(self, plan: int | None, view: PolicyInput) -> Decision:
        plan = plan_to_run(self.plans, plan, view)
        if plan is None:
            return Decision(plan)
        return Decision(plan, checkpoint_every_s=self.intervals.every_s(plan, view.now_s))

    def _observe(self, view: PolicyInput) -> None:
        """Record gains and losses of machines, and of the state."""
        self.intervals.observe(view)
        if view.span == self.span:
            return
        first = self.span < 0
        self.span = view.span
        before = [len(of_pool) for of_pool in self.came_s] or list(view.up)
        if first:
            self.came_s = [[view.now_s] * count for count in view.up]
        else:
            for of_pool, slots, up in zip(self.came_s, view.lost, view.up, strict=True):
                for slot in reversed(slots):
                    del of_pool[slot]
                del of_pool[up:]
                of_pool.extend([view.now_s] * (up - len(of_pool)))
        machines = self.plans.machines
        lost = tuple(map(len, view.lost)) if view.lost and not first else (0,) * len(before)
        self.history = self.history.seen(
            view.now_s,
            up=dict(zip(self.plans.names, machines(view.up), strict=True)),
            lost={n: c for n, c in zip(self.plans.names, machines(lost), strict=True) if c},
        )

    def _offer(self, best: int, way: int, view: PolicyInput) -> PossibleMove:
        """The gain and cost of the better plan, in samples or dollars."""
        new, old = self.figures[best], self.figures[way]
        names, machines = self.plans.names, self.plans.machines
        before, after = (
            {name: count for name, count in zip(names, machines(each.gpus), strict=True) if count}
            for each in (old, new)
        )
        newcomers = {
            name: count - before.get(name, 0)
            for name, count in after.items()
            if count > before.get(name, 0)
        }
        ages = [
            view.now_s - came_s
            for of_pool, was, now in zip(self.came_s, old.gpus, new.gpus, strict=True)
            for came_s in of_pool[was:now]
        ]
        down_s = self.costs.restart_s if view.is_cold else self.costs.planned_s
        if view.now_s < view.resumes_s:
            # The reconfiguration under way is cancelled, and a new one begins.
            down_s = max(0.0, view.now_s + down_s - view.resumes_s)
        gain, cost, unit = gain_and_cost(self.plans, self.figures, way, best, down_s)
        full = frozenset(
            name
            for name, up, pool in zip(names, view.up, self.plans.pools, strict=True)
            if up >= pool.gpus + pool.obtainable_gpus
        )
        each_s = self.costs.unplanned_s + new.iteration_s / 2
        price = (new.usd_per_running_s or 0.0) if unit == "$" else new.rate
        return PossibleMove(
            gain,
            unit,
            cost,
            down_s,
            newcomers,
            sum(ages) / len(ages) if ages else math.inf,
            before=before,
            after=after,
            full=full,
            loss_cost=each_s * price,
            seconds_left=None
            if self.steps is None
            else (self.steps - view.steps) * old.iteration_s,
        )
