"""Rented instances under TLS: each enrols at its boot, and its certificate ends with it."""

from __future__ import annotations

import time

import pytest

from sailord.authority import Authority
from tests.gce.rented_cluster import HERE, LARGE, THERE, RentedCluster, rented_cluster
from tests.gce.test_gce_story import CAPACITY, LEASE_S
from tests.sailord.providers.emulated_cluster import wait_until

pytestmark = pytest.mark.at_length


def states(life: RentedCluster) -> dict[str, str]:
    """Return the state of each agent's certificate, by the number of its instance."""
    issued = Authority(life.place.folder / "ca", "local").issued()
    return {each.instance: each.state(time.time()) for each in issued if each.owner.role == "agent"}


def test_instances_enrol_train_are_lost_and_replaced(tmp_path_factory):
    folder = tmp_path_factory.mktemp("enrolment") / "c"
    with rented_cluster(folder, CAPACITY, lease_s=LEASE_S, tls=True) as life:
        cloud = life.cloud
        cloud.stock = {(HERE, LARGE, True): 1, (THERE, LARGE, True): 1}
        life.submit()
        wait_until(lambda: life.trains_on(2))
        first = {str(vm.id) for vm in cloud.there()}
        assert states(life) == dict.fromkeys(first, "valid")

        dead = next(vm for vm in cloud.there() if vm.zone == HERE)
        cloud.preempt(dead.name, notice_s=0)
        wait_until(lambda: dead.name not in life.job()["members"])
        wait_until(lambda: states(life)[str(dead.id)] == "revoked")
        life.wait_for_steps()
        cloud.stock = {(HERE, LARGE, True): 1, (THERE, LARGE, True): 0}
        wait_until(lambda: life.trains_on(2), within_s=600.0)
        life.wait_for_steps()
        now = {str(vm.id) for vm in cloud.there()}
        assert states(life) == {**dict.fromkeys(now, "valid"), str(dead.id): "revoked"}
        lost = [text for text in life.history() if " lost): " in text]
        assert lost, "generations are told with what they lost"
        assert all("0 steps lost" in text for text in lost), lost
        life.end_job()
        wait_until(lambda: set(states(life).values()) == {"revoked"})
