"""A second player of traces, second by second, to compare the real one with.

Times are whole seconds. Every finished iteration is one entry of a list, so that rolling back is
cutting that list; nothing is computed in closed form.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from simulator.traces.player import (
    AvailabilitySpan,
    Decision,
    PlanFigures,
    PolicyInput,
    ReconfigurationCosts,
)

Fits = Callable[[int, int], bool]


@dataclass(slots=True)
class Ticking:
    """The job, one second after the other."""

    ways: Sequence[PlanFigures]
    fits: Fits
    costs: ReconfigurationCosts
    is_live: bool
    way: int | None = None
    left_to_move: int = 0
    progress: int = 0
    log: list[tuple[int, int]] = field(default_factory=list)
    """Seconds and samples of every iteration that counts."""
    durable: int = 0
    snapshot: int = 0
    holders: list[int] | None = None
    is_cold: bool = True
    began: bool = False
    steps_lost: int = 0
    lost_s: int = 0
    downtime_s: int = 0
    idle_s: int = 0
    moves: int = 0
    usd: float = 0.0
    gpu_seconds: list[int] = field(default_factory=list)

    def run(self, spells: Sequence[AvailabilitySpan]) -> None:
        self.gpu_seconds = [0] * len(self.ways[0].gpus)
        for spell in spells:
            for second in range(int(spell.start_s), int(spell.end_s)):
                if second == spell.start_s:
                    self.change(spell)
                self.decide(spell, second)
                self.tick()
        self.lost_s += self.progress

    def change(self, spell: AvailabilitySpan) -> None:
        held = self.holders if self.way is None else list(self.ways[self.way].gpus)
        if held is None:
            return
        left = []
        is_hit = False
        for place, count in enumerate(held):
            alive = set(range(count)) - set(spell.lost[place])
            is_hit = is_hit or len(alive) < count
            left.append(min(len(alive), spell.up[place]))
        if self.way is not None:
            if self.fits(self.way, spell.state) and not is_hit:
                return
            self.way = None
            self.lost_s += self.progress
            self.progress = 0
            if self.is_live:
                self.cut(max(self.snapshot, self.durable))
        self.holders = left
        if not self.is_live or 2 * sum(left) < sum(held):
            self.cut(self.durable)
            self.holders, self.is_cold = None, True

    def cut(self, length: int) -> None:
        self.lost_s += sum(seconds for seconds, _ in self.log[length:])
        self.steps_lost += len(self.log) - length
        del self.log[length:]

    def decide(self, spell: AvailabilitySpan, second: int) -> None:
        target = best_of(self.ways, self.fits, spell.state)
        if target == self.way:
            return
        may_move = self.way is None or self.left_to_move > 0
        if not may_move and self.progress == 0:
            may_move = self.is_live or self.durable == len(self.log)
        if not may_move:
            return
        if not self.began and second == 0:
            down = 0
        elif not self.is_live or self.is_cold:
            down = self.costs.restart_s
        else:
            down = self.costs.unplanned_s if self.way is None else self.costs.planned_s
        self.moves += second > 0
        self.way, self.left_to_move, self.progress = target, int(down), 0
        self.snapshot = len(self.log)
        self.holders = None

    def tick(self) -> None:
        if self.way is None:
            self.idle_s += 1
            return
        self.began = True
        way = self.ways[self.way]
        for place, count in enumerate(way.gpus):
            self.gpu_seconds[place] += count
        assert way.usd_per_s is not None
        self.usd += way.usd_per_s
        if self.left_to_move:
            self.left_to_move -= 1
            self.downtime_s += 1
            return
        self.is_cold = False
        self.usd += way.egress_usd / way.iteration_s
        self.progress += 1
        if self.progress == way.iteration_s:
            self.progress = 0
            self.log.append((int(way.iteration_s), way.samples))
            if (len(self.log) - self.snapshot) % self.costs.snapshot_steps == 0:
                self.snapshot = len(self.log)
            if sum(s for s, _ in self.log[self.durable :]) >= self.costs.checkpoint_every_s:
                self.durable = len(self.log)


def best_of(ways: Sequence[PlanFigures], fits: Fits, state: int) -> int | None:
    """The fastest way that can run."""
    found = [number for number in range(len(ways)) if fits(number, state)]
    return max(found, key=lambda n: (ways[n].samples / ways[n].iteration_s, -n), default=None)


@dataclass(frozen=True, slots=True)
class Greedy:
    """Takes whatever is fastest, at once."""

    ways: Sequence[PlanFigures]
    fits: Fits
    is_live: bool
    name: str = "greedy"

    def decide(self, view: PolicyInput) -> Decision:
        return Decision(best_of(self.ways, self.fits, view.state))


@dataclass(slots=True)
class Restless:
    """Wishes anything that can run, at any time."""

    chance: random.Random
    ways: Sequence[PlanFigures]
    fits: Fits
    is_live: bool
    wished: tuple[float, int | None] = (-1.0, None)
    name: str = "restless"

    def decide(self, view: PolicyInput) -> Decision:
        can = [n for n in range(len(self.ways)) if self.fits(n, view.state)]
        if self.wished[0] != view.now_s:  # once a moment, or it would never move on
            self.wished = (view.now_s, self.chance.choice(can) if can else None)
        if self.wished[1] not in (*can, None):
            self.wished = (view.now_s, None)
        return Decision(self.wished[1], view.now_s + self.chance.uniform(0.5, 60))


@dataclass(frozen=True, slots=True)
class Small:
    """A small random trace with ways to run on it; GPUs are of two places."""

    spells: tuple[AvailabilitySpan, ...]
    ways: tuple[PlanFigures, ...]
    costs: ReconfigurationCosts

    def fits(self, way: int, state: int) -> bool:
        up = next(spell.up for spell in self.spells if spell.state == state)
        return all(need <= have for need, have in zip(self.ways[way].gpus, up, strict=True))


def small_case(seed: int, *, spells: int = 12, ways: int = 4, longest_s: int = 90) -> Small:
    """The random case of that number."""
    chance = random.Random(seed)
    found: list[AvailabilitySpan] = []
    now_s, before = 0, (chance.randint(0, 8), chance.randint(0, 4))
    states: dict[tuple[int, int], int] = {}
    for number in range(chance.randint(1, spells)):
        up = (chance.randint(0, 8), chance.randint(0, 4)) if number else before
        taken = tuple(
            tuple(sorted(chance.sample(range(was), max(0, was - now))))
            for was, now in zip(before, up, strict=True)
        )
        end_s = now_s + chance.randint(1, longest_s)
        found.append(AvailabilitySpan(now_s, end_s, states.setdefault(up, len(states)), up, taken))
        now_s, before = end_s, up
    some = tuple(
        PlanFigures(
            chance.randint(1, 9),
            chance.choice((8, 16)),
            (chance.randint(1, 6), chance.randint(0, 3)),
            chance.randint(0, 9) / 4,
            chance.choice((0.0, 0.5)),
        )
        for _ in range(chance.randint(1, ways))
    )
    costs = ReconfigurationCosts(
        planned_s=chance.randint(0, 6),
        unplanned_s=chance.randint(0, 12),
        restart_s=chance.randint(0, 30),
        checkpoint_every_s=chance.randint(1, 60),
        snapshot_steps=chance.randint(1, 4),
    )
    return Small(tuple(found), some, costs)
