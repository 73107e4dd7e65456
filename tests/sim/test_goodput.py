"""The goodput ledger over a storm of 30 minutes in the simulated cluster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sailord.goodput.core.shares import rest_of
from tests.sim.books import Books
from tests.sim.faults import FaultInjector
from tests.sim.world import Faults, World

STORM_S = 1800.0
KINDS = tuple(kind for kind in Faults().kinds if kind != "clock_set")
"""Without clocks that are set by hours: then sailord's wall clock is not the world's."""


@pytest.mark.sim
@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 6])
def test_causes_sum_to_the_wall_clock_and_dollars_to_the_bill(seed: int) -> None:
    world = World(seed, replace(Faults(), kinds=KINDS))
    books = world.books = Books()
    world.clock.after(10.0, lambda: FaultInjector(world, until=STORM_S))
    world.clock.run_until(STORM_S)
    head, ledger = next(iter(world.heads.values())), books.last
    assert books.from_s is not None
    assert books.leaders > 3
    assert len(books.ended) > 5
    paid_s = books.machine_s(head, books.from_s, books.until_s)
    booked_s = (sum(each.gpu_us for each in ledger.accounts) - ledger.ahead_us) / 1e6
    assert booked_s == pytest.approx(paid_s, rel=1e-6)
    booked_usd = sum(each.usd for each in ledger.accounts) - ledger.ahead_usd
    bill = books.bill(head, books.until_s) - (ledger.bill_from_usd or 0.0)
    assert booked_usd == pytest.approx(bill, abs=0.01)
    for kind in ("day", "job"):
        assert sum(abs(each.gpu_us) for each in rest_of(books.last_shares, kind, ledger)) == 0
    jobs = {each.name for each in books.last_shares.values() if each.kind == "job"}
    assert len(jobs) > 1, "jobs had the cluster, and at times none"
