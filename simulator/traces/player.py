"""Play an availability trace under a policy, and report goodput, lost work, downtime and dollars.

A policy decides which plan runs. The player knows plans only by their figures; at each change of
capacity it charges for iterations in flight, steps rolled back and downtime. It reads no clock
and draws no random numbers: the trace says which GPUs a loss takes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from simulator.traces.trace import GpuCounts, LostSlots

Activity = Literal["training", "reconfiguring", "idle"]
_EPS = 1e-6
"""Rounding tolerance, in iterations, for one that ends exactly at a boundary."""


@dataclass(frozen=True, slots=True)
class ReconfigurationCosts:
    """Seconds that reconfigurations and checkpoints take; the defaults are assumptions."""

    planned_s: float = 5.0
    """Live reconfiguration of a running job: stop, fetch state, rebuild groups, verify."""
    unplanned_s: float = 10.0
    """Live reconfiguration after a loss: as above, plus detection and abort."""
    restart_s: float = 120.0
    """Restart from the durable checkpoint: start processes, read the state from the store."""
    checkpoint_every_s: float = 600.0
    """Between two durable checkpoints, which are written in the background."""
    snapshot_steps: int = 1
    """Steps between two snapshots in node memory."""
    survive_share: float = 0.5
    """Snapshots have one replica on another machine; they count as lost once fewer than this
    share of the plan's GPUs are left."""


@dataclass(frozen=True, slots=True)
class PlanFigures:
    """What the player needs to know of a plan."""

    iteration_s: float
    samples: int
    """Per iteration."""
    gpus: GpuCounts
    """GPUs that the plan uses, by pool."""
    usd_per_s: float | None
    """Price of these GPUs; ``None`` where a price is unknown."""
    egress_usd: float = 0.0
    """Per iteration."""

    @property
    def usd_per_running_s(self) -> float | None:
        """Dollars per second of training, egress included."""
        if self.usd_per_s is None:
            return None
        return self.usd_per_s + self.egress_usd / self.iteration_s


@dataclass(frozen=True, slots=True)
class AvailabilitySpan:
    """A span of time in which the same GPUs are up."""

    start_s: float
    end_s: float
    state: int
    """Number of this availability; equal availabilities share it."""
    up: GpuCounts
    """GPUs that are up, by pool."""
    lost: LostSlots
    """Which GPUs of each pool went at its start; a plan uses the first ones."""


@dataclass(frozen=True, slots=True)
class PolicyInput:
    """What a policy knows when it decides."""

    now_s: float
    span: int
    """Index of the current availability span."""
    state: int
    up: GpuCounts
    """GPUs that are up, by pool."""
    plan: int | None
    """Index of the plan that runs or is being started."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The plan to run from now on (``None``: none), and when to ask again at the latest."""

    plan: int | None
    wake_s: float = math.inf


class Policy(Protocol):
    """Chooses plans; it is asked at every change of capacity, after every reconfiguration and
    at the ``wake_s`` of its last decision."""

    @property
    def name(self) -> str: ...

    @property
    def is_live(self) -> bool:
        """Whether it reconfigures the running job, or restarts from the durable checkpoint."""
        ...

    def decide(self, view: PolicyInput) -> Decision: ...


class Fits(Protocol):
    """Whether a plan can run on an availability, both given by number."""

    def __call__(self, plan: int, state: int, /) -> bool: ...


@dataclass(frozen=True, slots=True)
class RunSegment:
    """A span of time in one activity and on one plan, for plots."""

    start_s: float
    end_s: float
    kind: Activity
    plan: int | None


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """What a policy achieved on a trace."""

    policy: str
    duration_s: float
    samples: float
    steps: float
    steps_lost: float
    """Iterations that were finished and then rolled back."""
    reconfigurations: int
    """Including those after losses."""
    losses: int
    """How often the running plan lost GPUs."""
    useful_s: float
    lost_s: float
    """Spent on iterations that were rolled back or never finished."""
    downtime_s: float
    """Spent on reconfigurations and restarts."""
    idle_s: float
    """Without a plan to run."""
    gpu_seconds: tuple[float, ...]
    """GPU-seconds held, by pool."""
    usd: float | None
    segments: tuple[RunSegment, ...]

    @property
    def goodput_samples_per_s(self) -> float:
        return self.samples / self.duration_s


