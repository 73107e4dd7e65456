"""How long a pool gets no request after a refusal or a failed boot."""

from __future__ import annotations

from dataclasses import replace

from sailord.capacity.core.model import (
    COOLDOWN_S,
    CapacityState,
    Cooldown,
    CooldownKind,
    StockReported,
)
from sailord.providers.interface import Pool


def cool_down(
    state: CapacityState,
    pool: Pool,
    kind: CooldownKind,
    text: str,
    retry_after_s: float | None = None,
) -> CapacityState:
    """Start a pool's cooldown; each refusal in a row doubles it."""
    policy, before = state.policy, state.cooldowns.get(pool)
    if before is not None and state.now > before.until + policy.rest_max_s:
        before = None  # The last refusal is too old to count.
    refusals = 1 if before is None else before.refusals + 1
    wait_s = min(COOLDOWN_S[kind] * 2.0 ** min(refusals - 1, 20), policy.rest_max_s)
    until = state.now + max(wait_s, retry_after_s or 0.0)
    since = state.now if before is None else before.since
    return replace(
        state,
        cooldowns={**state.cooldowns, pool: Cooldown(until, kind, refusals, text, since)},
    )


def cooldown_of(state: CapacityState, pool: Pool) -> Cooldown | None:
    """Return why a pool gets no request now: its cooldown, or a zone that is not seen for long."""
    rest = state.cooldowns.get(pool)
    if rest is not None and state.now < rest.until:
        return rest
    since = state.unseen_zones.get(pool.zone)
    if since is None or state.now < since + state.policy.doubt_s:
        return None
    why = f"the provider does not say what runs in {pool.zone}"
    return Cooldown(state.now + state.policy.look_s, "unknown", 0, why, since)


def end_stockouts(state: CapacityState, event: StockReported) -> CapacityState:
    """End the cooldown of pools that were out of stock where GPUs are reported."""
    cooldowns = {
        pool: rest
        for pool, rest in state.cooldowns.items()
        if rest.kind != "stockout" or (pool.zone, pool.gpu) != (event.zone, event.gpu)
    }
    return replace(state, cooldowns=cooldowns)
