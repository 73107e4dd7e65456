"""A preemption and its replacement end to end: only Google Cloud is fake."""

from __future__ import annotations

import pytest

from tests.fakes.gce.cloud import STOCKOUT
from tests.gce.rented_cluster import HERE, LARGE, NOTICE_S, THERE, RentedCluster, rented_cluster
from tests.sailord.providers.emulated_cluster import wait_until

CAPACITY = """
surplus_s = 8.0
delete_again_s = 3.0
rest_max_s = 6.0
"""
LEASE_S = 10.0
"""Long: an instance whose agent is silent is given up, and no other one takes its place here."""
WITHIN_S = 600.0
"""Renting waits until observed lifetimes and additions make it pay, which may take minutes."""


@pytest.mark.at_length
def test_a_preemption_a_stockout_and_a_replacement_in_another_zone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("story") / "c"
    with rented_cluster(folder, CAPACITY, lease_s=LEASE_S) as life:
        _tell(life)


def _tell(life: RentedCluster) -> None:
    cloud = life.cloud
    cloud.stock = {(HERE, LARGE, True): 2, (THERE, LARGE, True): 2}
    life.submit()
    wait_until(lambda: life.trains_on(4))
    assert sorted(vm.zone for vm in cloud.there()) == [HERE, HERE, THERE, THERE]

    # One is preempted; its own zone has no other, and the next one has a single one.
    cloud.stock = {(HERE, LARGE, True): 0, (THERE, LARGE, True): 1}
    taken = next(vm for vm in cloud.there() if vm.zone == HERE)
    known = set(cloud.operations)
    cloud.preempt(taken.name, notice_s=NOTICE_S)
    wait_until(lambda: taken.name not in life.job()["members"])
    assert taken.status == "RUNNING", "the job left before the power did"
    life.wait_for_steps()
    wait_until(lambda: not taken.is_there)
    wait_until(lambda: life.trains_on(4), within_s=WITHIN_S)
    assert sorted(vm.zone for vm in cloud.there()) == [HERE, THERE, THERE, THERE]
    # Its own zone is asked too: not always first, since it may just rest after a refusal.
    wait_until(lambda: _is_refused(life, known))
    life.wait_for_steps()

    lost = [text for text in life.history() if " lost): " in text]
    assert lost, "generations are told with what they lost"
    assert all("0 steps lost" in text for text in lost), lost
    books = life.end_job()
    wait_until(lambda: cloud.running_operations() == [])
    assert books.spent_usd == pytest.approx(cloud.bill(), abs=1e-6)


def _is_refused(life: RentedCluster, known: set[str]) -> bool:
    """Return whether the emptied zone has refused a new request."""
    return any(
        one.zone == HERE and any(error["code"] == STOCKOUT for error in one.errors)
        for name, one in life.cloud.operations.items()
        if name not in known
    )
