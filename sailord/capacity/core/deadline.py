"""Rents on-demand instances in time for a job's deadline; pauses a job before its budget is spent.

What the job could run on comes from the planner; what it should run on now follows from its
progress by ``planner.move_policy.deadline``, as in replays. On-demand instances are wanted while
there are no spot instances and little time to spare, and to the end once only they can still make
it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from planner.move_policy.deadline import (
    DeadlineVerdict,
    DeadlineView,
    can_run_on_spot,
    judge_deadline,
    slack_reserve_s,
)
from sailord.capacity.core.budget import stop_due, usd_at_risk, usd_per_hour_limit
from sailord.capacity.core.deadline_model import (
    Choice,
    DeadlineOptions,
    DeadlineState,
    JobProgress,
    PaceRecord,
)
from sailord.capacity.core.model import CapacityDecision, CapacityState, PauseJob, Tell
from sailord.providers.interface import Pool
from sailord.text.units import duration

BOOT_S = 180.0
"""Assumed from a request to a registered agent, until it was seen."""
STORED_S = 300.0
"""The time with spot instances is stored in multiples of this."""
LATE_SHARE = 0.02
"""A forecast beyond the deadline or the budget by less than this share of what is left is noise."""


def pace_record(pace: DeadlineState | None) -> PaceRecord | None:
    """Return what is stored of a pace."""
    if pace is None:
        return None
    spot_s = pace.spot_s // STORED_S * STORED_S
    return PaceRecord(pace.job, pace.spot_periods, pace.is_committed, pace.is_paid_for, spot_s)


def pace_of(record: PaceRecord | None) -> DeadlineState | None:
    """Return the pace that an earlier leader stored."""
    if record is None:
        return None
    return DeadlineState(
        record.job,
        # Spot instances that are up at an election do not count as new ones.
        record.spot_periods,
        had_spot=record.spot_periods > 0,
        spot_s=record.spot_s,
        is_committed=record.is_committed,
        is_paid_for=record.is_paid_for,
    )


def keep_job_budget(state: CapacityState) -> CapacityDecision:
    """Pause a job once its own budget, or the total one, pays for no more than saving its state.

    The total budget also pauses a job that begins on instances that are still up.
    """
    job = state.progress
    if job is None or not job.is_running or job.job != state.paused:
        state = replace(state, paused="")  # If it ever runs again, it is paused again.
    if job is None or state.paused or not job.is_running:
        return state, ()
    why = ""
    if state.stop and rented_in_use(state):
        why = "what is left of the total budget is kept for saving its state"
    elif job.usd_left is not None and (
        job.usd_left <= job.usd_per_hour / 3600 * state.policy.reserve_s
    ):
        why = f"${job.usd_left:,.2f} of its budget are left, which is kept for saving its state"
    elif _may_be_spent(state):
        why = "the total budget may be spent, and the provider does not say what is rented"
    if not why:
        return state, ()
    return replace(state, paused=job.job), (PauseJob(why, job.job),)


def _may_be_spent(state: CapacityState) -> bool:
    """Return whether the total budget is perhaps used up, and the provider is silent."""
    at_risk_usd = usd_at_risk(state)
    if state.observed_at is not None and not at_risk_usd:
        return False  # What is spent is known.
    if not stop_due(state, at_risk_usd) or not rented_in_use(state):
        return False
    return state.now >= state.counting_since + state.policy.doubt_s


def rented_in_use(state: CapacityState) -> Counter[Pool]:
    """Return the instances that sailord rented and the job uses, by pool."""
    instances = (each.instance for each in state.instances.values() if each.instance.request_id)
    return Counter(each.pool for each in instances if each.node in state.in_use)


def watches_deadline(state: CapacityState, job: str) -> bool:
    """Return whether instances are rented so that this job meets its deadline.

    After an election this is assumed until the planner says that none can be had.
    """
    pace = state.pace
    return pace is not None and pace.job == job and pace.can_rent and not state.stop


def keep_deadline(state: CapacityState) -> CapacityDecision:
    """Set the target by the job's deadline, if it has one; tell when that changes."""
    job, options = state.progress, state.options
    if options is None and state.is_target_set and state.pace is not None:
        # The planner has answered, and there are no two contracts to choose from.
        return replace(state, pace=replace(state.pace, can_rent=False, had_spot=False)), ()
    if job is None and state.pace is not None:
        # The job is held: what it could have used meanwhile does not count.
        state = replace(state, pace=replace(state.pace, judged_at=None))
    if job is None or options is None or not job.steps or job.deadline is None:
        return state, ()
    if options.job != job.job:
        return state, ()  # The planner has yet to say what this job could run on.
    pace = state.pace
    if pace is None or pace.job != job.job:
        pace = DeadlineState(job.job)
    if options.on_demand is None or options.fastest is None:
        pace = _count_spot(state, pace, has_spot=options.spot_now is not None)
        pace = replace(pace, uses_on_demand=False, can_rent=False)
        why = f"no on-demand instances can be had for the deadline: {options.why_not}"
        return _tell(replace(state, target=options.spot), pace, why, "none", is_late=False)
    steady, view, verdict = _judge(state, job, options, pace)
    pace = _count_spot(state, pace, has_spot=can_run_on_spot(view))
    pace = replace(pace, slack_s=verdict.slack_s, is_paid_for=view.paid_s < math.inf)
    refusal = _why_unpaid(state, job, options, steady, verdict, is_on_demand=pace.uses_on_demand)
    uses = verdict.use == "on demand" and not refusal
    is_committed = uses and verdict.is_committed
    pace = replace(pace, uses_on_demand=uses, is_committed=is_committed, can_rent=not refusal)
    target = _spot_in_use(state) if options.is_spot_dear else dict(options.spot)
    if uses:
        is_alone = is_committed or options.is_spot_dear
        target = dict(steady.target) if is_alone else _join_contracts(state, steady.target, target)
    late_s = _late_s(view)
    is_late = late_s > LATE_SHARE * (view.steps - view.done) * view.on_demand_each_s
    rented = _describe_on_demand(steady.target) if uses else ""
    awaited = "cheaper spot instances" if options.is_spot_dear else "spot instances"
    key = f"{verdict.use} {is_committed} {bool(refusal)} {is_late} {rented} {awaited}"
    why = _why(verdict, steady, refusal, awaited)
    if is_late:
        why = f"the deadline will be missed by {duration(late_s)} or more: {why}"
    return _tell(replace(state, target=target), pace, why, key, is_late=is_late)


