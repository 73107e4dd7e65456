"""Decides whether a better plan is worth the move: its gain while it lasts against its cost.

The code reads no clock: times and ages are arguments, so the same history gives the same verdict.
It is a ski rental with advice:

- *Ski rental*: the job moves to a better plan once the gain forgone by waiting has reached the cost
  of the move. Waiting and moving then cost at most twice what the better of staying and moving at
  once would have cost, whatever happens next.
- *Advice*, for plans with nodes that the running one lacks: if the gain expected until nodes are
  next lost or added repays the cost, the job moves at once. If it repays half of the cost, the job
  waits as above; if less, up to twice as long, so that it does not move to nodes that are lost
  again soon. How often nodes are lost or added is learned, per pool, from the events observed
  there, so wrong advice is soon corrected.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from planner.move_policy.node_lifetimes import LifetimeHistory

Unit = Literal["samples", "$"]


@dataclass(frozen=True, slots=True)
class MoveThresholds:
    """Thresholds of the decision."""

    wait_max: float = 2.0
    """The gain forgone by waiting never exceeds this multiple of the cost."""
    horizon_s: float = 24 * 3600.0
    """A gain is expected to last at most this long."""


DEFAULT_THRESHOLDS = MoveThresholds()


@dataclass(frozen=True, slots=True)
class PossibleMove:
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
    """How long the new nodes have been up, on average; infinite if there are none."""
    needed: str | None = None
    """Why the old plan cannot go on, if it cannot."""
    seconds_left: float | None = None
    """Seconds until the job ends, if known."""
    before: Mapping[str, int] = field(default_factory=dict)
    """Nodes that the old plan uses, by pool."""
    after: Mapping[str, int] = field(default_factory=dict)
    """Nodes that the new plan uses, by pool."""
    full: frozenset[str] = frozenset()
    """Pools to which no node can be added."""
    loss_cost: float = 0.0
    """What the loss of a node in use costs, in ``unit``."""
    tied: str | None = None
    """Why the new plan cannot be told apart from the old one, if it cannot."""
    with_idle: str | None = None
    """How much worse plans with idle nodes are, for the reason to stay."""


@dataclass(frozen=True, slots=True)
class MoveVerdict:
    """Whether to move now, and the reason."""

    moves: bool
    reason: str
    expected_life_s: float
    gain: float
    """Gain over its expected life."""
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
    offer: PossibleMove,
    history: LifetimeHistory,
    *,
    now_s: float,
    last_move_s: float | None = None,
    rules: MoveThresholds = DEFAULT_THRESHOLDS,
) -> MoveVerdict:
    """Decide whether to move.

    ``last_move_s`` is the time of the job's last voluntary move. Where nodes are new, the job waits
    until the gain forgone reaches ``cost * (cost / gain - 1)``, where ``gain`` is all that is
    expected: not at all if that repays the cost, for the whole cost if it repays half.
    """
    expected = _expect(offer, history, now_s=now_s, rules=rules)
    life_s = expected.life_s
    gain = max(0.0, offer.gain_per_s) * max(0.0, life_s - offer.downtime_s)
    cost = offer.cost + expected.added_loss_chance * offer.loss_cost

    def verdict(moves: bool, reason: str, ask_again_s: float | None = None) -> MoveVerdict:
        return MoveVerdict(moves, reason, life_s, gain, cost, offer.unit, ask_again_s)

    if offer.needed is not None:
        return verdict(True, offer.needed)
    if offer.gain_per_s <= 0:
        said = "no better plan found"
        return verdict(False, said if offer.with_idle is None else f"{said}: {offer.with_idle}")
    if offer.tied is not None:
        return verdict(False, f"the best plan is {offer.tied}")
    rate, price = _amount(offer.gain_per_s, offer.unit), _amount(cost, offer.unit)
    left_s = min(rules.horizon_s, math.inf if offer.seconds_left is None else offer.seconds_left)
    if offer.gain_per_s * max(0.0, left_s - offer.downtime_s) <= offer.cost:
        until = "until the job ends" if left_s == offer.seconds_left else f"for {span(left_s)}"
        return verdict(False, f"gains {rate}/s {until}, less than the {price} it costs")
    sums = (
        f"gains {rate}/s for {span(life_s)}, in all {_amount(gain, offer.unit)}, and costs {price}"
    )
    waits_for = cost
    if offer.newcomers:
        not_repaid = cost / gain - 1 if gain > 0 else math.inf
        waits_for = cost * min(rules.wait_max, max(0.0, not_repaid))
    if waits_for <= 0:
        return verdict(True, sums)
    since_s = math.inf if last_move_s is None else now_s - last_move_s
    waited_s = max(0.0, min(offer.newcomer_age_s, since_s))
    wait_s = waits_for / offer.gain_per_s - waited_s
    if wait_s <= 0:
        forgone = "" if waited_s == math.inf else f"; waiting for {span(waited_s)} cost enough"
        return verdict(True, sums + forgone)
    return verdict(
        False,
        f"{sums}; the gain forgone by waiting reaches {_amount(waits_for, offer.unit)}"
        f" in {span(wait_s)}",
        wait_s,
    )


@dataclass(frozen=True, slots=True)
class _Expected:
    life_s: float
    """Until nodes are lost or added, or the job ends."""
    added_loss_chance: float
    """The chance that the next loss hits the new plan but would not have hit the old one."""


def _expect(
    offer: PossibleMove, history: LifetimeHistory, *, now_s: float, rules: MoveThresholds
) -> _Expected:
    """How long the gain lasts, and the chance that a loss of new nodes ends it.

    Any loss of a node in use ends it, since the job must then leave both plans. So does an
    addition, if the job then moves again.
    """
    ends = [rules.horizon_s]
    if offer.seconds_left is not None:
        ends.append(offer.seconds_left)
    if not offer.newcomers:
        return _Expected(min(ends), 0.0)
    after = offer.after or offer.newcomers
    all_nodes = {
        pool: max(offer.before.get(pool, 0), after.get(pool, 0))
        for pool in sorted({*offer.before, *after})
    }
    hits = history.hits_per_s(all_nodes, now_s)
    spared = hits - history.hits_per_s(offer.before, now_s)
    each_gain = offer.gain_per_s / sum(offer.newcomers.values())
    # The chance that the job would move again after an addition; 1 if its gain repays that move.
    second_move = min(1.0, each_gain / (hits * offer.cost)) if hits * offer.cost > 0 else 1.0
    growing = [pool for pool in all_nodes if pool not in offer.full]
    changes = hits + second_move * history.additions_per_s(growing, now_s)
    if changes > 0:
        ends.append(1 / changes)
    return _Expected(min(ends), max(0.0, spared) / hits if hits > 0 else 0.0)


def _amount(value: float, unit: Unit) -> str:
    return f"${value:,.4g}" if unit == "$" else f"{value:,.4g} samples"


def span(seconds: float) -> str:
    """A duration in a readable unit."""
    for size, name in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {name}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"
