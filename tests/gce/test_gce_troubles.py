"""Failures of a cloud while a job trains: only the cloud is fake."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.fakes.gce.cloud import InjectedFailure
from tests.gce.rented_cluster import HERE, LARGE, THERE, RentedCluster, rented_cluster
from tests.sailord.providers.emulated_cluster import wait_until

REGION, METRIC = "us-central1", "PREEMPTIBLE_NVIDIA_A100_GPUS"
CAPACITY = """
boot_s = 25.0
surplus_s = 8.0
lost_s = 3.0
delete_again_s = 3.0
doubt_s = 6.0
rest_max_s = 4.0
"""
# test_gce_random has the same without workers.
pytestmark = pytest.mark.at_length


@contextlib.contextmanager
def trouble(tmp_path_factory) -> Iterator[RentedCluster]:
    """A cloud with two instances in each zone; what was rented is given back, and told in full."""
    with rented_cluster(tmp_path_factory.mktemp("troubles") / "c", CAPACITY) as life:
        life.cloud.stock = {(HERE, LARGE, True): 2, (THERE, LARGE, True): 2}
        yield life
        books = life.end_job()
        assert books.spent_usd == pytest.approx(life.cloud.bill(), abs=1e-6)


def train(life: RentedCluster) -> None:
    """Have the job train on all instances that there are."""
    life.submit()
    wait_until(lambda: life.trains_on(4))


def test_faulty_instances_and_a_stuck_operation_are_replaced(tmp_path_factory):
    """One never boots, one boots without its GPU, and the operation that made them never ends."""
    with trouble(tmp_path_factory) as life:
        cloud = life.cloud
        cloud.dead, cloud.blind, cloud.hung = 1, 2, 1
        life.submit()
        unheard = "no agent registered within 25 s"
        wait_until(lambda: any(unheard in line for line in life.said("gone")))
        useless = [vm for vm in cloud.vms if not (vm.boots and vm.has_gpu)]
        assert len(useless) == 2
        wait_until(lambda: not any(vm.is_there for vm in useless))
        for vm in useless:  # They go back to the shelf.
            cloud.stock[(vm.zone, LARGE, True)] += 1
        wait_until(lambda: life.trains_on(4))
    hung = [one.type for one in cloud.running_operations()]
    assert hung == ["bulkInsert"], "nothing is left but the one that never ends"


def test_answers_503_cause_only_further_observations(tmp_path_factory):
    with trouble(tmp_path_factory) as life:
        cloud = life.cloud
        train(life)
        before, members = [vm.id for vm in cloud.there()], life.job()["members"]
        storm = InjectedFailure(".*", 10**6, status=503)
        cloud.failures.append(storm)
        wait_until(lambda: storm.times < 10**6 - 10)
        life.wait_for_steps()
        cloud.failures.clear()
        assert [vm.id for vm in cloud.there()] == before
        assert life.job()["members"] == members
        assert life.said("the provider does not answer")


def test_a_node_lost_while_credentials_are_expired_is_replaced(tmp_path_factory):
    """No instance can be rented until credentials are renewed; the job continues without."""
    with trouble(tmp_path_factory) as life:
        cloud = life.cloud
        train(life)
        cloud.is_expired = True
        dead = next(vm for vm in cloud.there() if vm.zone == THERE)
        cloud.stock[(THERE, LARGE, True)] = 1
        cloud.kill(dead.name)
        wait_until(lambda: dead.name not in life.job()["members"])
        wait_until(lambda: life.said("refused (permission)"))
        life.wait_for_steps()
        assert dead.status == "RUNNING", "Google believes it well"
        cloud.is_expired = False
        wait_until(lambda: not dead.is_there)
        wait_until(lambda: life.trains_on(4))


def test_a_quota_lowered_before_a_preemption_is_kept(tmp_path_factory):
    """Running instances stay, and no other one is available until the quota is raised."""
    with trouble(tmp_path_factory) as life:
        cloud = life.cloud
        train(life)
        cloud.quotas[(REGION, METRIC)] = 3
        taken = next(vm for vm in cloud.there() if vm.zone == HERE)
        cloud.stock = {(HERE, LARGE, True): 2, (THERE, LARGE, True): 2}
        cloud.preempt(taken.name, notice_s=0)
        wait_until(lambda: not taken.is_there)
        cloud.quotas[(REGION, METRIC)] = 2
        wait_until(lambda: life.said("refused (quota)"))
        wait_until(lambda: life.trains_on(3))
        life.wait_for_steps()
        assert len(cloud.there()) == 3, "what runs, runs on"
        cloud.quotas[(REGION, METRIC)] = 4
        wait_until(lambda: life.trains_on(4))
        life.wait_for_steps()