def _judge(
    state: CapacityState, job: JobProgress, options: DeadlineOptions, pace: DeadlineState
) -> tuple[Choice, DeadlineView, DeadlineVerdict]:
    """Judge by the on-demand plan that the job's goal prefers, while that leaves time to spare.

    Otherwise, and once the job is committed to on-demand instances, judge by the fastest plan.
    """
    assert options.on_demand is not None
    assert options.fastest is not None
    usd_left = math.inf if job.usd_left is None else job.usd_left
    is_dear = _left_usd(state, job, options.fastest) > usd_left
    if options.on_demand != options.fastest and (is_dear or not pace.is_committed):
        view = _view(state, job, options, options.on_demand, pace)
        # If only dollars are short, a faster plan does not help.
        if judge_deadline(replace(view, paid_s=math.inf)).slack_s > 0:
            return options.on_demand, view, judge_deadline(view)
    view = _view(state, job, options, options.fastest, pace)
    return options.fastest, view, judge_deadline(view)


def _view(
    state: CapacityState,
    job: JobProgress,
    options: DeadlineOptions,
    steady: Choice,
    pace: DeadlineState,
) -> DeadlineView:
    assert job.steps is not None
    assert job.deadline is not None
    used, is_on_demand = _count_used(state), _is_on_demand(state)
    is_theirs = is_on_demand and used == {p: count for p, count in steady.target.items() if count}
    move_s = job.move_s + job.slower * steady.step_s
    change_s = state.policy.look_s + _boot_s(state, steady) + move_s + job.redo_s
    back_s = change_s + move_s + _full_boot_s(state)
    if is_theirs and job.is_running:
        change_s = 0.0
    elif is_theirs and job.starting_since is not None:
        change_s -= min(state.now - job.starting_since, change_s)
    now = options.spot_now
    return DeadlineView(
        now_s=state.now - job.begun_at,
        deadline_s=max(job.deadline - job.begun_at, 1.0),
        steps=job.steps,
        done=job.step,
        on_demand_each_s=job.slower * steady.step_s,
        spot_each_s=None if now is None else job.slower * now.step_s,
        is_on_demand=job.is_running and is_on_demand,
        change_s=change_s,
        back_s=back_s,
        is_committed=pace.is_committed,
        is_buying=pace.uses_on_demand,
        reserve_s=slack_reserve_s(
            state.policy.look_s + 2 * (_full_boot_s(state) + move_s),
            pace.spot_periods,
            state.now - job.begun_at,
            job.deadline - state.now,
        ),
        paid_s=_paid_s(state, job, steady, change_s, was_paid_for=pace.is_paid_for),
        on_demand_usd=_step_usd(steady),
        spot_usd=None if now is None else _step_usd(now),
    )


