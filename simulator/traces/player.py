"""A player of availability traces: what a policy trains, loses, waits and pays, second by second.

The player knows plans only as figures. A policy says what to run; when capacity changes, the
player says what that costs: iterations in flight, steps rolled back, seconds in which nobody
trains. It has no clock and no chance in it: which GPUs a loss takes comes with the input.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from simulator.traces.trace import Counts, Taken

Kind = Literal["runs", "moves", "stands"]
_EPS = 1e-6
"""Of an iteration: what rounding may take from one that ends exactly at a boundary."""


@dataclass(frozen=True, slots=True)
class MoveCosts:
    """What a change costs; all are assumptions until moves have been measured."""

    planned_s: float = 5.0
    """A move in place from a running job: stop at a step, fetch state, rebuild groups, verify."""
    unplanned_s: float = 10.0
    """A move in place after a loss: the same, and finding out and aborting before it."""
    restart_s: float = 120.0
    """A restart from the durable checkpoint: start processes anew, read the state from a store."""
    checkpoint_every_s: float = 600.0
    """Between two durable checkpoints; they are written beside the training and stop nothing."""
    snapshot_steps: int = 1
    """Between two snapshots in the memory of nodes."""
    survive_share: float = 0.5
    """Snapshots in memory have a second holder in another machine: they are taken as gone once
    fewer than this share of the plan's GPUs are left."""


@dataclass(frozen=True, slots=True)
class Way:
    """A plan as the player sees it."""

    iteration_s: float
    samples: int
    gpus: Counts
    """GPUs that it holds, by place."""
    usd_per_s: float | None
    """What these cost; ``None`` where a price is unknown."""
    egress_usd: float = 0.0
    """Of one iteration."""

    @property
    def usd_per_running_s(self) -> float | None:
        """Dollars of a second of training."""
        if self.usd_per_s is None:
            return None
        return self.usd_per_s + self.egress_usd / self.iteration_s


@dataclass(frozen=True, slots=True)
class Spell:
    """A span of time in which the same GPUs are up."""

    start_s: float
    end_s: float
    state: int
    """Number of the availability, for policies to look up."""
    up: Counts
    """GPUs that are up, by place."""
    taken: Taken
    """Which GPUs of each place went at its start; a plan is on the first ones."""


@dataclass(frozen=True, slots=True)
class View:
    """What a policy sees when it is asked."""

    now_s: float
    spell: int
    """Its number."""
    state: int
    up: Counts
    """GPUs that are up, by place."""
    way: int | None
    """What runs, or is being moved to."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What a policy wants to run from now on, and when it wants to be asked at the latest."""

    way: int | None
    wake_s: float = math.inf


class Policy(Protocol):
    """Decides what to run; it is asked at every change, after every move and when it wished."""

    @property
    def name(self) -> str: ...

    @property
    def is_live(self) -> bool:
        """Whether it moves a job in place, or restarts it from the durable checkpoint."""
        ...

    def decide(self, view: View) -> Wish: ...


class Fits(Protocol):
    """Whether a way can run on an availability."""

    def __call__(self, way: int, state: int) -> bool: ...


@dataclass(frozen=True, slots=True)
class Stint:
    """A span of time on one way, or on none, for pictures."""

    start_s: float
    end_s: float
    kind: Kind
    way: int | None


@dataclass(frozen=True, slots=True)
class Tale:
    """What came of a policy."""

    policy: str
    duration_s: float
    samples: float
    steps: float
    steps_lost: float
    """Iterations that were finished and then rolled back."""
    moves: int
    """Reconfigurations, those after losses among them."""
    losses: int
    """Times that capacity went away under the job."""
    useful_s: float
    lost_s: float
    """On iterations that were rolled back or never finished."""
    moving_s: float
    """Downtime of moves and restarts."""
    standing_s: float
    """Without anything to run."""
    gpu_seconds: tuple[float, ...]
    """GPUs held, by place."""
    usd: float | None
    stints: tuple[Stint, ...]

    @property
    def goodput_samples_per_s(self) -> float:
        return self.samples / self.duration_s


