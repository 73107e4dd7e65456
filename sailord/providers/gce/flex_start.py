"""Requests that wait in Google's queue until a managed instance group can make all instances.

A resize request has our request's id as its description. It stays listed after its end, for longer
than its instances live.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sailord.providers.gce.client import GceClient
from sailord.providers.gce.config import GceConfig
from sailord.providers.gce.errors import GceError, gce_error
from sailord.providers.gce.requests import request_name, request_uuid, resize_request_body
from sailord.providers.interface import InstanceRequest, Pool, Refused

CLIENT = "InstanceGroupManagerResizeRequests"
NOT_FOUND = 404
WAITS = ("ACCEPTED", "CREATING")
ENDED = ("FAILED", "CANCELLED")


@dataclass(frozen=True, slots=True)
class WaitingRequests:
    """What Google's lists of requests say."""

    waiting: Mapping[str, InstanceRequest]
    """By our id."""
    refused: tuple[Refused, ...]
    """Those that ended without instances."""
    ids: Mapping[str, str]
    """Our ids, by the names of all requests."""
    unseen: tuple[str, ...]
    """Zones whose list could not be read."""
    troubles: tuple[str, ...]


async def create(api: GceClient, config: GceConfig, ask: InstanceRequest) -> None:
    """Put a request into the queue; what becomes of it shows in ``read``."""
    await api.call(
        *(CLIENT, "insert_unary"),
        **_group_of(config, ask.pool),
        request_id=request_uuid(ask.request_id),
        instance_group_manager_resize_request_resource=resize_request_body(ask, config),
    )


async def cancel(api: GceClient, config: GceConfig, ask: InstanceRequest) -> None:
    """Withdraw a request, unless its instances are being made already."""
    name = request_name(ask, config.cluster_name)
    try:
        await api.call(
            *(CLIENT, "cancel_unary"), **_group_of(config, ask.pool), resize_request=name
        )
    except GceError as failure:
        if failure.status != NOT_FOUND:
            raise


async def read(api: GceClient, config: GceConfig) -> WaitingRequests:
    """Read the requests of all groups; where a group is gone, none waits."""
    waiting: dict[str, InstanceRequest] = {}
    refused: list[Refused] = []
    ids: dict[str, str] = {}
    unseen: list[str] = []
    troubles: list[str] = []
    for pool in sorted(pool for pool in config.groups if pool.flex):
        try:
            pages = await api.pages(
                *(CLIENT, "list"), zone=pool.zone, instance_group_manager=config.groups[pool]
            )
        except GceError as failure:
            troubles.append(f"the queue of {pool} was not read: {failure.text}")
            if failure.status != NOT_FOUND:
                unseen.append(pool.zone)
            continue
        for one in (each for page in pages for each in page.items if each.description):
            ids[one.name] = one.description
            if one.state in WAITS:
                count = len(one.instances) or one.resize_by
                waiting[one.description] = InstanceRequest(one.description, pool, count)
            elif one.state in ENDED:
                refused.append(_refusal(one))
    return WaitingRequests(waiting, tuple(refused), ids, tuple(unseen), tuple(troubles))


def _refusal(one: Any) -> Refused:
    errors = list(_read_errors(one.status.error.errors)) or list(
        _read_errors(one.status.last_attempt.error.errors)
    )
    failure = gce_error(0, errors, message=f"the request ended as {one.state.lower()}")
    return Refused(one.description, failure.kind, failure.text)


def _read_errors(errors: Iterable[Any]) -> Iterable[tuple[str, str]]:
    return ((error.code, error.message) for error in errors)


def _group_of(config: GceConfig, pool: Pool) -> dict[str, str]:
    return {"zone": pool.zone, "instance_group_manager": config.groups[pool]}
