"""Policies for a job on changing capacity: which plan to run after every change."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from planner.move_policy.decide_move import Offer, Unit, judge_move
from planner.move_policy.node_lifetimes import History
from planner.replay.plan_library import TracePlans
from simulator.traces.player import Decision, PlanFigures, PolicyInput, ReconfigurationCosts
from simulator.traces.trace import GpuCounts


@dataclass(frozen=True, slots=True, eq=False)
class Restart:
    """Stop and restart from the durable checkpoint for every better plan.

    After a loss it restarts at once; to use an addition it waits for its next checkpoint, so that
    only the time of the restart is lost.
    """

    plans: TracePlans
    name: str = "restart"
    is_live: bool = False

    def decide(self, view: PolicyInput) -> Decision:
        return Decision(self.plans.best(view.state))


@dataclass(frozen=True, slots=True, eq=False)
class IgnoreAdditions:
    """Reconfigures in place after a loss, and never uses capacity that was added later."""

    plans: TracePlans
    left: tuple[GpuCounts, ...]
    """What each span still has of the initial capacity."""
    name: str = "ignore-additions"
    is_live: bool = True

    def decide(self, view: PolicyInput) -> Decision:
        if view.plan is not None:
            return Decision(view.plan)
        return Decision(self.plans.best(self.plans.state(self.left[view.span])))


@dataclass(slots=True, eq=False)
class Sailor:
    """Reconfigures in place: after a loss at once, for a better plan when that is worth it."""

    plans: TracePlans
    figures: Sequence[PlanFigures]
    costs: ReconfigurationCosts
    history: History = field(default_factory=History)
    up: GpuCounts | None = None
    """Machines by place at the last change."""
    grew_s: list[float] = field(default_factory=list)
    """When each place got its youngest machine."""
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
        if view.plan is None or best is None or best == view.plan:
            return Decision(best if view.plan is None else view.plan)
        offer = self._offer(best, view.plan, view.now_s)
        verdict = judge_move(offer, self.history, now_s=view.now_s, last_move_s=self.moved_s)
        if verdict.moves:
            self.wished = best
            return Decision(best)
        if verdict.ask_again_s is None:
            return Decision(view.plan)
        # Wait at least 1 ms: rounding to zero would loop for ever.
        return Decision(view.plan, view.now_s + max(verdict.ask_again_s, 1e-3))

    def _observe(self, view: PolicyInput) -> None:
        """Record gains and losses of machines."""
        up = self.plans.machines(view.up)
        names = ["/".join(key) for key in self.plans.places]
        if self.up is None:
            self.grew_s = [-math.inf] * len(up)
            self.up = up
        lost = {
            name: before - now
            for name, before, now in zip(names, self.up, up, strict=True)
            if now < before
        }
        self.grew_s = [
            view.now_s if now > before else then
            for then, before, now in zip(self.grew_s, self.up, up, strict=True)
        ]
        self.history = self.history.seen(
            view.now_s, up=dict(zip(names, up, strict=True)), lost=lost
        )
        self.up = up

    def _offer(self, best: int, way: int, now_s: float) -> Offer:
        """The gain and cost of the better plan, in samples or dollars."""
        new, old = self.figures[best], self.figures[way]
        more = {
            place: after - before
            for place, (before, after) in enumerate(
                zip(self.plans.machines(old.gpus), self.plans.machines(new.gpus), strict=True)
            )
            if after > before
        }
        down_s = self.costs.planned_s
        rates = [each.samples / each.iteration_s for each in (old, new)]
        gain, cost = rates[1] - rates[0], down_s * rates[0]
        unit: Unit = "samples"
        if self.plans.goal == "cost":
            old_usd, new_usd = (each.usd_per_running_s or 0.0 for each in (old, new))
            gain, cost = old_usd / rates[0] * rates[1] - new_usd, down_s * new_usd
            unit = "$"
        return Offer(
            gain,
            unit,
            cost,
            down_s,
            {"/".join(self.plans.places[place]): count for place, count in more.items()},
            min((now_s - self.grew_s[place] for place in more), default=math.inf),
        )
