"""Instances made by a managed instance group, such as a node pool of GKE.

A group is told the names of its instances, derived from the request, and not their number: so a
repeated request makes nothing new, and a deletion removes exactly the instance that is meant.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from sailord.providers.gce.client import GceClient
from sailord.providers.gce.config import GceConfig
from sailord.providers.gce.errors import GceError, gce_error
from sailord.providers.gce.requests import group_instances_body, instance_names, request_uuid
from sailord.providers.interface import InstanceRequest, Pool

CLIENT = "InstanceGroupManagers"


async def create(api: GceClient, config: GceConfig, ask: InstanceRequest) -> Any:
    """Create the instances of a request; return the operation."""
    instances = group_instances_body(ask, config)
    return await api.call(
        CLIENT,
        "create_instances_unary",
        zone=ask.pool.zone,
        instance_group_manager=config.groups[ask.pool],
        request_id=request_uuid(ask.request_id),
        instance_group_managers_create_instances_request_resource={"instances": instances},
    )


async def wait_created(api: GceClient, config: GceConfig, ask: InstanceRequest) -> GceError | None:
    """Wait for all instances; return why some are missing, after removing those from the group.

    A group retries forever, so a missing instance could appear later and be billed unnoticed.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + config.operation_s
    names = instance_names(ask, config.cluster_name)
    while True:
        members = await _members(api, config, ask)
        missing = sorted(name for name in names if name in members and not members[name].id)
        if not missing:
            return None
        errors = [error for name in missing for error in members[name].last_attempt.errors.errors]
        is_late = loop.time() > deadline
        if errors or is_late:
            await remove(api, config, ask.pool, missing)
            told = [(error.code, error.message) for error in errors]
            return gce_error(0, told, message="the group made nothing in time")
        await asyncio.sleep(config.poll_s)


async def remove(api: GceClient, config: GceConfig, pool: Pool, names: Sequence[str]) -> None:
    """Remove instances from a group, and delete them."""
    links = [f"zones/{pool.zone}/instances/{name}" for name in names]
    await api.call(
        CLIENT,
        "delete_instances_unary",
        zone=pool.zone,
        instance_group_manager=config.groups[pool],
        instance_group_managers_delete_instances_request_resource={"instances": links},
    )


async def _members(api: GceClient, config: GceConfig, ask: InstanceRequest) -> dict[str, Any]:
    pages = await api.pages(
        CLIENT,
        "list_managed_instances",
        zone=ask.pool.zone,
        instance_group_manager=config.groups[ask.pool],
    )
    found = [one for page in pages for one in page.managed_instances]
    return {one.name or one.instance.rpartition("/")[2]: one for one in found}
