"""What rented machines cost, and when a budget forbids more: pure sums."""

from __future__ import annotations

from sailord.capacity.core.model import Capacity, Stop


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


def usd_left(state: Capacity) -> float | None:
    """What of a total budget is not spent yet; ``None``: there is none."""
    most = state.policy.usd_max
    return None if most is None else max(most - spent_usd(state), 0.0)


def usd_per_hour_most(state: Capacity) -> float | None:
    """The most that may run up by the hour, so that every budget stays whole; ``None``: no limit.

    What is left of a total budget has to last until everything could be saved and deleted.
    """
    policy, left = state.policy, usd_left(state)
    limits = [] if policy.usd_per_hour_max is None else [policy.usd_per_hour_max]
    if left is not None:
        limits.append(left * 3600 / (policy.parting_s + 2 * policy.look_s))
    return min(limits, default=None)


def has_money_for(state: Capacity, more_usd_per_hour: float) -> bool:
    """Whether so much more by the hour leaves every budget whole."""
    most = usd_per_hour_most(state)
    return most is None or usd_per_hour(state) + more_usd_per_hour <= most
