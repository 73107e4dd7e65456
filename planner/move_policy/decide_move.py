"""Decide whether a better plan is worth the move: its gain while it lasts against its cost.

The code reads no clock: times and ages are arguments, so the same history gives the same verdict.
Four rules prevent a storm of moves when capacity comes and goes:

1. new nodes must have been up for a while, longer for every recent loss in their pool;
2. the gain counts only for the expected life of the new nodes;
3. the gain must be a multiple of the cost, since both are estimates;
4. after a voluntary move there is a cooldown, so that such moves take a small share of time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from planner.move_policy.node_lifetimes import History

Unit = Literal["samples", "$"]


@dataclass(frozen=True, slots=True)
class Rules:
    """Thresholds of the decision."""

    settle_s: float = 30.0
    """Nodes are used once they have been up for this long."""
    settle_s_max: float = 600.0
    margin: float = 1.5
    """The gain must be this multiple of the cost."""
    share_max: float = 0.05
    """The largest share of time that voluntary moves may take."""
    horizon_s: float = 24 * 3600.0
    """Upper limit of the expected life of a plan."""


DEFAULT_RULES = Rules()


@dataclass(frozen=True, slots=True)
class Offer:
    """A possible move, with its gain and cost."""

    gain_per_s: float
    """Gain of the new plan over the old one, in ``unit`` per second of training."""
    unit: Unit
    cost: float
    """Cost of the move, in the same unit."""
    downtime_s: float
    newcomers: Mapping[str, int]
    """Nodes that only the new plan uses, by pool."""
    newcomer_age_s: float
    """Seconds that the youngest of them has been up; infinite if there are none."""
    needed: str | None = None
    """Why the old plan cannot go on, if it cannot."""
    seconds_left: float | None = None
    """Seconds until the job ends, if known."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether to move now, and the reason."""

    moves: bool
    reason: str
    expected_life_s: float
    gain: float
    """Over the expected life."""
    cost: float
    unit: Unit
    ask_again_s: float | None = None
    """Seconds after which to ask again, if it is only too early."""

    @property
    def sentence(self) -> str:
        """The verdict and its reason."""
        too_early = "stay" if self.ask_again_s is None else "not yet"
        return f"{'move' if self.moves else too_early}: {self.reason}"

    def to_json(self) -> dict[str, Any]:
        return {
            "moves": self.moves,
            "reason": self.sentence,
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
    """Decide whether to move.

    ``last_move_s`` is the time of the job's last voluntary move.
    """
    life_s = expected_life_s(offer, history, now_s=now_s, rules=rules)
    gain = max(0.0, offer.gain_per_s) * max(0.0, life_s - offer.downtime_s)

    def verdict(moves: bool, reason: str, ask_again_s: float | None = None) -> Verdict:
        return Verdict(moves, reason, life_s, gain, offer.cost, offer.unit, ask_again_s)

    if offer.needed is not None:
        return verdict(True, offer.needed)
    if offer.gain_per_s <= 0:
        return verdict(False, "no better plan found")
    sums = (
        f"gains {_amount(offer.gain_per_s, offer.unit)}/s for {_span(life_s)}, in all"
        f" {_amount(gain, offer.unit)}, and costs {_amount(offer.cost, offer.unit)}"
    )
    if gain <= rules.margin * offer.cost:
        return verdict(False, f"{sums}; the gain must exceed {rules.margin:g} times the cost")
    settle_s = max(
        (settling_s(history, pool, now_s=now_s, rules=rules) for pool in offer.newcomers),
        default=0.0,
    )
    if offer.newcomer_age_s < settle_s:
        wait_s = settle_s - offer.newcomer_age_s
        return verdict(
            False,
            f"the newest node has been up for {_span(offer.newcomer_age_s)}, and in its"
            f" pool nodes must be up for {_span(settle_s)}",
            wait_s,
        )
    if last_move_s is not None:
        rest_s = offer.downtime_s / rules.share_max
        wait_s = last_move_s + rest_s - now_s
        if wait_s > 0:
            return verdict(
                False,
                f"the last move was {_span(now_s - last_move_s)} ago, and a move of"
                f" {_span(offer.downtime_s)} needs a cooldown of {_span(rest_s)}",
                wait_s,
            )
    return verdict(True, sums)


def expected_life_s(
    offer: Offer, history: History, *, now_s: float, rules: Rules = DEFAULT_RULES
) -> float:
    """How long the advantage lasts: until the first new node is lost, or the job ends.

    Nodes that both plans use do not count, since their loss ends both.
    """
    lives = [rules.horizon_s]
    if offer.newcomers:
        lives.append(history.life_s(offer.newcomers, now_s))
    if offer.seconds_left is not None:
        lives.append(offer.seconds_left)
    return min(lives)


def settling_s(history: History, pool: str, *, now_s: float, rules: Rules = DEFAULT_RULES) -> float:
    """How long a new node of a pool must have been up: doubled by every recent loss there."""
    flaps = history.record(pool, now_s).flaps
    doubled: float = rules.settle_s * 2.0 ** min(flaps, 30.0)
    return min(doubled, rules.settle_s_max)


def _amount(value: float, unit: Unit) -> str:
    return f"${value:,.4g}" if unit == "$" else f"{value:,.4g} samples"


def _span(seconds: float) -> str:
    """A duration in a readable unit."""
    for size, name in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {name}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"