def _step_usd(choice: Choice) -> float | None:
    """Return the dollars of a step."""
    return None if choice.usd_per_hour is None else choice.usd_per_hour * choice.step_s / 3600


def _paid_s(
    state: CapacityState, job: JobProgress, steady: Choice, change_s: float, *, was_paid_for: bool
) -> float:
    """Return the seconds on demand that the job's budget pays for, what it keeps at its end aside.

    Infinite if there is no budget, or it never paid for all steps and the change to them.
    """
    if job.usd_left is None or not steady.usd_per_hour:
        return math.inf
    assert job.steps is not None
    paid_s = job.usd_left / steady.usd_per_hour * 3600 - state.policy.reserve_s
    is_paid_for = paid_s > (job.steps - job.step) * job.slower * steady.step_s + change_s
    return paid_s if was_paid_for or is_paid_for else math.inf


def _count_used(state: CapacityState) -> Mapping[Pool, int]:
    """Return how many instances of each pool the job uses."""
    instances = state.instances.values()
    return Counter(each.instance.pool for each in instances if each.instance.node in state.in_use)


def _is_on_demand(state: CapacityState) -> bool:
    """Return whether the job uses rented instances, and all of them are on demand."""
    used = _count_used(state)
    return bool(used) and all(pool.is_on_demand for pool in used)


def _boot_s(state: CapacityState, steady: Choice) -> float:
    """Return how long it takes until the on-demand instances are up."""
    full_s, longest_s = _full_boot_s(state), 0.0
    for pool, count in steady.target.items():
        left = [
            0.0 if each.joined_at is not None else full_s - (state.now - each.instance.created_at)
            for each in state.instances.values()
            if each.is_live and each.instance.pool == pool
        ]
        for asked in state.asks.values():
            if asked.ask.pool == pool:
                left += [full_s - (state.now - asked.since)] * asked.ask.count
        missing = [full_s] * (count - len(left))
        longest_s = max([longest_s, *sorted(left)[:count], *missing])
    return longest_s


def _full_boot_s(state: CapacityState) -> float:
    """Return the longest time from a creation to its agent that was seen, or the assumed one."""
    seen = (
        rented.joined_at - rented.instance.created_at
        for rented in state.instances.values()
        if rented.joined_at is not None and rented.instance.request_id
    )
    return min(max(seen, default=BOOT_S), state.policy.boot_s)


def _count_spot(state: CapacityState, pace: DeadlineState, *, has_spot: bool) -> DeadlineState:
    """Count how often spot instances came, and for how long they were there."""
    came = has_spot and not pace.had_spot
    since = state.now if pace.judged_at is None or not pace.had_spot else pace.judged_at
    return replace(
        pace,
        spot_periods=pace.spot_periods + came,
        had_spot=has_spot,
        spot_s=pace.spot_s + state.now - since,
        judged_at=state.now,
    )


