"""How long nodes live, learnt from what was seen of each pool: the expected life of a new state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

PRIOR_LIFE_S = 2 * 3600.0
"""What a node is believed to live before anything was seen of its pool."""
FORGET_HALF_LIFE_S = 6 * 3600.0
"""What was seen this long ago counts half: clouds have good and bad days."""
FLAP_HALF_LIFE_S = 600.0
"""A loss makes newcomers of its pool suspect; after this long, half as much."""


@dataclass(frozen=True, slots=True)
class PoolRecord:
    """What is remembered of one pool."""

    at_s: float
    """Up to when the sums below go."""
    nodes_up: int = 0
    lived_s: float = 0.0
    """Node-seconds seen, older ones counting less."""
    losses: float = 0.0
    """Nodes lost, older ones counting less."""
    flaps: float = 0.0
    """Moments at which some were lost, forgotten soon."""

    def at(self, now_s: float) -> PoolRecord:
        """The same record, brought up to a later moment."""
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
        """The mean life of one node: what was seen, and one believed life beside it."""
        return (self.lived_s + PRIOR_LIFE_S) / (self.losses + 1)


@dataclass(frozen=True, slots=True)
class History:
    """The records of all pools, by ``"<gpu>@<zone>"`` or whatever else tells them apart."""

    pools: Mapping[str, PoolRecord] = field(default_factory=dict)

    def seen(self, now_s: float, *, up: Mapping[str, int], lost: Mapping[str, int]) -> History:
        """What is known after a look: nodes that are up now, and those lost since the last look."""
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
        """One pool's record as it stands now."""
        return self.pools.get(pool, PoolRecord(now_s)).at(now_s)

    def life_s(self, nodes_by_pool: Mapping[str, int], now_s: float) -> float:
        """How long it will be, on average, until the first of these nodes is lost."""
        rate = sum(
            count / self.record(pool, now_s).node_life_s
            for pool, count in sorted(nodes_by_pool.items())
        )
        return 1 / rate if rate > 0 else PRIOR_LIFE_S
