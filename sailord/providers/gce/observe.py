"""What Google's answers say of machines and operations: from its resources to plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sailord.providers.gce.requests import MACHINE_LABEL, REQUEST_LABEL
from sailord.providers.interface import Instance, Pool, Preemption, Standing
from simulator.documents.problems import InputError
from simulator.hardware.catalogue import Catalogue

PREEMPTED = "compute.instances.preempted"
CREATING = frozenset(
    {"insert", "bulkInsert", "compute.instanceGroupManagers.createInstances"},
)
HISTORY_S = 3600.0
"""Operations that ended before the last hour say nothing new."""
STANDINGS: Mapping[str, Standing] = {
    "PROVISIONING": "pending",
    "STAGING": "pending",
    "PENDING": "pending",
    "REPAIRING": "pending",
    "RUNNING": "running",
    "PENDING_STOP": "stopping",
    "STOPPING": "stopping",
    "SUSPENDING": "stopping",
    "DEPROVISIONING": "stopping",
    # Nobody but Google stops our machines, and one that stands still only costs its disk.
    "STOPPED": "preempted",
    "SUSPENDED": "preempted",
    "TERMINATED": "preempted",
}


@dataclass(frozen=True, slots=True)
class Past:
    """What the zones' operations tell of machines."""

    preemptions: tuple[Preemption, ...]
    pending_requests: frozenset[str]
    """As Google knows them."""
    ended_at: Mapping[str, float]


def instance_of(resource: Any, requests: Mapping[str, str], catalogue: Catalogue) -> Instance:
    """Read a machine; ``requests`` gives our ids by the ones that Google knows."""
    labels = dict(resource.labels)
    items = {item.key: item.value for item in resource.metadata.items}
    request = items.get(REQUEST_LABEL) or labels.get(REQUEST_LABEL, "")
    zone = _last(resource.zone)
    return Instance(
        id=str(resource.id),
        name=resource.name,
        pool=_pool_of(resource, zone, labels, catalogue),
        state=STANDINGS.get(resource.status, "pending"),
        created_at=moment_of(resource.creation_timestamp),
        request_id=requests.get(request, request),
        node=resource.name,
    )


def _pool_of(resource: Any, zone: str, labels: Mapping[str, str], catalogue: Catalogue) -> Pool:
    spot = resource.scheduling.provisioning_model == "SPOT"
    name = labels.get(MACHINE_LABEL) or _last(resource.machine_type)
    cards = resource.guest_accelerators
    if cards and MACHINE_LABEL not in labels:
        kind = _last(cards[0].accelerator_type).removeprefix("nvidia-tesla-")
        name = f"{name}-{kind}-{cards[0].accelerator_count}"
    try:
        machine = catalogue.machine(name)
    except InputError:
        # Somebody put our label on a machine of a kind that we would not have made.
        return Pool(zone, name, "", 0, spot)
    return Pool(zone, machine.name, machine.gpu, machine.gpus, spot)


def past_of(operations: Iterable[Any], now: float) -> Past:
    """Read what happened in the last hour, and what still goes on."""
    preemptions, pending, ended = [], set(), {}
    for one in operations:
        # An enumeration in Python, a word in JSON.
        is_done = getattr(one.status, "name", one.status) == "DONE"
        at = moment_of(one.end_time or one.insert_time)
        if is_done and at < now - HISTORY_S:
            continue
        if one.operation_type == PREEMPTED:
            preemptions.append(Preemption(str(one.target_id), at))
        elif one.operation_type == "delete" and is_done and not one.error.errors:
            ended[str(one.target_id)] = at
        elif one.operation_type in CREATING and not is_done and one.client_operation_id:
            pending.add(one.client_operation_id)
    return Past(tuple(preemptions), frozenset(pending), ended)


def moment_of(text: str) -> float:
    """Read a moment as Google writes it."""
    return datetime.fromisoformat(text).timestamp()


def scopes_of(pages: Iterable[Any], what: str) -> tuple[list[Any], tuple[str, ...]]:
    """Read an aggregated list: what it holds, and the zones that it could not see."""
    found: list[Any] = []
    unseen: set[str] = set()
    for page in pages:
        unseen.update(_last(scope) for scope in page.unreachables)
        for scope, inner in page.items.items():
            found += getattr(inner, what)
            if inner.warning.code and inner.warning.code != "NO_RESULTS_ON_PAGE":
                unseen.add(_last(scope))
    return found, tuple(sorted(unseen))


def _last(link: str) -> str:
    return link.rpartition("/")[2]
