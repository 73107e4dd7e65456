"""The node that an agent registers: its zone and machine type, from the cloud or the configuration.

A configuration file may come with a machine image and describe another machine, so the metadata
server's zone and machine type win over it. There are two exceptions. With emulated devices the
file is believed. And a machine type in the file is believed if it has the devices that were found
and the server's has not: Google has no names for machines with attached GPUs, and catalogues
have names of their own.
"""

from __future__ import annotations

import contextlib

import aiohttp
import structlog

from agents.cloud.gce_metadata import INSTANCE_S, read_instance
from agents.config import Config
from agents.devices.probe import Devices
from agents.protocol.records import NodeRecord
from agents.protocol.versions import own_protocol
from agents.saved_state import SavedState
from simulator.documents.problems import InputError, Problems
from simulator.hardware.catalogue import Catalogue
from worker.version import own_version

log = structlog.get_logger("sailor-agent")

CONFIGURED_S = 1.0
"""How long to wait for a metadata server if the file gives zone and machine type."""


async def identify_node(
    config: Config,
    devices: Devices,
    catalogue: Catalogue,
    saved: SavedState,
    session: aiohttp.ClientSession,
) -> NodeRecord:
    """Return the node to register; ``InputError`` if its zone or machine type is unknown."""
    instance = None
    if config.zone is None or not devices.is_emulated:
        is_configured = config.zone is not None and config.machine is not None
        instance = await read_instance(session, CONFIGURED_S if is_configured else INSTANCE_S)
    zone, machine = config.zone, config.machine
    if instance is not None and (zone is None or not devices.is_emulated):
        zone = _from_server("zone", zone, instance.zone)
    if instance is not None and not devices.is_emulated:
        machine = _machine_type(machine, instance.machine_type, devices, catalogue)
    emulated = {"is_emulated": devices.is_emulated, "tflops": devices.tflops}
    log.info("found devices", gpu=devices.gpu, gpus=devices.count, **emulated)
    problems = Problems()
    if zone is None:
        problems.add("zone", "is missing, and there is no metadata server", "set zone")
    if machine is None and devices.is_emulated:
        try:
            machine = catalogue.machine_for(devices.gpu, devices.count).name
        except InputError as error:
            problems.take(error, place="machine")
    elif machine is None:
        problems.add("machine", "is missing, and there is no metadata server", "set machine")
    problems.raise_if_any()
    assert zone is not None
    assert machine is not None
    return NodeRecord(
        id=saved.node_id(config.name),
        name=config.name,
        zone=zone,
        machine=machine,
        gpu=devices.gpu,
        gpus=devices.count,
        address="",
        spot=config.spot,
        lease_s=config.lease_s,
        protocol=own_protocol(own_version()),
    )


def _machine_type(
    configured: str | None, of_server: str, devices: Devices, catalogue: Catalogue
) -> str:
    def has_devices(name: str) -> bool:
        with contextlib.suppress(InputError):
            machine = catalogue.machine(name)
            return (machine.gpu, machine.gpus) == (devices.gpu, devices.count)
        return False

    if configured is None or (has_devices(of_server) and not has_devices(configured)):
        return _from_server("machine", configured, of_server)
    return configured


def _from_server(what: str, configured: str | None, of_server: str) -> str:
    if configured not in (None, of_server):
        both = {"configured": configured, "metadata_server": of_server}
        log.warning("using the metadata server's value", setting=what, **both)
    return of_server
