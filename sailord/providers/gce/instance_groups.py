"""Machines made by a managed instance group, such as the one behind a node pool of GKE.

A group is not told how many machines it is to have, but which: by names that follow from the
request, so that an order which is repeated makes nothing new, and a group never takes back another
machine than the one that is meant.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from sailord.providers.gce.client import Api
from sailord.providers.gce.config import GceConfig
from sailord.providers.gce.errors import Failure, failure_of
from sailord.providers.gce.requests import group_instances_of, names_of, request_uuid
from sailord.providers.interface import Ask

CLIENT = "InstanceGroupManagers"


async def order(api: Api, config: GceConfig, ask: Ask) -> Any:
    """Order the machines of an ask; return the operation."""
    instances = group_instances_of(ask, config)
    return await api.call(
        CLIENT,
        "create_instances_unary",
        project=config.project,
        zone=ask.pool.zone,
        instance_group_manager=config.groups[ask.pool],
        request_id=request_uuid(ask.request_id),
        instance_group_managers_create_instances_request_resource={"instances": instances},
    )


async def wait_made(api: Api, config: GceConfig, ask: Ask) -> Failure | None:
    """Return once all machines are there, or why some are not; those are withdrawn.

    A group goes on trying for ever. What it could not make now must not turn up, and cost money,
    when nobody waits for it any more.
    """
    loop = asyncio.get_running_loop()
    deadline, names = loop.time() + config.operation_s, set(names_of(ask, config.cluster_name))
    while True:
        members = await _members(api, config, ask)
        missing = sorted(name for name in names if name in members and not members[name].id)
        if not missing:
            return None
        errors = [error for name in missing for error in members[name].last_attempt.errors.errors]
        is_late = loop.time() > deadline
        if errors or is_late:
            await remove(api, config, ask, missing)
            told = [(error.code, error.message) for error in errors]
            return failure_of(0, told, message="the group made nothing in time")
        await asyncio.sleep(config.poll_s)


async def remove(api: Api, config: GceConfig, ask: Ask, names: Sequence[str]) -> None:
    """Take machines out of a group, and delete them."""
    links = [f"zones/{ask.pool.zone}/instances/{name}" for name in names]
    await remove_links(api, config, ask.pool.zone, config.groups[ask.pool], links)


async def remove_links(
    api: Api, config: GceConfig, zone: str, group: str, links: Sequence[str]
) -> None:
    """Take the machines under these links out of a group, and delete them."""
    await api.call(
        CLIENT,
        "delete_instances_unary",
        project=config.project,
        zone=zone,
        instance_group_manager=group,
        instance_group_managers_delete_instances_request_resource={"instances": list(links)},
    )


async def _members(api: Api, config: GceConfig, ask: Ask) -> dict[str, Any]:
    pages = await api.pages(
        CLIENT,
        "list_managed_instances",
        project=config.project,
        zone=ask.pool.zone,
        instance_group_manager=config.groups[ask.pool],
    )
    found = [one for page in pages for one in page.managed_instances]
    return {one.name or one.instance.rpartition("/")[2]: one for one in found}
