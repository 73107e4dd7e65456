"""How often nodes of a pool are lost or added, learned from what was observed.

Losses come as events: a preemption often takes many nodes of a pool at once, so the code counts
events, and the share of the pool that each takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

PRIOR_LIFE_S = 2 * 3600.0
"""Assumed lifetime of a node before anything was observed in its pool."""
PRIOR_BETWEEN_S = 3600.0
"""Assumed time between two events in a pool; an event may take several nodes."""
PRIOR_EVENTS = 0.5
"""Weight of a prior, in observed events."""
PRIOR_SHARE = 0.5
"""Assumed share of a pool that a loss takes."""
FORGET_HALF_LIFE_S = 6 * 3600.0
"""Half-life of observations, since clouds have good and bad days."""
FLAP_HALF_LIFE_S = 600.0
"""Half-life of recent observations, since events come in bursts."""


@dataclass(frozen=True, slots=True)
class PoolRecord:
    """Observations of one pool."""

    at_s: float
    """Time up to which the sums below count."""
    nodes_up: int = 0
    lived_s: float = 0.0
    """Node-seconds observed, with older ones counting less."""
    losses: float = 0.0
    """Nodes lost, with older ones counting less."""
    flaps: float = 0.0
    """Loss events, with those before the last minutes counting little (``FLAP_HALF_LIFE_S``)."""
    seen_s: float = 0.0
    """Seconds observed, with older ones counting less."""
    seen_lately_s: float = 0.0
    """Seconds observed, weighted like ``flaps``."""
    events: float = 0.0
    """Loss events, with older ones counting less."""
    shares: float = 0.0
    """Sum of the shares of the pool that these losses took."""
    additions: float = 0.0
    """Addition events, with older ones counting less."""
    additions_lately: float = 0.0
    """Addition events, weighted like ``flaps``."""

    def at(self, now_s: float) -> PoolRecord:
        """This record, aged to a later time."""
        passed = max(0.0, now_s - self.at_s)
        kept = 0.5 ** (passed / FORGET_HALF_LIFE_S)
        kept_lately = 0.5 ** (passed / FLAP_HALF_LIFE_S)
        return replace(
            self,
            at_s=max(now_s, self.at_s),
            lived_s=self.lived_s * kept + self.nodes_up * passed,
            losses=self.losses * kept,
            flaps=self.flaps * kept_lately,
            seen_s=_weigh_observed(self.seen_s, passed, FORGET_HALF_LIFE_S),
            seen_lately_s=_weigh_observed(self.seen_lately_s, passed, FLAP_HALF_LIFE_S),
            events=self.events * kept,
            shares=self.shares * kept,
            additions=self.additions * kept,
            additions_lately=self.additions_lately * kept_lately,
        )

    @property
    def node_life_s(self) -> float:
        """Mean lifetime of a node, with a prior worth one loss."""
        return (self.lived_s + PRIOR_LIFE_S) / (self.losses + 1)

    @property
    def losses_per_s(self) -> float:
        """Events per second at which nodes are lost."""
        return self._per_s(self.events, self.flaps)

    @property
    def additions_per_s(self) -> float:
        """Events per second at which nodes are added."""
        return self._per_s(self.additions, self.additions_lately)

    @property
    def loss_share(self) -> float:
        """Share of the pool that a loss takes."""
        return (self.shares + PRIOR_SHARE) / (self.events + 1)

    def hit_chance(self, nodes: int) -> float:
        """Return the chance that a loss in this pool takes at least one of ``nodes`` nodes."""
        total = max(nodes, self.nodes_up)
        if not nodes:
            return 0.0
        taken = max(1.0, self.loss_share * total)
        spared = 1.0 - nodes / total
        return 1.0 if spared <= 0 else 1.0 - float(spared**taken)

    def _per_s(self, events: float, lately: float) -> float:
        """Return the recent rate, with the long-term rate as its prior."""
        of_old = (events + PRIOR_EVENTS) / (self.seen_s + PRIOR_EVENTS * PRIOR_BETWEEN_S)
        return (lately + PRIOR_EVENTS) / (self.seen_lately_s + PRIOR_EVENTS / of_old)


def _weigh_observed(before_s: float, passed_s: float, half_life_s: float) -> float:
    """Return the seconds observed, weighted with the same half-life as the events."""
    kept: float = 0.5 ** (passed_s / half_life_s)
    return before_s * kept + half_life_s / math.log(2) * (1 - kept)


@dataclass(frozen=True, slots=True)
class LifetimeHistory:
    """The records of all pools, by ``"<gpu>@<zone>"`` or another name."""

    pools: Mapping[str, PoolRecord] = field(default_factory=dict)

    def seen(
        self, now_s: float, *, up: Mapping[str, int], lost: Mapping[str, int]
    ) -> LifetimeHistory:
        """The history after an observation: nodes up now, and nodes lost since the last one."""
        pools = dict(self.pools)
        for name in sorted({*up, *lost, *pools}):
            is_new = name not in pools
            record = pools.get(name, PoolRecord(now_s)).at(now_s)
            gone, now_up = lost.get(name, 0), up.get(name, 0)
            came = not is_new and now_up > record.nodes_up - gone
            pools[name] = replace(
                record,
                nodes_up=now_up,
                losses=record.losses + gone,
                flaps=record.flaps + (gone > 0),
                events=record.events + (gone > 0),
                shares=record.shares + min(1.0, gone / max(1, record.nodes_up)),
                additions=record.additions + came,
                additions_lately=record.additions_lately + came,
            )
        return LifetimeHistory(pools)

    def record(self, pool: str, now_s: float) -> PoolRecord:
        """One pool's record at ``now_s``."""
        return self.pools.get(pool, PoolRecord(now_s)).at(now_s)

    def hits_per_s(self, nodes_by_pool: Mapping[str, int], now_s: float) -> float:
        """How often a loss takes at least one of these nodes."""
        total = 0.0
        for pool, nodes in sorted(nodes_by_pool.items()):
            record = self.record(pool, now_s)
            total += record.losses_per_s * record.hit_chance(nodes)
        return total

    def hits(self, nodes_by_pool: Mapping[str, int], now_s: float) -> tuple[float, float]:
        """Losses that would have taken at least one of these nodes, and the seconds observed.

        In both, older observations count less.
        """
        records = [(self.record(pool, now_s), nodes) for pool, nodes in nodes_by_pool.items()]
        losses = sum(record.events * record.hit_chance(nodes) for record, nodes in records)
        return losses, max((record.seen_s for record, _ in records), default=0.0)

    def additions_per_s(self, pools: Iterable[str], now_s: float) -> float:
        """How often nodes are added to these pools."""
        return sum(self.record(pool, now_s).additions_per_s for pool in sorted(pools))