def play(
    spans: Sequence[AvailabilitySpan],
    plans: Sequence[PlanFigures],
    fits: Fits,
    policy: Policy,
    costs: ReconfigurationCosts,
) -> PolicyResult:
    """Play a trace under one policy."""
    run = _Run(plans, policy, costs)
    for number, span in enumerate(spans):
        run.apply_losses(span, fits)
        now_s = span.start_s
        while now_s < span.end_s:
            decision = policy.decide(PolicyInput(now_s, number, span.state, span.up, run.plan))
            assert decision.wake_s > now_s, "a policy asked to be woken in the past"
            assert decision.plan is None or fits(decision.plan, span.state), (
                "a policy chose a plan that does not fit"
            )
            at_s = math.inf if decision.plan == run.plan else run.next_boundary(now_s)
            if at_s <= now_s:
                run.reconfigure(decision.plan, now_s)
                continue
            now_s = min(at_s, decision.wake_s, span.end_s)
            if now_s == at_s < span.end_s:
                run.reconfigure(decision.plan, now_s)
    run.finish(spans[-1].end_s)
    return run.result(spans[-1].end_s)


@dataclass(slots=True)
class _Marks:
    """Progress up to some moment."""

    steps: int = 0
    samples: int = 0
    useful_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Run:
    """The state of the job while a trace is played."""

    plans: Sequence[PlanFigures]
    policy: Policy
    costs: ReconfigurationCosts
    plan: int | None = None
    begin_s: float = 0.0
    """When the current segment began."""
    resumes_s: float = 0.0
    """When its iterations begin."""
    done: _Marks = field(default_factory=_Marks)
    durable: _Marks = field(default_factory=_Marks)
    carry_s: float = 0.0
    """Useful seconds since the last durable checkpoint."""
    holders: list[int] | None = None
    """GPUs by pool whose memory holds the state while no plan runs."""
    is_cold: bool = True
    """Whether the state has to be read from the durable checkpoint."""
    steps_lost: int = 0
    reconfigurations: int = 0
    losses: int = 0
    lost_s: float = 0.0
    downtime_s: float = 0.0
    idle_s: float = 0.0
    held_s: dict[int, float] = field(default_factory=dict)
    ran_s: dict[int, float] = field(default_factory=dict)
    segments: list[RunSegment] = field(default_factory=list)

    # -- events ---------------------------------------------------------------------------------

    def apply_losses(self, span: AvailabilitySpan, fits: Fits) -> None:
        """Stop the plan if a change of capacity broke it, and roll back if the state is gone."""
        if self.plan is None and self.holders is None:
            return
        now_s = span.start_s
        held = list(self.plans[self.plan].gpus) if self.plan is not None else self.holders
        assert held is not None
        hits = [
            sum(slot < count for slot in slots)
            for slots, count in zip(span.lost, held, strict=True)
        ]
        is_broken = self.plan is not None and (any(hits) or not fits(self.plan, span.state))
        if self.plan is not None and not is_broken:
            return
        if is_broken:
            self.losses += 1
            self._end_segment(now_s, is_planned=False)
        left = [count - hit for count, hit in zip(held, hits, strict=True)]
        if not self.policy.is_live or sum(left) < self.costs.survive_share * sum(held):
            self._roll_back_to_durable()
            self.holders = None
        else:
            self.holders = left

    def reconfigure(self, plan: int | None, now_s: float) -> None:
        """Switch to another plan, or stop."""
        is_first = now_s == 0 and not self.segments
        was_running = self.plan is not None
        self._end_segment(now_s, is_planned=True)
        self.plan = plan
        if plan is None:
            return
        down_s = self.costs.restart_s
        if is_first:
            down_s = 0.0
        elif self.policy.is_live and not self.is_cold:
            down_s = self.costs.planned_s if was_running else self.costs.unplanned_s
        self.resumes_s = now_s + down_s
        self.holders = None
        self.reconfigurations += not is_first

    def next_boundary(self, now_s: float) -> float:
        """The next moment at which a reconfiguration loses no work."""
        if self.plan is None or now_s <= self.resumes_s:
            return now_s
        iteration_s = self.plans[self.plan].iteration_s
        steps = math.ceil((now_s - self.resumes_s) / iteration_s - _EPS)
        if not self.policy.is_live:
            first, every = self._checkpoint_steps(iteration_s)
            steps = first + max(0, -(-(steps - first) // every)) * every
        return max(now_s, self.resumes_s + steps * iteration_s)

    def finish(self, now_s: float) -> None:
        """End the last segment."""
        self._end_segment(now_s, is_planned=True)

    # -- bookkeeping ----------------------------------------------------------------------------

    def _end_segment(self, now_s: float, *, is_planned: bool) -> None:
        """End the current segment and add up its time, steps and samples."""
        if self.plan is None:
            self._add_segment(self.begin_s, now_s, "idle")
            self.idle_s += now_s - self.begin_s
        else:
            starts_s = min(self.resumes_s, now_s)
            self._add_segment(self.begin_s, starts_s, "reconfiguring")
            self._add_segment(starts_s, now_s, "training")
            self.downtime_s += starts_s - self.begin_s
            self.held_s[self.plan] = self.held_s.get(self.plan, 0.0) + now_s - self.begin_s
            self.ran_s[self.plan] = self.ran_s.get(self.plan, 0.0) + now_s - starts_s
            self._count(self.plans[self.plan], now_s - starts_s, is_planned=is_planned)
            if now_s > self.resumes_s:
                self.is_cold = False
            self.plan = None
        self.begin_s = self.resumes_s = now_s

    def _count(self, plan: PlanFigures, ran_s: float, *, is_planned: bool) -> None:
        each_s = plan.iteration_s
        steps = math.floor(ran_s / each_s + _EPS)
        first, every = self._checkpoint_steps(each_s)
        safe = 0 if steps < first else first + (steps - first) // every * every
        if safe:
            self.durable = _Marks(
                self.done.steps + safe,
                self.done.samples + safe * plan.samples,
                self.done.useful_s + safe * each_s,
            )
            self.carry_s = 0.0
        back = 0
        if not is_planned and self.policy.is_live:
            back = min(steps % self.costs.snapshot_steps, steps - safe)
        kept = steps - back
        self.steps_lost += back
        self.done.steps += kept
        self.done.samples += kept * plan.samples
        self.done.useful_s += kept * each_s
        self.carry_s += (kept - safe) * each_s
        self.lost_s += ran_s - kept * each_s

    def _checkpoint_steps(self, each_s: float) -> tuple[int, int]:
        """Steps of a segment up to its first durable checkpoint, and between later ones."""
        every_s = self.costs.checkpoint_every_s
        return (
            max(1, math.ceil((every_s - self.carry_s) / each_s - _EPS)),
            max(1, math.ceil(every_s / each_s - _EPS)),
        )

    def _roll_back_to_durable(self) -> None:
        self.steps_lost += self.done.steps - self.durable.steps
        self.lost_s += self.done.useful_s - self.durable.useful_s
        self.done = replace(self.durable)
        self.carry_s = 0.0
        self.is_cold = True

    def _add_segment(self, start_s: float, end_s: float, kind: Activity) -> None:
        if end_s > start_s:
            self.segments.append(RunSegment(start_s, end_s, kind, self.plan))

    def result(self, duration_s: float) -> PolicyResult:
        """The totals."""
        pools = len(self.plans[0].gpus) if self.plans else 0
        return PolicyResult(
            policy=self.policy.name,
            duration_s=duration_s,
            samples=self.done.samples,
            steps=self.done.steps,
            steps_lost=self.steps_lost,
            reconfigurations=self.reconfigurations,
            losses=self.losses,
            useful_s=self.done.useful_s,
            lost_s=self.lost_s,
            downtime_s=self.downtime_s,
            idle_s=self.idle_s,
            gpu_seconds=tuple(
                sum(self.plans[plan].gpus[pool] * held for plan, held in self.held_s.items())
                for pool in range(pools)
            ),
            usd=total_usd(self.plans, self.held_s, self.ran_s),
            segments=tuple(self.segments),
        )


def total_usd(
    plans: Sequence[PlanFigures], held_s: dict[int, float], ran_s: dict[int, float]
) -> float | None:
    """Dollars for GPUs while they were held, and for egress while the plans trained."""
    total = 0.0
    for plan, seconds in held_s.items():
        price = plans[plan].usd_per_s
        if price is None:
            return None
        ran = ran_s.get(plan, 0.0)
        total += price * seconds + plans[plan].egress_usd * ran / plans[plan].iteration_s
    return total
