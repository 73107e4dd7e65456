"""What is rented at present: kept by the capacity loop, read by the rest of sailord."""

from __future__ import annotations

from dataclasses import dataclass

from agents.protocol.codec import decode
from agents.protocol.records import JobId
from sailord.capacity.core.deadline import watches_deadline
from sailord.capacity.core.model import CapacityRecord, CapacityState
from sailord.cluster_records import Gateway
from sailord.planning.messages import PoolPrice


@dataclass(eq=False)
class RentedNow:
    """The state of the capacity loop; ``None``: no provider is configured."""

    state: CapacityState | None = None

    def keeps_deadline(self, job: JobId) -> bool:
        """Whether instances are rented so that this job meets its deadline."""
        return self.state is not None and watches_deadline(self.state, job)

    def prices(self) -> tuple[PoolPrice, ...]:
        """What the provider charges for machines of its pools."""
        found = {} if self.state is None else self.state.prices
        return tuple(
            PoolPrice(pool.zone, pool.machine, pool.gpu, pool.spot, usd / pool.gpus)
            for pool, usd in sorted(found.items())
        )

    def node_names(self) -> frozenset[str]:
        """The names of the nodes that are rented instances, or were: a lease ends later."""
        if self.state is None:
            return frozenset()
        there = (each.instance.node for each in self.state.instances.values())
        return frozenset((*there, *self.state.ended_nodes))

    def given_back(self) -> frozenset[str]:
        """The names of the nodes whose instances are deleted for sailord's own reasons."""
        instances = () if self.state is None else self.state.instances.values()
        return frozenset(
            each.instance.node for each in instances if each.why and each.ended_at is None
        )


async def read_capacity(gateway: Gateway) -> CapacityRecord:
    """Return the stored record; raises ``StoreError``, or ``WireError`` if it cannot be read."""
    entry = await gateway.store.get(gateway.keys.capacity)
    return CapacityRecord() if entry is None else decode(CapacityRecord, entry.value)
