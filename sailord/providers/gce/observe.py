"""Reads instances and operations from Google's resources into plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sailord.providers.gce.requests import MACHINE_LABEL, REQUEST_LABEL
from sailord.providers.interface import Instance, InstanceState, Pool, Preemption
from simulator.documents.problems import InputError
from simulator.hardware.catalogue import Catalogue

PREEMPTED = "compute.instances.preempted"
CREATING = ("insert", "bulkInsert", "compute.instanceGroupManagers.createInstances")
HISTORY_S = 3600.0
"""Operations that ended earlier are ignored."""
OFF = ("STOPPED", "TERMINATED")
STATES: Mapping[str, InstanceState] = {
    "RUNNING": "running",
    **dict.fromkeys(("PENDING_STOP", "STOPPING", "SUSPENDING", "DEPROVISIONING"), "stopping"),
    # Only Google stops our instances; a stopped one costs its disk.
    **dict.fromkeys((*OFF, "SUSPENDED"), "preempted"),
}
"""All others are pending."""


@dataclass(frozen=True, slots=True)
class OperationHistory:
    """Preemptions, running requests and deletions, from the zones' operations."""

    preemptions: tuple[Preemption, ...]
    pending_requests: frozenset[str]
    """Google's ids of the requests."""
    ended_at: Mapping[str, float]


def read_instance(resource: Any, requests: Mapping[str, str], catalogue: Catalogue) -> Instance:
    """Read an instance.

    ``requests`` maps Google's request ids to ours, and the names of requests that waited, which
    those of their instances begin with.
    """
    labels = dict(resource.labels)
    items = {item.key: item.value for item in resource.metadata.items}
    told = items.get(REQUEST_LABEL) or labels.get(REQUEST_LABEL, "")
    request = requests.get(told, told) or requests.get(resource.name.rpartition("-")[0], "")
    zone = _last_part(resource.zone)
    created_at = parse_time(resource.creation_timestamp)
    run_s = resource.scheduling.max_run_duration.seconds
    return Instance(
        id=str(resource.id),
        name=resource.name,
        pool=_pool_of(resource, zone, labels, catalogue),
        state=STATES.get(resource.status, "pending"),
        created_at=created_at,
        request_id=request,
        node=resource.name,
        ends_at=created_at + run_s if run_s else None,
    )


def _pool_of(resource: Any, zone: str, labels: Mapping[str, str], catalogue: Catalogue) -> Pool:
    model = resource.scheduling.provisioning_model
    spot, flex = model == "SPOT", model == "FLEX_START"
    name = labels.get(MACHINE_LABEL) or _last_part(resource.machine_type)
    cards = resource.guest_accelerators
    # Google lists the GPUs of all types; only those of ``n1`` are not in the type's own name.
    if cards and MACHINE_LABEL not in labels and name.startswith("n1-"):
        kind = _last_part(cards[0].accelerator_type).removeprefix("nvidia-tesla-")
        name = f"{name}-{kind}-{cards[0].accelerator_count}"
    try:
        machine = catalogue.machine(name)
    except InputError:
        # Our label on an instance that we did not make.
        return Pool(zone, name, "", 0, spot, flex)
    return Pool(zone, machine.name, machine.gpu, machine.gpus, spot, flex)


def stopped_at(resources: Iterable[Any]) -> Mapping[str, float]:
    """Return when instances went off that still exist, by id: from then on they cost nothing."""
    return {
        str(one.id): parse_time(one.last_stop_timestamp)
        for one in resources
        if one.status in OFF and one.last_stop_timestamp
    }


def operation_history(operations: Iterable[Any], now: float) -> OperationHistory:
    """Read the operations that ended in the last hour or still run."""
    preemptions, pending, ended = [], set(), {}
    for one in operations:
        # An enum in the library, a string in JSON.
        is_done = getattr(one.status, "name", one.status) == "DONE"
        at = parse_time(one.end_time or one.insert_time)
        if is_done and at < now - HISTORY_S:
            continue
        if one.operation_type == PREEMPTED:
            preemptions.append(Preemption(str(one.target_id), at))
        elif one.operation_type == "delete" and is_done and not one.error.errors:
            ended[str(one.target_id)] = at
        elif one.operation_type in CREATING and not is_done and one.client_operation_id:
            pending.add(one.client_operation_id)
    return OperationHistory(tuple(preemptions), frozenset(pending), ended)


def parse_time(text: str) -> float:
    """Parse Google's time format to Unix time."""
    return datetime.fromisoformat(text).timestamp()


def read_aggregated(pages: Iterable[Any], what: str) -> tuple[list[Any], tuple[str, ...]]:
    """Read an aggregated list; return its resources and the zones that did not answer."""
    found: list[Any] = []
    unseen: set[str] = set()
    for page in pages:
        unseen.update(_last_part(scope) for scope in page.unreachables)
        for scope, inner in page.items.items():
            found += getattr(inner, what)
            if inner.warning.code and inner.warning.code != "NO_RESULTS_ON_PAGE":
                unseen.add(_last_part(scope))
    return found, tuple(sorted(unseen))


def _last_part(link: str) -> str:
    return link.rpartition("/")[2]
