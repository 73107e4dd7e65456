"""Resize requests of the fake's groups: they wait until a test grants or refuses them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.fakes.gce.answers import written
from tests.fakes.gce.cloud import Cloud
from tests.fakes.gce.resources import ApiError, Group, Operation, ResizeRequest, Vm

KIND = "compute.instanceGroupManagerResizeRequests"


def enqueue(cloud: Cloud, group: Group, body: Mapping[str, Any]) -> Operation:
    """Take a request."""
    cloud.need("compute.instanceGroupManagers.update")
    name = body["name"]
    if name in group.queue:
        raise ApiError(409, "alreadyExists", f"The resource 'resizeRequests/{name}' already exists")
    model = group.properties["scheduling"].get("provisioningModel")
    run_s = float(body["requestedRunDuration"]["seconds"])
    if model != "FLEX_START" or not 600 <= run_s <= 7 * 86_400:
        raise ApiError(400, "invalid", "Resize requests need FLEX_START and 10 min to 7 days")
    group.queue[name] = ResizeRequest(
        name, body.get("description", ""), list(body["instances"]), run_s, cloud.now()
    )
    return cloud.operation(f"{KIND}.insert", group.zone)


def cancel(cloud: Cloud, group: Group, name: str) -> Operation:
    """Withdraw a request that waits."""
    cloud.need("compute.instanceGroupManagers.update")
    if name not in group.queue:
        raise ApiError(404, "notFound", f"The resource 'resizeRequests/{name}' was not found")
    if group.queue[name].state != "ACCEPTED":
        raise ApiError(400, "invalid", f"The resize request {name} does not wait")
    group.queue[name].state = "CANCELLED"
    return cloud.operation(f"{KIND}.cancel", group.zone)


def listed(cloud: Cloud, group: Group) -> list[dict[str, Any]]:
    """All requests, those that have ended among them."""
    cloud.need("compute.instanceGroupManagers.get")
    return [
        {
            "name": one.name,
            "description": one.description,
            "state": one.state,
            "instances": [{"name": config["name"]} for config in one.configs],
            "creationTimestamp": written(one.created_at),
            "requestedRunDuration": {"seconds": str(int(one.run_s))},
            **({"status": {"error": {"errors": one.errors}}} if one.errors else {}),
        }
        for one in group.queue.values()
    ]


def grant(cloud: Cloud, group: Group, name: str) -> None:
    """Make all machines of a request; they are deleted at the end of their time."""
    with cloud.lock:
        one = group.queue[name]
        assert one.state == "ACCEPTED", f"{name} has ended as {one.state}"
        one.state = "SUCCEEDED"
        for config in one.configs:
            group.wanted[config["name"]] = {}  # Per-instance configurations are not applied.
        limited = {**group.properties["scheduling"], "maxRunDuration": {"seconds": int(one.run_s)}}
        group.properties = {**group.properties, "scheduling": limited}
        cloud.fill(group)
        names = {config["name"] for config in one.configs}
        for vm in (vm for vm in cloud.there(group.zone) if vm.name in names):
            cloud.after(one.run_s, lambda vm=vm: _run_out(cloud, group, vm))


def refuse(cloud: Cloud, group: Group, name: str, code: str, message: str) -> None:
    """End a request without a machine."""
    with cloud.lock:
        one = group.queue[name]
        one.state, one.errors = "FAILED", [{"code": code, "message": message}]


def _run_out(cloud: Cloud, group: Group, vm: Vm) -> None:
    if vm.is_there and vm.status != "STOPPING":
        group.wanted.pop(vm.name, None)
        vm.status = "STOPPING"
        cloud.hooks.ended(vm)
        cloud.operation("delete", vm.zone, vm=vm)
