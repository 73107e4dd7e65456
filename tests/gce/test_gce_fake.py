"""What the fake cloud offers beyond the provider's requests, checked with the real client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from google.auth.credentials import AnonymousCredentials

from sailord.providers.gce.client import GceClient
from sailord.providers.gce.errors import GceError
from tests.fakes.gce.cloud import STOCKOUT, Cloud, Group, Hooks, Vm
from tests.fakes.gce.server import gce_server
from tests.gce.cloud import HERE, config
from tests.processes import until

HOME = {"zone": HERE}
MACHINE = f"zones/{HERE}/machineTypes/a2-highgpu-1g"


@contextlib.contextmanager
def client(cloud: Cloud) -> Iterator[GceClient]:
    """The real client library, which speaks to a fake cloud."""
    with gce_server(cloud) as address:
        api = GceClient(AnonymousCredentials(), config(address))
        try:
            yield api
        finally:
            api.close()


async def insert(api: GceClient, name: str, number: int = 1, **changes: Any) -> Any:
    """Make one machine; return the operation."""
    body = {"name": name, "machine_type": MACHINE, **changes}
    request_id = f"00000000-0000-0000-0000-{number:012}"
    return await api.call(
        *("Instances", "insert_unary"), **HOME, request_id=request_id, instance_resource=body
    )


@pytest.mark.slow
def test_an_inserted_instance_is_found_by_name_and_by_number():
    async def story(api: GceClient) -> None:
        first, again = await insert(api, "one"), await insert(api, "one")
        assert (first.operation_type, again.name) == ("insert", first.name)
        await until(lambda: cloud.vms[0].status == "RUNNING")
        by_name = await api.call("Instances", "get", **HOME, instance="one")
        by_number = await api.call("Instances", "get", **HOME, instance=str(by_name.id))
        assert by_name == by_number
        assert by_name.id == first.target_id
        assert by_name.machine_type.endswith(MACHINE)
        with pytest.raises(GceError, match="already exists"):
            await insert(api, "one", 2)
        with pytest.raises(GceError, match="was not found") as told:
            await api.call("Instances", "get", **HOME, instance="two")
        assert (told.value.status, told.value.code) == (404, "notFound")

    cloud = Cloud()
    with client(cloud) as api:
        asyncio.run(story(api))
    assert [vm.name for vm in cloud.vms] == ["one"]


def test_a_stockout_ends_the_operation_with_an_error():
    async def story(cloud: Cloud, api: GceClient) -> None:
        operation = await insert(api, "one")
        await until(lambda: not cloud.running_operations())
        ended = await api.call("ZoneOperations", "get", **HOME, operation=operation.name)
        assert ended.status.name == "DONE"
        assert [error.code for error in ended.error.errors] == [STOCKOUT]
        assert ended.http_error_status_code == 503

    cloud = Cloud(stock={(HERE, "a2-highgpu-1g", False): 0})
    with client(cloud) as api:
        asyncio.run(story(cloud, api))
    assert cloud.vms == []


class Warnings(Hooks):
    """What machines are told before they go."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def warned(self, vm: Vm, seconds: float) -> None:
        assert vm.is_there
        self.seconds.append(seconds)


@pytest.mark.parametrize("notice_s", [0, 1])
def test_an_ordered_preemption_follows_its_notice(notice_s):
    async def story(cloud: Cloud, api: GceClient) -> None:
        scheduling = {
            "provisioning_model": "SPOT",
            "instance_termination_action": "DELETE",
            "preemption_notice_duration": {"seconds": notice_s},
        }
        await insert(api, "one", scheduling=scheduling)
        await until(lambda: cloud.vms[0].status == "RUNNING")
        await api.call("Instances", "simulate_maintenance_event_unary", **HOME, instance="one")
        assert hooks.seconds == ([float(notice_s)] if notice_s else [])
        await until(lambda: not cloud.there())
        pages = await api.pages("GlobalOperations", "aggregated_list")
        told = [one for page in pages for zone in page.items.values() for one in zone.operations]
        taken = [one for one in told if one.operation_type == "compute.instances.preempted"]
        assert [one.target_id for one in taken] == [cloud.vms[0].id]

    hooks = Warnings()
    cloud = Cloud(hooks=hooks)
    with client(cloud) as api:
        asyncio.run(story(cloud, api))


def test_a_group_is_resized_by_hand():
    async def story(cloud: Cloud, api: GceClient) -> None:
        name = {**HOME, "instance_group_manager": "pool"}
        for size in (3, 1):
            await api.call("InstanceGroupManagers", "resize_unary", **name, size=size)
            await until(lambda size=size: len(cloud.there()) == size)
            group = await api.call("InstanceGroupManagers", "get", **name)
            assert (group.name, group.target_size) == ("pool", size)
        pages = await api.pages("InstanceGroupManagers", "list_managed_instances", **name)
        members = [one for page in pages for one in page.managed_instances]
        assert [one.id for one in members] == [vm.id for vm in cloud.there()]
        with pytest.raises(GceError, match="'instanceGroupManagers/other' was not found"):
            await api.call("InstanceGroupManagers", "get", **HOME, instance_group_manager="other")

    cloud = Cloud(groups={"pool": Group("pool", HERE, {"machineType": "a2-highgpu-1g"})})
    with client(cloud) as api:
        asyncio.run(story(cloud, api))
