"""Cost of rented instances, and the limits that the budgets set."""

from __future__ import annotations

from sailord.capacity.core.model import CapacityState, StopCause


def spent_usd(state: CapacityState) -> float:
    """Return the dollars spent so far.

    A pending request counts as granted, unless the provider says that it waits.
    """
    spent = state.spent_usd + sum(rented.usd(state.now) for rented in state.instances.values())
    for asked in state.asks.values():
        if asked.is_queued:
            continue
        spent += asked.usd_per_hour_all * max(state.now - asked.counts_from, 0.0) / 3600
    return spent


def usd_at_risk(state: CapacityState) -> float:
    """Return what requests may have cost besides, while the provider did not show their zones."""
    asks = state.asks.values()
    return sum(each.usd_per_hour_all * (each.counts_from - each.since) / 3600 for each in asks)


def usd_per_hour(state: CapacityState) -> float:
    """Return the present cost in dollars an hour, pending requests included."""
    rate = sum(
        each.usd_per_hour or 0.0 for each in state.instances.values() if each.ended_at is None
    )
    return rate + sum(asked.usd_per_hour_all for asked in state.asks.values())


def unpriced(state: CapacityState) -> tuple[str, ...]:
    """Return the instances without a known price; no total includes them."""
    instances = state.instances.values()
    return tuple(sorted(each.instance.name for each in instances if each.usd_per_hour is None))


def stop_due(state: CapacityState, at_risk_usd: float = 0.0) -> StopCause:
    """Return what the total budget demands, if ``at_risk_usd`` were spent besides what is known.

    ``""``: nothing yet; ``"parting"``: the job saves its state, unused instances go; ``"ended"``:
    all go. The first half of ``parting_s`` is for saving, the second for repeating deletions that
    fail.
    """
    policy = state.policy
    if policy.usd_max is None:
        return ""
    left, rate = policy.usd_max - spent_usd(state) - at_risk_usd, usd_per_hour(state) / 3600
    if left <= rate * policy.parting_s / 2:
        return "ended"
    return "parting" if left <= rate * policy.reserve_s else ""


def usd_left(state: CapacityState) -> float | None:
    """Return the dollars left of the total budget for sure; ``None``: there is no budget."""
    most = state.policy.usd_max
    return None if most is None else max(most - spent_usd(state) - usd_at_risk(state), 0.0)


def usd_per_hour_limit(state: CapacityState) -> float | None:
    """Return the highest hourly cost that keeps every budget; ``None``: no limit.

    The rest of a total budget must last until the job has saved its state and all is deleted.
    """
    policy, left = state.policy, usd_left(state)
    limits = [] if policy.usd_per_hour_max is None else [policy.usd_per_hour_max]
    if left is not None:
        limits.append(left * 3600 / (policy.parting_s + 2 * policy.look_s))
    return min(limits, default=None)


def is_affordable(state: CapacityState, more_usd_per_hour: float) -> bool:
    """Return whether this additional hourly cost keeps every budget."""
    most = usd_per_hour_limit(state)
    return most is None or usd_per_hour(state) + more_usd_per_hour <= most