def play(
    spells: Sequence[Spell], ways: Sequence[Way], fits: Fits, policy: Policy, costs: MoveCosts
) -> Tale:
    """Play a trace under one policy."""
    run = _Run(ways, policy, costs)
    for number, spell in enumerate(spells):
        run.strike(spell, fits)
        now_s = spell.start_s
        while now_s < spell.end_s:
            wish = policy.decide(View(now_s, number, spell.state, spell.up, run.way))
            assert wish.wake_s > now_s, "a policy must not ask for the past"
            assert wish.way is None or fits(wish.way, spell.state), "it wishes what is not there"
            at_s = math.inf if wish.way == run.way else run.next_boundary(now_s)
            if at_s <= now_s:
                run.move(wish.way, now_s)
                continue
            now_s = min(at_s, wish.wake_s, spell.end_s)
            if now_s == at_s < spell.end_s:
                run.move(wish.way, now_s)
    run.close(spells[-1].end_s)
    return run.tale(spells[-1].end_s)


@dataclass(slots=True)
class _Marks:
    """What is safe at some moment."""

    steps: int = 0
    samples: int = 0
    useful_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Run:
    """The job while a trace is played."""

    ways: Sequence[Way]
    policy: Policy
    costs: MoveCosts
    way: int | None = None
    begin_s: float = 0.0
    """When the present stint began."""
    resumes_s: float = 0.0
    """When its iterations began, or will."""
    done: _Marks = field(default_factory=_Marks)
    durable: _Marks = field(default_factory=_Marks)
    carry_s: float = 0.0
    """Useful seconds since the durable checkpoint."""
    holders: list[int] | None = None
    """GPUs by place whose memory holds the state, while no way runs it."""
    is_cold: bool = True
    """Whether the state must be read from the durable checkpoint."""
    steps_lost: int = 0
    moves: int = 0
    losses: int = 0
    lost_s: float = 0.0
    moving_s: float = 0.0
    standing_s: float = 0.0
    held_s: dict[int, float] = field(default_factory=dict)
    ran_s: dict[int, float] = field(default_factory=dict)
    stints: list[Stint] = field(default_factory=list)

    # -- what happens ---------------------------------------------------------------------------

    def strike(self, spell: Spell, fits: Fits) -> None:
        """Capacity changed: see what the job has lost by it."""
        if self.way is None and self.holders is None:
            return
        now_s = spell.start_s
        held = list(self.ways[self.way].gpus) if self.way is not None else self.holders
        assert held is not None
        hits = [
            sum(slot < count for slot in slots)
            for slots, count in zip(spell.taken, held, strict=True)
        ]
        is_broken = self.way is not None and (any(hits) or not fits(self.way, spell.state))
        if self.way is not None and not is_broken:
            return
        if is_broken:
            self.losses += 1
            self._close(now_s, is_planned=False)
        left = [count - hit for count, hit in zip(held, hits, strict=True)]
        if not self.policy.is_live or sum(left) < self.costs.survive_share * sum(held):
            self._roll_back_to_durable()
            self.holders = None
        else:
            self.holders = left

    def move(self, way: int | None, now_s: float) -> None:
        """Go over to another way, or stop."""
        is_first = now_s == 0 and not self.stints
        was_running = self.way is not None
        self._close(now_s, is_planned=True)
        self.way = way
        if way is None:
            return
        down_s = self.costs.restart_s
        if is_first:
            down_s = 0.0
        elif self.policy.is_live and not self.is_cold:
            down_s = self.costs.planned_s if was_running else self.costs.unplanned_s
        self.resumes_s = now_s + down_s
        self.holders = None
        self.moves += not is_first

    def next_boundary(self, now_s: float) -> float:
        """When the job can be moved without losing anything."""
        if self.way is None or now_s <= self.resumes_s:
            return now_s
        iteration_s = self.ways[self.way].iteration_s
        steps = math.ceil((now_s - self.resumes_s) / iteration_s - _EPS)
        if not self.policy.is_live:
            first, every = self._checkpoint_steps(iteration_s)
            steps = first + max(0, -(-(steps - first) // every)) * every
        return max(now_s, self.resumes_s + steps * iteration_s)

    def close(self, now_s: float) -> None:
        """The trace ends."""
        self._close(now_s, is_planned=True)

    # -- bookkeeping ----------------------------------------------------------------------------

    def _close(self, now_s: float, *, is_planned: bool) -> None:
        """End the present stint, and count what came of it."""
        if self.way is None:
            self._stint(self.begin_s, now_s, "stands")
            self.standing_s += now_s - self.begin_s
        else:
            starts_s = min(self.resumes_s, now_s)
            self._stint(self.begin_s, starts_s, "moves")
            self._stint(starts_s, now_s, "runs")
            self.moving_s += starts_s - self.begin_s
            self.held_s[self.way] = self.held_s.get(self.way, 0.0) + now_s - self.begin_s
            self.ran_s[self.way] = self.ran_s.get(self.way, 0.0) + now_s - starts_s
            self._count(self.ways[self.way], now_s - starts_s, is_planned=is_planned)
            if now_s > self.resumes_s:
                self.is_cold = False
            self.way = None
        self.begin_s = self.resumes_s = now_s

    def _count(self, way: Way, ran_s: float, *, is_planned: bool) -> None:
        each_s = way.iteration_s
        steps = math.floor(ran_s / each_s + _EPS)
        first, every = self._checkpoint_steps(each_s)
        safe = 0 if steps < first else first + (steps - first) // every * every
        if safe:
            self.durable = _Marks(
                self.done.steps + safe,
                self.done.samples + safe * way.samples,
                self.done.useful_s + safe * each_s,
            )
            self.carry_s = 0.0
        back = 0
        if not is_planned and self.policy.is_live:
            back = min(steps % self.costs.snapshot_steps, steps - safe)
        kept = steps - back
        self.steps_lost += back
        self.done.steps += kept
        self.done.samples += kept * way.samples
        self.done.useful_s += kept * each_s
        self.carry_s += (kept - safe) * each_s
        self.lost_s += ran_s - kept * each_s

    def _checkpoint_steps(self, each_s: float) -> tuple[int, int]:
        """Steps of a run up to its first durable checkpoint, and between all later ones."""
        every_s = self.costs.checkpoint_every_s
        return (
            max(1, math.ceil((every_s - self.carry_s) / each_s - _EPS)),
            max(1, math.ceil(every_s / each_s - _EPS)),
        )

    def _roll_back_to_durable(self) -> None:
        self.steps_lost += self.done.steps - self.durable.steps
        self.lost_s += self.done.useful_s - self.durable.useful_s
        safe = self.durable
        self.done = _Marks(safe.steps, safe.samples, safe.useful_s)
        self.carry_s = 0.0
        self.is_cold = True

    def _stint(self, start_s: float, end_s: float, kind: Kind) -> None:
        if end_s > start_s:
            self.stints.append(Stint(start_s, end_s, kind, self.way))

    def tale(self, duration_s: float) -> Tale:
        """All of it summed up."""
        places = len(self.ways[0].gpus) if self.ways else 0
        return Tale(
            policy=self.policy.name,
            duration_s=duration_s,
            samples=self.done.samples,
            steps=self.done.steps,
            steps_lost=self.steps_lost,
            moves=self.moves,
            losses=self.losses,
            useful_s=self.done.useful_s,
            lost_s=self.lost_s,
            moving_s=self.moving_s,
            standing_s=self.standing_s,
            gpu_seconds=tuple(
                sum(self.ways[way].gpus[place] * held for way, held in self.held_s.items())
                for place in range(places)
            ),
            usd=usd_of(self.ways, self.held_s, self.ran_s),
            stints=tuple(self.stints),
        )


def usd_of(ways: Sequence[Way], held_s: dict[int, float], ran_s: dict[int, float]) -> float | None:
    """Dollars for GPUs while they were held, and for egress while they trained."""
    total = 0.0
    for way, seconds in held_s.items():
        price = ways[way].usd_per_s
        if price is None:
            return None
        ran = ran_s.get(way, 0.0)
        total += price * seconds + ways[way].egress_usd * ran / ways[way].iteration_s
    return total