def _spot_in_use(state: CapacityState) -> dict[Pool, int]:
    """Return the rented instances that the job runs on and that are not on demand.

    It trains on there, as only on-demand instances could replace them.
    """
    used = (each for each in state.instances.values() if each.instance.node in state.in_use)
    stay = (each.instance for each in used if each.needs_no_other(state.now))
    return Counter(each.pool for each in stay if each.request_id and not each.pool.is_on_demand)


def _join_contracts(
    state: CapacityState, chosen: Mapping[Pool, int], spot: Mapping[Pool, int]
) -> dict[Pool, int]:
    """Return the on-demand instances, and the spot ones as well where the budgets pay for both."""
    both = {pool: max(chosen.get(pool, 0), spot.get(pool, 0)) for pool in {*chosen, *spot}}
    most = usd_per_hour_limit(state)
    rate = sum(count * state.prices.get(pool, 0.0) for pool, count in both.items())
    return both if most is None or rate <= most else dict(chosen)


def _why_unpaid(
    state: CapacityState,
    job: JobProgress,
    options: DeadlineOptions,
    steady: Choice,
    verdict: DeadlineVerdict,
    *,
    is_on_demand: bool,
) -> str:
    """Return why the job's budget forbids on-demand instances now; empty: it does not.

    To the end they must pay for all steps that are left; until then the rest must last for these
    steps at the price of spot instances, where that is known.
    """
    if job.usd_left is None or verdict.use != "on demand" or steady.usd_per_hour is None:
        return ""
    by, now = steady, options.spot_now
    if not verdict.is_committed and now is not None and now.usd_per_hour is not None:
        by = now
    usd = _left_usd(state, job, by)
    noise = LATE_SHARE if is_on_demand else 0.0
    if usd <= job.usd_left * (1 + noise):
        return ""
    needed = f"the steps left and for saving its state (${usd:,.2f})"
    return f"${job.usd_left:,.2f} of its budget do not pay for {needed}"


def _left_usd(state: CapacityState, job: JobProgress, by: Choice) -> float:
    """Return the dollars of the steps that are left and of saving the state; 0 if not known."""
    assert job.steps is not None
    seconds = (job.steps - job.step) * job.slower * by.step_s + state.policy.reserve_s
    return seconds * (by.usd_per_hour or 0.0) / 3600


def _late_s(view: DeadlineView) -> float:
    """Return how late the job will be even if it ran on demand from this moment on."""
    return view.now_s + (view.steps - view.done) * view.on_demand_each_s - view.deadline_s


def _why(verdict: DeadlineVerdict, chosen: Choice, refusal: str, awaited: str) -> str:
    """Return what is rented for the deadline, and why."""
    spare = f"{duration(max(verdict.slack_s, 0.0))} to spare"
    rented = _describe_on_demand(chosen.target)
    if refusal:
        return f"{spare}: no on-demand instances are rented, since {refusal}"
    if verdict.is_committed:
        return f"only on-demand instances can still make it: {rented} to the end"
    if verdict.use == "on demand":
        return f"only {spare}: renting {rented} until {awaited} arrive"
    if verdict.use == "spot":
        return f"spot instances suffice; {spare}"
    return f"waits for {awaited}; {spare}"


def _describe_on_demand(target: Mapping[Pool, int]) -> str:
    """Return the on-demand instances of a target, by machine type."""
    counts: dict[str, int] = {}
    for pool, count in target.items():
        if count and pool.is_on_demand:
            counts[pool.machine] = counts.get(pool.machine, 0) + count
    return ", ".join(f"{count} on-demand {machine}" for machine, count in sorted(counts.items()))


def _tell(
    state: CapacityState, pace: DeadlineState, why: str, key: str, *, is_late: bool
) -> CapacityDecision:
    """Keep the reason, and announce it if it has changed."""
    is_new = key != pace.said
    risk = is_late and not pace.is_risk_told
    told = replace(
        pace, why=why, said=key, is_late=is_late, is_risk_told=pace.is_risk_told or is_late
    )
    commands = (Tell(pace.job, why, is_at_risk=risk),) if is_new else ()
    return replace(state, pace=told), commands
