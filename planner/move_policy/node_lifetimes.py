"""Expected lifetimes of nodes, learned from the losses in each pool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

PRIOR_LIFE_S = 2 * 3600.0
"""Assumed lifetime of a node before anything was observed in its pool."""
FORGET_HALF_LIFE_S = 6 * 3600.0
"""Half-life of observations, since clouds have good and bad days."""
FLAP_HALF_LIFE_S = 600.0
"""Half-life of the suspicion that a loss casts on new nodes of its pool."""


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
    """Times at which nodes were lost, forgotten quickly."""

    def at(self, now_s: float) -> PoolRecord:
        """The same record at a later time."""
        passed = max(0.0, now_s - self.at_s)
        kept = 0.5 ** (passed / FORGET_HALF_LIFE_S)
        return replace(
            self,
            at_s=max(now_s, self.at_s),
            lived_s=self.lived_s * kept + self.nodes_up * passed,
            losses=self.losses * kept,
            flaps=self.flaps * 0.5 ** (passed / FLAP_HALF_LIFE_S),
        )

    @property
    def node_life_s(self) -> float:
        """Mean lifetime of a node, with a prior worth one loss."""
        return (self.lived_s + PRIOR_LIFE_S) / (self.losses + 1)


@dataclass(frozen=True, slots=True)
class History:
    """The records of all pools, by ``"<gpu>@<zone>"`` or another name."""

    pools: Mapping[str, PoolRecord] = field(default_factory=dict)

    def seen(self, now_s: float, *, up: Mapping[str, int], lost: Mapping[str, int]) -> History:
        """The history after an observation: nodes up now, and nodes lost since the last one."""
        pools = dict(self.pools)
        for name in sorted({*up, *lost, *pools}):
            record = pools.get(name, PoolRecord(now_s)).at(now_s)
            gone = lost.get(name, 0)
            pools[name] = replace(
                record,
                nodes_up=up.get(name, 0),
                losses=record.losses + gone,
                flaps=record.flaps + (gone > 0),
            )
        return History(pools)

    def record(self, pool: str, now_s: float) -> PoolRecord:
        """One pool's record at ``now_s``."""
        return self.pools.get(pool, PoolRecord(now_s)).at(now_s)

    def life_s(self, nodes_by_pool: Mapping[str, int], now_s: float) -> float:
        """Mean time until the first of these nodes is lost."""
        rate = sum(
            count / self.record(pool, now_s).node_life_s
            for pool, count in sorted(nodes_by_pool.items())
        )
        return 1 / rate if rate > 0 else PRIOR_LIFE_S
