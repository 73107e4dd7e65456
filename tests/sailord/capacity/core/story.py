"""Events for the capacity decisions in their order, and what each led to."""

from __future__ import annotations

from sailord.capacity.core import model
from sailord.capacity.core.decide import decide
from sailord.capacity.core.model import CapacityRecord, CapacityState
from sailord.providers.interface import Instance, Observation, Pool

A = Pool("zone-a", "large", "gpu", 4, spot=True)
B = Pool("zone-b", "large", "gpu", 4, spot=True)
FLEX = Pool("zone-a", "large", "gpu", 4, spot=False, flex=True)
PRICES = {A: 3.6, B: 7.2, FLEX: 3.6}
FIRST, SECOND = (model.request_id_of("t1", number) for number in (1, 2))


class Story:
    """Events in their order, and what each led to."""

    def __init__(
        self,
        policy: model.CapacityPolicy | None = None,
        books: CapacityRecord | None = None,
        at: float = 0.0,
    ) -> None:
        self.state, self.orders = CapacityState(policy or model.CapacityPolicy()), ()
        self.hear(model.TookOver(at, "t1", books or CapacityRecord()))
        self.hear(model.PricesRead(at, PRICES)).hear(model.QuotasRead(at, ()))

    def hear(self, event: model.CapacityEvent) -> Story:
        self.state, self.orders = decide(self.state, event)
        return self

    def count(self, until: float, agents, in_use=frozenset()) -> Story:
        """Count agents every 20 s, as a sailord that is never away does; keep all orders."""
        at, given = max(self.state.looked_at, self.state.now), ()
        while at < until:
            at = min(at + 20.0, until)
            self.hear(model.AgentsCounted(at, agents, in_use))
            given += self.orders
        self.orders = given
        return self

    def of(self, kind):
        return [order for order in self.orders if isinstance(order, kind)]

    def see(self, at, *instances, **about) -> Story:
        return self.hear(model.Observed(at, Observation(at, instances, **about)))

    def asks(self):
        return [(order.ask.pool, order.ask.count) for order in self.of(model.Create)]


def instance(number=1, pool=A, request=FIRST, state="running", at=10.0):
    return Instance(str(number), f"m{number}", pool, state, at, request, f"n{number}")
