"""Events for the capacity decisions in their order, and what each led to."""

from __future__ import annotations

from sailord.capacity.core.decide import decide
from sailord.capacity.core.model import (
    CapacityRecord,
    CapacityState,
    Create,
    Event,
    Observed,
    Policy,
    PricesRead,
    QuotasRead,
    TookOver,
    request_id_of,
)
from sailord.providers.interface import Instance, Observation, Pool

A = Pool("zone-a", "large", "gpu", 4, spot=True)
B = Pool("zone-b", "large", "gpu", 4, spot=True)
PRICES = {A: 3.6, B: 7.2}
FIRST, SECOND = (request_id_of("t1", number) for number in (1, 2))


class Story:
    """Events in their order, and what each led to."""

    def __init__(self, policy: Policy | None = None, books: CapacityRecord | None = None) -> None:
        self.state, self.orders = CapacityState(policy or Policy()), ()
        self.hear(TookOver(0.0, "t1", books or CapacityRecord()))
        self.hear(PricesRead(0.0, PRICES)).hear(QuotasRead(0.0, ()))

    def hear(self, event: Event) -> Story:
        self.state, self.orders = decide(self.state, event)
        return self

    def of(self, kind):
        return [order for order in self.orders if isinstance(order, kind)]

    def see(self, at, *instances, **about) -> Story:
        return self.hear(Observed(at, Observation(at, instances, **about)))

    def asks(self):
        return [(order.ask.pool, order.ask.count) for order in self.of(Create)]


def machine(number=1, pool=A, request=FIRST, state="running", at=10.0):
    return Instance(str(number), f"m{number}", pool, state, at, request, f"n{number}")
