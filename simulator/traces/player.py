"""Plays an availability trace under a policy, and reports goodput, lost work, downtime and dollars.

A policy decides which plan runs. The player knows plans only by their figures; at each change of
capacity it charges for iterations in flight, steps rolled back and downtime. It reads no clock
and draws no random numbers: the trace says which GPUs a loss takes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from simulator.traces.play_types import (
    EPS,
    NO_LIMITS,
    AvailabilitySpan,
    Decision,
    Ending,
    Fits,
    JobActivity,
    PlanFigures,
    Policy,
    PolicyInput,
    PolicyResult,
    ReconfigurationCosts,
    RunLimits,
    RunSegment,
    steps_between,
    total_usd,
)


def play(
    spans: Sequence[AvailabilitySpan],
    plans: Sequence[PlanFigures],
    fits: Fits,
    policy: Policy,
    costs: ReconfigurationCosts,
    limits: RunLimits = NO_LIMITS,
) -> PolicyResult:
    """Play a trace under one policy, until the trace or the job ends."""
    run = _Run(plans, policy, costs, limits)
    for number, span in enumerate(spans):
        run.apply_losses(span, fits)
        now_s = span.start_s
        while now_s < span.end_s:
            if now_s >= run.leaves_s:
                run.lose_announced(now_s)
            decision = policy.decide(run.view(now_s, number, span))
            assert decision.wake_s > now_s, "a policy asked to be woken in the past"
            must_move = not decision.trains_on and run.must_move(span, fits)
            stays = decision.plan == run.plan and not must_move
            assert stays or decision.plan is None or fits(decision.plan, span.state), (
                "a policy chose a plan that does not fit"
            )
            at_s = math.inf if stays else run.next_boundary(now_s)
            if at_s <= now_s:
                run.reconfigure(decision, now_s)
                continue
            ends_s, ended = run.end(now_s)
            now_s = min(at_s, decision.wake_s, span.end_s, run.leaves_s, ends_s)
            if now_s == ends_s:
                return run.result(now_s, ended)
            if now_s == at_s < span.end_s and now_s < run.leaves_s:
                run.reconfigure(decision, now_s)
    return run.result(spans[-1].end_s, "trace")


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
    limits: RunLimits
    plan: int | None = None
    begin_s: float = 0.0
    """When the current segment began."""
    resumes_s: float = 0.0
    """When its iterations begin."""
    every_s: float = math.inf
    """Interval of durable checkpoints in it."""
    leaves_s: float = math.inf
    """When an announced loss first takes GPUs of the plan."""
    remains: list[int] = field(default_factory=list)
    """GPUs of the plan whose loss is not announced, by pool."""
    done: _Marks = field(default_factory=_Marks)
    durable: _Marks = field(default_factory=_Marks)
    carry_s: float = 0.0
    """Useful seconds since the last durable checkpoint."""
    holders: list[int] | None = None
    """GPUs by pool whose memory holds the state while no plan runs."""
    whole: int = 0
    """GPUs of the plan that held the state last."""
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

    def view(self, now_s: float, number: int, span: AvailabilitySpan) -> PolicyInput:
        """What the policy may know."""
        return PolicyInput(
            now_s,
            number,
            span.state,
            span.up,
            self.plan,
            self.resumes_s,
            self.is_cold and (self.plan is None or now_s < self.resumes_s),
            self.leaves_s,
            span.lost,
            self._steps(now_s),
            self._usd(now_s),
        )

    def _steps(self, now_s: float) -> int:
        if self.plan is None or now_s <= self.resumes_s:
            return self.done.steps
        ran = (now_s - self.resumes_s) / self._step_s(self.plan)
        return self.done.steps + math.floor(ran + EPS)

    def apply_losses(self, span: AvailabilitySpan, fits: Fits) -> None:
        """Stop the plan if a change of capacity broke it, and roll back if the state is lost."""
        if self.plan is None and self.holders is None:
            return
        is_leaving = self.leaves_s < math.inf
        held = self.remains if is_leaving else self.holders or []
        if self.plan is not None and not is_leaving:
            held = list(self.plans[self.plan].gpus)
        hits = [
            sum(slot < count for slot in slots)
            for slots, count in zip(span.lost, held, strict=True)
        ]
        # Of several jobs on a trace, one may have given GPUs up that were not lost.
        left = [min(count - hit, up) for count, hit, up in zip(held, hits, span.up, strict=True)]
        if self.plan is None:
            self._lose(left)
            return
        if not any(hits) and (is_leaving or fits(self.plan, span.state)):
            return
        if span.notice_s > 0:
            self.leaves_s = min(self.leaves_s, span.start_s + span.notice_s)
            self.remains = left
            return
        self._break_off(span.start_s, left)

    def must_move(self, span: AvailabilitySpan, fits: Fits) -> bool:
        """Whether the running plan loses GPUs soon, and would run on others that are up."""
        return self.plan is not None and self.leaves_s < math.inf and fits(self.plan, span.state)

    def lose_announced(self, now_s: float) -> None:
        """Stop a plan that still uses GPUs whose notice has expired."""
        self._break_off(now_s, self.remains)

    def _break_off(self, now_s: float, left: list[int]) -> None:
        assert self.plan is not None
        self.whole = sum(self.plans[self.plan].gpus)
        self.losses += 1
        self._end_segment(now_s, is_planned=False)
        self._lose(left)

    def _lose(self, left: list[int]) -> None:
        """Keep the state in the GPUs that are left, or go back to the durable checkpoint."""
        if not self.policy.is_live or sum(left) < self.costs.survive_share * self.whole:
            self._roll_back_to_durable()
            self.holders = None
        else:
            self.holders = left

    def reconfigure(self, decision: Decision, now_s: float) -> None:
        """Switch to another plan, or stop."""
        is_first = now_s == 0 and not self.segments
        before, resumed = self.plan, now_s >= self.resumes_s
        under_way_s = self.resumes_s - self.begin_s
        remains = self.remains if self.leaves_s < math.inf else None
        self._end_segment(now_s, is_planned=True)
        self.plan = decision.plan
        if self.plan is None:
            if self.policy.is_live and not self.is_cold and before is not None:
                held = list(self.plans[before].gpus)
                self.whole = sum(held)
                # An announced loss is applied now, since it is not reported again when it comes.
                self._lose(held if remains is None else remains)
            return
        every_s = decision.checkpoint_every_s
        self.every_s = self.costs.checkpoint_every_s if every_s is None else every_s
        down_s = self.costs.restart_s
        if is_first:
            down_s = 0.0
        elif self.policy.is_live and not self.is_cold:
            down_s = self.costs.planned_s if before is not None else self.costs.unplanned_s
            if before is not None and not resumed:
                # A cancelled reconfiguration starts anew; changing plans does not shorten the
                # recovery from a loss.
                down_s = max(down_s, under_way_s)
        self.resumes_s = now_s + down_s
        self.holders = None
        self.reconfigurations += not is_first

    def next_boundary(self, now_s: float) -> float:
        """The next moment at which a reconfiguration loses no work."""
        if self.plan is None or now_s <= self.resumes_s:
            return now_s
        iteration_s = self._step_s(self.plan)
        steps = math.ceil((now_s - self.resumes_s) / iteration_s - EPS)
        if not self.policy.is_live:
            first, every = self._checkpoint_steps(self.plans[self.plan].iteration_s)
            steps = first + max(0, -(-(steps - first) // every)) * every
        return max(now_s, self.resumes_s + steps * iteration_s)

    def end(self, now_s: float) -> tuple[float, Ending]:
        """When the job ends if nothing changes, and why."""
        found: list[tuple[float, Ending]] = [(math.inf, "trace")]
        if self.plan is None:
            return found[0]
        plan, limits = self.plans[self.plan], self.limits
        if limits.steps is not None:
            left = max(0, limits.steps - self.done.steps)
            found.append((max(now_s, self.resumes_s + left * self._step_s(self.plan)), "steps"))
        usd = self._usd(now_s)
        if limits.max_usd is not None and usd is not None and plan.usd_per_s is not None:
            left_usd = max(0.0, limits.max_usd - usd)
            until_s = max(0.0, self.resumes_s - now_s)
            before_usd = until_s * plan.usd_per_s
            if left_usd <= before_usd:
                stops_s = now_s + (left_usd / plan.usd_per_s if plan.usd_per_s else 0.0)
            else:
                each = self._usd_per_running_s(self.plan)
                stops_s = now_s + until_s + ((left_usd - before_usd) / each if each else math.inf)
            found.append((stops_s, "budget"))
        return min(found)

    def _usd_per_running_s(self, number: int) -> float:
        plan = self.plans[number]
        return (plan.usd_per_s or 0.0) + plan.egress_usd / plan.iteration_s

    def _usd(self, now_s: float) -> float | None:
        """Dollars spent up to now."""
        held, ran = dict(self.held_s), dict(self.ran_s)
        if self.plan is not None:
            held[self.plan] = held.get(self.plan, 0.0) + now_s - self.begin_s
            running_s = max(0.0, now_s - self.resumes_s)
            ran[self.plan] = ran.get(self.plan, 0.0) + running_s
        return total_usd(self.plans, held, ran)

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
            self._count(self.plan, now_s - starts_s, is_planned=is_planned)
            if now_s >= self.resumes_s:
                self.is_cold = False
            self.plan = None
        self.leaves_s = math.inf
        self.begin_s = self.resumes_s = now_s

    def _step_s(self, number: int) -> float:
        """Seconds of an iteration in the current segment, with its share of checkpoints."""
        return self.costs.step_s(self.plans[number].iteration_s, self._checkpoint_every_s)

    def _count(self, number: int, ran_s: float, *, is_planned: bool) -> None:
        plan, step_s = self.plans[number], self._step_s(number)
        each_s = plan.iteration_s
        steps = math.floor(ran_s / step_s + EPS)
        first, every = self._checkpoint_steps(each_s)
        # A checkpoint that a loss interrupted does not count.
        written = steps if is_planned else math.floor((ran_s - plan.checkpoint_s) / step_s + EPS)
        safe = 0 if written < first else first + (written - first) // every * every
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
        self.downtime_s += steps * (step_s - each_s)
        self.lost_s += ran_s - kept * each_s - steps * (step_s - each_s)

    def _checkpoint_steps(self, each_s: float) -> tuple[int, int]:
        """Steps of a segment up to its first durable checkpoint, and between later ones."""
        every_s = self._checkpoint_every_s
        return steps_between(each_s, every_s - self.carry_s), steps_between(each_s, every_s)

    @property
    def _checkpoint_every_s(self) -> float:
        return self.every_s if self.every_s < math.inf else self.costs.checkpoint_every_s

    def _roll_back_to_durable(self) -> None:
        self.steps_lost += self.done.steps - self.durable.steps
        self.lost_s += self.done.useful_s - self.durable.useful_s
        self.done = replace(self.durable)
        self.carry_s = 0.0
        self.is_cold = True

    def _add_segment(self, start_s: float, end_s: float, kind: JobActivity) -> None:
        if end_s > start_s:
            self.segments.append(RunSegment(start_s, end_s, kind, self.plan))

    def result(self, duration_s: float, ended: Ending) -> PolicyResult:
        """End the last segment, and return the totals."""
        self._end_segment(duration_s, is_planned=True)
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
            ended=ended,
        )
