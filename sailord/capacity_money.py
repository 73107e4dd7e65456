"""What rented machines cost, and when a budget forbids more: pure sums."""

from __future__ import annotations

from sailord.capacity_model import Capacity, Stop


def spent_usd(state: Capacity) -> float:
    """What was spent up to now; an ask in flight counts as if it had been granted at once."""
    spent = state.spent_usd + sum(machine.usd(state.now) for machine in state.machines.values())
    for asked in state.asks.values():
        spent += asked.usd_per_hour_all * max(state.now - asked.since, 0.0) / 3600
    return spent


def usd_per_hour(state: Capacity) -> float:
    """What runs up by the hour now, asks in flight among it."""
    rate = sum(m.usd_per_hour or 0.0 for m in state.machines.values() if m.ended_at is None)
    return rate + sum(asked.usd_per_hour_all for asked in state.asks.values())


def unpriced(state: Capacity) -> tuple[str, ...]:
    """The machines whose price nobody knows: what they cost is in no sum."""
    machines = state.machines.values()
    return tuple(sorted(m.instance.name for m in machines if m.usd_per_hour is None))


def stop_due(state: Capacity) -> Stop:
    """Whether the total budget allows no more than saving, or nothing at all."""
    policy = state.policy
    if policy.usd_max is None:
        return ""
    left, rate = policy.usd_max - spent_usd(state), usd_per_hour(state) / 3600
    if left <= rate * policy.parting_s / 2:
        return "ended"
    return "parting" if left <= rate * (policy.parting_s + policy.look_s) else ""


def has_money_for(state: Capacity, more_usd_per_hour: float) -> bool:
    """Whether so much more by the hour leaves every budget whole."""
    policy, rate = state.policy, usd_per_hour(state) + more_usd_per_hour
    if policy.usd_per_hour_max is not None and rate > policy.usd_per_hour_max:
        return False
    if policy.usd_max is None:
        return True
    reserve_s = policy.parting_s + 2 * policy.look_s
    return spent_usd(state) + rate * reserve_s / 3600 < policy.usd_max
