"""A player of traces that runs second by second, to compare the real one with.

Times are whole seconds. Every finished iteration is an entry of a list, and a rollback truncates
the list; nothing is computed in closed form.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from simulator.traces.play_types import (
    AvailabilitySpan,
    Decision,
    PlanFigures,
    PolicyInput,
    ReconfigurationCosts,
)

Fits = Callable[[int, int], bool]


@dataclass(slots=True)
class Ticking:
    """Runs the job second by second."""

    plans: Sequence[PlanFigures]
    fits: Fits
    costs: ReconfigurationCosts
    is_live: bool
    plan: int | None = None
    left_to_move: int = 0
    move_s: int = 0
    """Seconds that the last reconfiguration takes in all."""
    progress: int = 0
    log: list[tuple[int, int]] = field(default_factory=list)
    """Seconds and samples of every iteration that counts."""
    durable: int = 0
    snapshot: int = 0
    holders: list[int] | None = None
    whole: int = 0
    """GPUs of the last plan."""
    is_cold: bool = True
    began: bool = False
    steps_lost: int = 0
    lost_s: int = 0
    downtime_s: int = 0
    idle_s: int = 0
    moves: int = 0
    usd: float = 0.0
    gpu_seconds: list[int] = field(default_factory=list)

    def run(self, spans: Sequence[AvailabilitySpan]) -> None:
        self.gpu_seconds = [0] * len(self.plans[0].gpus)
        for span in spans:
            for second in range(int(span.start_s), int(span.end_s)):
                if second == span.start_s:
                    self.change(span)
                self.decide(span, second)
                self.tick()
        self.lost_s += self.progress

    def change(self, span: AvailabilitySpan) -> None:
        held = self.holders if self.plan is None else list(self.plans[self.plan].gpus)
        if held is None:
            return
        left = []
        is_hit = False
        for place, count in enumerate(held):
            alive = set(range(count)) - set(span.lost[place])
            is_hit = is_hit or len(alive) < count
            left.append(min(len(alive), span.up[place]))
        if self.plan is not None:
            if self.fits(self.plan, span.state) and not is_hit:
                return
            self.plan = None
            self.lost_s += self.progress
            self.progress = 0
            if self.is_live:
                self.cut(max(self.snapshot, self.durable))
        self.holders = left
        if not self.is_live or 2 * sum(left) < self.whole:
            self.cut(self.durable)
            self.holders, self.is_cold = None, True

    def cut(self, length: int) -> None:
        self.lost_s += sum(seconds for seconds, _ in self.log[length:])
        self.steps_lost += len(self.log) - length
        del self.log[length:]

    def decide(self, span: AvailabilitySpan, second: int) -> None:
        target = best_of(self.plans, self.fits, span.state)
        if target == self.plan:
            return
        may_move = self.plan is None or self.left_to_move > 0
        if not may_move and self.progress == 0:
            may_move = self.is_live or self.durable == len(self.log)
        if not may_move:
            return
        if not self.began and second == 0:
            down = 0
        elif not self.is_live or self.is_cold:
            down = self.costs.restart_s
        else:
            down = self.costs.unplanned_s if self.plan is None else self.costs.planned_s
            if self.plan is not None and self.left_to_move:
                down = max(down, self.move_s)
        self.progress, self.snapshot = 0, len(self.log)
        if target is None:
            assert self.plan is not None
            self.holders = None
            if self.is_live and not self.is_cold:
                self.holders = list(self.plans[self.plan].gpus)
            self.plan, self.left_to_move = None, 0
            return
        self.moves += second > 0
        self.whole = sum(self.plans[target].gpus)
        self.plan, self.left_to_move, self.move_s = target, int(down), int(down)
        self.holders = None
        if not down:
            self.is_cold = False

    def tick(self) -> None:
        if self.plan is None:
            self.idle_s += 1
            return
        self.began = True
        plan = self.plans[self.plan]
        for place, count in enumerate(plan.gpus):
            self.gpu_seconds[place] += count
        assert plan.usd_per_s is not None
        self.usd += plan.usd_per_s
        if self.left_to_move:
            self.left_to_move -= 1
            self.downtime_s += 1
            self.is_cold = self.is_cold and self.left_to_move > 0
            return
        self.usd += plan.egress_usd / plan.iteration_s
        self.progress += 1
        if self.progress == plan.iteration_s:
            self.progress = 0
            self.log.append((int(plan.iteration_s), plan.samples))
            if (len(self.log) - self.snapshot) % self.costs.snapshot_steps == 0:
                self.snapshot = len(self.log)
            if sum(s for s, _ in self.log[self.durable :]) >= self.costs.checkpoint_every_s:
                self.durable = len(self.log)


def best_of(plans: Sequence[PlanFigures], fits: Fits, state: int) -> int | None:
    """Return the fastest plan that fits."""
    found = [number for number in range(len(plans)) if fits(number, state)]
    return max(found, key=lambda n: (plans[n].samples / plans[n].iteration_s, -n), default=None)


@dataclass(frozen=True, slots=True)
class Greedy:
    """Always chooses the fastest plan at once."""

    plans: Sequence[PlanFigures]
    fits: Fits
    is_live: bool
    name: str = "greedy"

    def decide(self, view: PolicyInput) -> Decision:
        return Decision(best_of(self.plans, self.fits, view.state))


@dataclass(slots=True)
class Restless:
    """Chooses any plan that fits, or stays on one that loses its GPUs, at any time."""

    rng: random.Random
    plans: Sequence[PlanFigures]
    fits: Fits
    is_live: bool
    wished: tuple[float, int | None] = (-1.0, None)
    name: str = "restless"

    def decide(self, view: PolicyInput) -> Decision:
        can = [n for n in range(len(self.plans)) if self.fits(n, view.state)]
        if view.plan is not None and view.leaves_s < math.inf:
            can.append(view.plan)
        if self.wished[0] != view.now_s:  # One choice per moment, or play() would not end.
            self.wished = (view.now_s, self.rng.choice(can) if can else None)
        if self.wished[1] not in (*can, None):
            self.wished = (view.now_s, None)
        return Decision(self.wished[1], view.now_s + self.rng.uniform(0.5, 60))


@dataclass(frozen=True, slots=True)
class Small:
    """A small random trace with plans for it, over two pools."""

    spans: tuple[AvailabilitySpan, ...]
    plans: tuple[PlanFigures, ...]
    costs: ReconfigurationCosts

    def fits(self, plan: int, state: int) -> bool:
        up = next(span.up for span in self.spans if span.state == state)
        return all(need <= have for need, have in zip(self.plans[plan].gpus, up, strict=True))


def small_case(seed: int, *, spans: int = 12, plans: int = 4, longest_s: int = 90) -> Small:
    """Return the random case of a seed."""
    rng = random.Random(seed)
    found: list[AvailabilitySpan] = []
    now_s, before = 0, (rng.randint(0, 8), rng.randint(0, 4))
    states: dict[tuple[int, int], int] = {}
    for number in range(rng.randint(1, spans)):
        up = (rng.randint(0, 8), rng.randint(0, 4)) if number else before
        lost = tuple(
            tuple(sorted(rng.sample(range(was), max(0, was - now))))
            for was, now in zip(before, up, strict=True)
        )
        end_s = now_s + rng.randint(1, longest_s)
        found.append(AvailabilitySpan(now_s, end_s, states.setdefault(up, len(states)), up, lost))
        now_s, before = end_s, up
    some = tuple(
        PlanFigures(
            rng.randint(1, 9),
            rng.choice((8, 16)),
            (rng.randint(1, 6), rng.randint(0, 3)),
            rng.randint(0, 9) / 4,
            rng.choice((0.0, 0.5)),
        )
        for _ in range(rng.randint(1, plans))
    )
    costs = ReconfigurationCosts(
        planned_s=rng.randint(0, 6),
        unplanned_s=rng.randint(0, 12),
        restart_s=rng.randint(0, 30),
        checkpoint_every_s=rng.randint(1, 60),
        snapshot_steps=rng.randint(1, 4),
        checkpoint_share=0.0,
    )
    return Small(tuple(found), some, costs)
