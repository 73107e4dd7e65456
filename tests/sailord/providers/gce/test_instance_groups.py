"""Instances made by a managed group, such as a node pool of GKE, with the real client library."""

from __future__ import annotations

import asyncio

from tests.fakes.gce.cloud import Cloud, Group, InjectedFailure
from tests.gce.cloud import HERE, ask, pool, provider
from tests.processes import until

PROPERTIES = {
    "machineType": "a2-highgpu-1g",
    "labels": {"sailor-cluster": "prod"},
    "scheduling": {"provisioningModel": "SPOT", "instanceTerminationAction": "DELETE"},
}


def grouped(story) -> Cloud:
    """Play a story with a provider whose only pool is a group's."""
    cloud = Cloud(groups={"pool": Group("pool", HERE, PROPERTIES)})
    with provider(cloud, groups={pool(): "pool"}) as gce:
        asyncio.run(story(cloud, gce))
    assert not any("bulkInsert" in line for line in cloud.asked)
    return cloud


def test_a_group_creates_by_name_and_withdraws_missing_instances():
    async def story(cloud, gce):
        granted = await gce.create(ask(2))
        assert len(granted.instances) == 2
        assert {one.request_id for one in granted.instances} == {ask(2).request_id}
        again = await gce.create(ask(2))
        assert {one.id for one in again.instances} == {one.id for one in granted.instances}
        cloud.stock[(HERE, "a2-highgpu-1g", True)] = 1
        part = await gce.create(ask(3, number=1))
        assert len(part.instances) == 1
        none = await gce.create(ask(1, number=2))
        assert (none.kind, "enough resources" in none.text) == ("stockout", True)
        assert len(cloud.groups["pool"].wanted) == 3, "what is not made stays wanted"
        cloud.stock.clear()
        first = granted.instances[0]
        assert (await gce.delete([first.id])).ids == (first.id,)
        await until(lambda: len(cloud.there()) == 2)
        cloud.fill(cloud.groups["pool"])
        assert len(cloud.there()) == 2, "the group made another"

    grouped(story)


def test_deleting_an_old_number_spares_a_new_instance_of_that_name():
    async def story(cloud, gce):
        (old,) = (await gce.create(ask(1))).instances
        await until(lambda: cloud.vms[0].status == "RUNNING")
        cloud.preempt(old.name, notice_s=0)
        await until(lambda: not cloud.there())
        with cloud.lock:
            cloud.fill(cloud.groups["pool"])
        (new,) = cloud.there()
        assert (new.name, str(new.id) != old.id) == (old.name, True), "the group made it anew"
        assert (await gce.delete([old.id])).ids == (old.id,)
        assert (cloud.there(), new.status != "STOPPING") == ([new], True)
        assert list(cloud.groups["pool"].wanted) == [new.name]
        await gce.observe()
        assert (await gce.delete([str(new.id)])).ids == (str(new.id),)
        await until(lambda: not cloud.there())

    grouped(story)


def test_an_instance_abandoned_by_its_group_is_deleted():
    async def story(cloud, gce):
        (one,) = (await gce.create(ask(1))).instances
        cloud.groups["pool"].wanted.clear()
        assert (await gce.delete([one.id])).ids == (one.id,)
        await until(lambda: not cloud.there())

    grouped(story)


def test_without_an_answer_of_the_group_nothing_is_deleted():
    async def story(cloud, gce):
        (one,) = (await gce.create(ask(1))).instances
        for path in ("GET .*/instances/", "POST .*/deleteInstances"):
            cloud.failures = [InjectedFailure(path, 1, status=503)]
            assert set((await gce.delete([one.id])).failed) == {one.id}
            assert [vm.status == "STOPPING" for vm in cloud.there()] == [False]

    grouped(story)
