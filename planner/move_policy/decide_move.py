"""Is it worth moving? What a better plan brings while it lasts, against what getting there costs.

Nothing here knows the time of day: moments and ages are arguments, so that the same history gives
the same verdict. Four rules keep capacity that comes and goes from causing a storm:

1. newcomers must have been up for a while, longer for every recent loss in their pool;
2. the gain counts only for as long as the newcomers are expected to live;
3. the gain must be a multiple of the cost, because both are guesses;
4. after a move that was not necessary there is a rest, so that such moves take a small share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from planner.move_policy.node_lifetimes import History

Unit = Literal["samples", "$"]


@dataclass(frozen=True, slots=True)
class Rules:
    """How careful to be."""

    settle_s: float = 30.0
    """Newcomers are taken once they have been up for this long."""
    settle_s_max: float = 600.0
    margin: float = 1.5
    """The gain must be so many times the cost."""
    share_max: float = 0.05
    """The most of all time that moves may take that are not necessary."""
    horizon_s: float = 24 * 3600.0
    """No state is believed to last longer, whatever was seen."""


DEFAULT_RULES = Rules()


@dataclass(frozen=True, slots=True)
class Offer:
    """A move that could be made."""

    gain_per_s: float
    """What the new plan brings more than the old one, in ``unit`` per second of training."""
    unit: Unit
    cost: float
    """What the move takes, in the same unit."""
    downtime_s: float
    newcomers: Mapping[str, int]
    """Nodes that the new plan uses and the old one does not, by pool."""
    newcomer_age_s: float
    """How long the youngest of them has been up; infinite if there are none."""
    needed: str | None = None
    """Why the old plan cannot go on, if it cannot."""
    seconds_left: float | None = None
    """Until the job ends, where that is known."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether to move now, and a sentence that says why."""

    moves: bool
    reason: str
    expected_life_s: float
    gain: float
    """Over the expected life."""
    cost: float
    unit: Unit
    ask_again_s: float | None = None
    """If it is only too early: when to ask again, from now."""

    def to_json(self) -> dict[str, Any]:
        return {
            "moves": self.moves,
            "reason": self.reason,
            "expected_life_s": self.expected_life_s,
            "gain": self.gain,
            "cost": self.cost,
            "unit": self.unit,
            "ask_again_s": self.ask_again_s,
        }


def judge_move(
    offer: Offer,
    history: History,
    *,
    now_s: float,
    last_move_s: float | None = None,
    rules: Rules = DEFAULT_RULES,
) -> Verdict:
    """Say whether to move.

    ``last_move_s`` is when the job last moved without having to.
    """
    life_s = expected_life_s(offer, history, now_s=now_s, rules=rules)
    gain = max(0.0, offer.gain_per_s) * max(0.0, life_s - offer.downtime_s)

    def verdict(moves: bool, reason: str, ask_again_s: float | None = None) -> Verdict:
        return Verdict(moves, reason, life_s, gain, offer.cost, offer.unit, ask_again_s)

    if offer.needed is not None:
        return verdict(True, f"move: {offer.needed}")
    if offer.gain_per_s <= 0:
        return verdict(False, "stay: no plan that was found is better than the running one")
    sums = (
        f"it brings {_amount(offer.gain_per_s, offer.unit)}/s for {_span(life_s)}, so"
        f" {_amount(gain, offer.unit)}, and costs {_amount(offer.cost, offer.unit)}"
    )
    if gain <= rules.margin * offer.cost:
        return verdict(
            False, f"stay: {sums}; the gain would have to be {rules.margin:g} times the cost"
        )
    settle_s = max(
        (settling_s(history, pool, now_s=now_s, rules=rules) for pool in offer.newcomers),
        default=0.0,
    )
    if offer.newcomer_age_s < settle_s:
        wait_s = settle_s - offer.newcomer_age_s
        return verdict(
            False,
            f"not yet: the newest node has been up for {_span(offer.newcomer_age_s)}, and here"
            f" one must have been up for {_span(settle_s)}",
            wait_s,
        )
    if last_move_s is not None:
        rest_s = offer.downtime_s / rules.share_max
        wait_s = last_move_s + rest_s - now_s
        if wait_s > 0:
            return verdict(
                False,
                f"not yet: it moved {_span(now_s - last_move_s)} ago, and a move that takes"
                f" {_span(offer.downtime_s)} wants {_span(rest_s)} in between",
                wait_s,
            )
    return verdict(True, f"move: {sums}")


def expected_life_s(
    offer: Offer, history: History, *, now_s: float, rules: Rules = DEFAULT_RULES
) -> float:
    """How long the advantage lasts: until the first newcomer goes, or the job ends.

    Nodes that both plans use do not count, since their loss ends both.
    """
    lives = [rules.horizon_s]
    if offer.newcomers:
        lives.append(history.life_s(offer.newcomers, now_s))
    if offer.seconds_left is not None:
        lives.append(offer.seconds_left)
    return min(lives)


def settling_s(history: History, pool: str, *, now_s: float, rules: Rules = DEFAULT_RULES) -> float:
    """How long a newcomer of a pool must have been up: doubled by every recent loss there."""
    flaps = history.record(pool, now_s).flaps
    doubled: float = rules.settle_s * 2.0 ** min(flaps, 30.0)
    return min(doubled, rules.settle_s_max)


def _amount(value: float, unit: Unit) -> str:
    return f"${value:,.4g}" if unit == "$" else f"{value:,.4g} samples"


def _span(seconds: float) -> str:
    """Seconds as people say them."""
    for size, name in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {name}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"
