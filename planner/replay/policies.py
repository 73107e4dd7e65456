"""Policies for a job on capacity that comes and goes: what to run, asked at every change."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from planner.move_policy.decide_move import Offer, Unit, judge_move
from planner.move_policy.node_lifetimes import History
from planner.replay.plan_library import TracePlans
from simulator.traces.player import MoveCosts, View, Way, Wish
from simulator.traces.trace import Counts


@dataclass(frozen=True, slots=True, eq=False)
class Restart:
    """Stop and restart: every better plan is taken, by a restart from the durable checkpoint.

    After a loss that is at once; to use an addition it waits for its next checkpoint, so that
    nothing but the time of the restart is lost.
    """

    plans: TracePlans
    name: str = "restart"
    is_live: bool = False

    def decide(self, view: View) -> Wish:
        return Wish(self.plans.best(view.state))


@dataclass(frozen=True, slots=True, eq=False)
class IgnoreAdditions:
    """Moves in place after a loss, and never uses what was not there at the start."""

    plans: TracePlans
    left: tuple[Counts, ...]
    """What each spell still has of it."""
    name: str = "ignore-additions"
    is_live: bool = True

    def decide(self, view: View) -> Wish:
        if view.way is not None:
            return Wish(view.way)
        return Wish(self.plans.best(self.plans.state(self.left[view.spell])))


@dataclass(slots=True, eq=False)
class Sailor:
    """Moves in place: after a loss at once, to a better plan when that is worth the move."""

    plans: TracePlans
    ways: Sequence[Way]
    costs: MoveCosts
    history: History = field(default_factory=History)
    up: Counts | None = None
    """Machines by place, as last seen."""
    grew_s: list[float] = field(default_factory=list)
    """When each place got its youngest machine."""
    wished: int | None = None
    """What it wanted to move to without having to."""
    moved_s: float | None = None
    """When it last did so."""
    name: str = "sailor"
    is_live: bool = True

    def decide(self, view: View) -> Wish:
        self._observe(view)
        if view.way is not None and view.way == self.wished:
            self.moved_s = view.now_s
        self.wished = None
        best = self.plans.best(view.state)
        if view.way is None or best is None or best == view.way:
            return Wish(best if view.way is None else view.way)
        offer = self._offer(best, view.way, view.now_s)
        verdict = judge_move(offer, self.history, now_s=view.now_s, last_move_s=self.moved_s)
        if verdict.moves:
            self.wished = best
            return Wish(best)
        if verdict.ask_again_s is None:
            return Wish(view.way)
        # A wait that rounding makes nothing of would never end.
        return Wish(view.way, view.now_s + max(verdict.ask_again_s, 1e-3))

    def _observe(self, view: View) -> None:
        """Remember what came and what went."""
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
        """What the better plan would bring and cost, in samples or in dollars."""
        new, old = self.ways[best], self.ways[way]
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
