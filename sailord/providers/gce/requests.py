"""Builds the request bodies that make instances, from a request and the configuration."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from sailord.providers.gce.config import GceConfig, machine_shape, region_of
from sailord.providers.interface import InstanceRequest, Pool
from simulator.documents.fields import toml_value

CLUSTER_LABEL = "sailor-cluster"
REQUEST_LABEL = "sailor-request"
MACHINE_LABEL = "sailor-machine"
RESERVATION_KEY = "compute.googleapis.com/reservation-name"
NOTICE_S = 120
"""The longest preemption notice that Google offers for Spot."""
FLEX_RUN_S_MAX = 7 * 86_400
"""The longest life that Google gives to instances that waited in its queue."""
INSTALL_S = 1800
"""What a first boot may take before its agent runs."""
SHUTDOWN_S = 30
"""From Google's shutdown signal to power off."""
TORCH = "torch==2.13.0"
_NAMESPACE = uuid.UUID("5d0a3c3e-1c0c-4c0e-9a55-3f6f7b1a9d10")


def request_uuid(request_id: str) -> str:
    """Return a request id as a UUID, as Google requires; a UUID stays unchanged."""
    try:
        return str(uuid.UUID(request_id))
    except ValueError:
        return str(uuid.uuid5(_NAMESPACE, request_id))


def request_name(ask: InstanceRequest, cluster_name: str) -> str:
    """Return the name of a request: what its instances' names begin with."""
    mark = hashlib.sha256(request_uuid(ask.request_id).encode()).hexdigest()[:16]
    return f"sailor-{cluster_name[:32].rstrip('-')}-{mark}"


def instance_names(ask: InstanceRequest, cluster_name: str) -> tuple[str, ...]:
    """Return the names of a request's instances: a function of the request, so none is doubled."""
    stem = request_name(ask, cluster_name)
    return tuple(f"{stem}-{index}" for index in range(ask.count))


def bulk_insert_body(ask: InstanceRequest, config: GceConfig) -> dict[str, Any]:
    """Return the body of a bulk insert: as many instances as available, at least one."""
    return {
        "count": ask.count,
        "min_count": 1,
        "per_instance_properties": {name: {} for name in instance_names(ask, config.cluster_name)},
        "instance_properties": _properties(ask, config),
    }


def group_instances_body(ask: InstanceRequest, config: GceConfig) -> list[dict[str, Any]]:
    """Return the instances that a group makes from its template."""
    return [
        {"name": name, "preserved_state": {"metadata": {REQUEST_LABEL: ask.request_id}}}
        for name in instance_names(ask, config.cluster_name)
    ]


def resize_request_body(ask: InstanceRequest, config: GceConfig) -> dict[str, Any]:
    """Return a request that waits until a group can make all of these instances.

    Such instances have nothing of their own but the name, which tells the request: their start-up
    script is the template's.
    """
    return {
        "name": request_name(ask, config.cluster_name),
        "description": ask.request_id,
        "instances": [{"name": name} for name in instance_names(ask, config.cluster_name)],
        "requested_run_duration": {"seconds": min(config.max_run_s, FLEX_RUN_S_MAX)},
    }


def _properties(ask: InstanceRequest, config: GceConfig) -> dict[str, Any]:
    pool = ask.pool
    machine, card, cards = machine_shape(pool.machine)
    labels = {  # The instance and its disk have these.
        CLUSTER_LABEL: config.cluster_name,
        REQUEST_LABEL: request_uuid(ask.request_id),
        MACHINE_LABEL: pool.machine,
    }
    region = region_of(pool.zone)
    interface: dict[str, Any] = {"network": f"global/networks/{config.network}"}
    if config.subnetwork is not None:
        interface["subnetwork"] = f"regions/{region}/subnetworks/{config.subnetwork}"
    if config.external_ip:
        interface["access_configs"] = [{"type_": "ONE_TO_ONE_NAT", "name": "External NAT"}]
    properties: dict[str, Any] = {
        "machine_type": machine,
        "labels": labels,
        "scheduling": _scheduling(pool, config),
        "disks": [
            {
                "boot": True,
                # The disk is billed, too.
                "auto_delete": True,
                "initialize_params": {
                    "source_image": config.image,
                    "disk_size_gb": config.disk_gb,
                    "disk_type": config.disk_type,
                    "labels": labels,
                },
            }
        ],
        "network_interfaces": [interface],
        "service_accounts": [
            {
                "email": config.service_account,
                "scopes": ["https://www.googleapis.com/auth/cloud-platform"],
            }
        ],
        "metadata": {"items": [{"key": "startup-script", "value": startup_script(pool, config)}]},
    }
    if cards:
        kind = {"accelerator_type": card, "accelerator_count": cards}
        properties["guest_accelerators"] = [kind]
    if pool in config.reservations:
        properties["reservation_affinity"] = {
            "consume_reservation_type": "SPECIFIC_RESERVATION",
            "key": RESERVATION_KEY,
            "values": [config.reservations[pool]],
        }
    if config.tags:
        properties["tags"] = {"items": list(config.tags)}
    if region in config.placement:
        properties["resource_policies"] = [config.placement[region]]
    return properties


def _scheduling(pool: Pool, config: GceConfig) -> dict[str, Any]:
    common = {
        "provisioning_model": "SPOT" if pool.spot else "STANDARD",
        # Instances with GPUs cannot migrate live.
        "on_host_maintenance": "TERMINATE",
        # sailord replaces an instance that went off.
        "automatic_restart": False,
        # A stopped instance would keep its name and its disk.
        "instance_termination_action": "DELETE",
        # If sailord never returns, this ends the bill.
        "max_run_duration": {"seconds": config.max_run_s},
    }
    if not pool.spot:
        return common
    return common | {"preemption_notice_duration": {"seconds": NOTICE_S}}


def unit(name: str) -> str:
    """Return a unit for a rented instance: where others run ``OnFailure``, it powers off."""
    lines = _own_file(name).splitlines()
    kept = [line for line in lines if not line.startswith("Documentation=")]
    ends = ["StartLimitAction=poweroff" if each.startswith("OnFailure=") else each for each in kept]
    return "\n".join(ends).replace("=/usr/bin/sailor-agent ", "=/opt/sailor/bin/sailor-agent ")


def _own_file(name: str) -> str:
    return (files("sailord.providers.gce") / name).read_text(encoding="utf-8").rstrip("\n")


def startup_script(pool: Pool, config: GceConfig) -> str:
    """Return the startup script that installs and starts the agent."""
    mounts = "" if config.mounts is None else f"[mounts]\nallowed = {toml_value(config.mounts)}\n"
    told: Mapping[str, str] = {
        "PACKAGE": config.package,
        "TORCH": TORCH,
        "KEY_SECRET": config.key_secret,
        "CLUSTER": config.cluster_name,
        "STORE": config.store,
        "MOUNTS": mounts,
        "TLS": config.tls,
        "CA": config.ca,
        "MACHINE": pool.machine,
        "SPOT": "true" if pool.spot else "false",
        "ALONE_S": str(config.alone_s),
        "ALONE_MIN": str(max(config.alone_s, INSTALL_S) // 60),
        "NOTICE_S": str(NOTICE_S),
        "SHUTDOWN_S": str(SHUTDOWN_S),
        "UNIT": unit("sailor-agent.service"),
        "WORKER_UNIT": unit("sailor-worker.service"),
        "TELL_SHUTDOWN": _own_file("tell-shutdown.sh"),
    }
    script = _own_file("startup.sh")
    for key, value in told.items():
        script = script.replace(f"@{key}@", value)
    return script
