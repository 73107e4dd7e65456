"""A node's zone and machine type, from the metadata server or the configuration."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from agents import node_identity
from agents.devices.probe import Devices
from agents.node_identity import identify_node
from agents.saved_state import SavedState
from simulator.documents.problems import InputError
from simulator.hardware.catalogue import load_catalogue
from tests.fakes.metadata import metadata_server

CATALOGUE = load_catalogue()
REAL = Devices("A100-40", 2, 312.0, is_emulated=False)
EMULATED = Devices("A100-40", 2, 312.0, is_emulated=True)
T4 = Devices("T4", 1, 65.0, is_emulated=False)
"""A GPU attached to a machine whose type, as the server gives it, does not name it."""
SERVER = ("us-central1-b", "a2-highgpu-2g")
"""Zone and machine type of the fake metadata server."""


async def where(devices: Devices, zone: str | None, machine: str | None) -> tuple[str, str]:
    config: Any = SimpleNamespace(name="a", zone=zone, machine=machine, spot=False, lease_s=10.0)
    async with aiohttp.ClientSession() as session:
        node = await identify_node(config, devices, CATALOGUE, SavedState("b", 1), session)
    return node.zone, node.machine


@pytest.mark.parametrize(
    ("devices", "zone", "machine", "expected"),
    [
        (REAL, None, None, SERVER),
        (REAL, "us-east1-b", "a2-highgpu-1g", SERVER),
        (REAL, "us-east1-b", "A100-40x2", ("us-central1-b", "A100-40x2")),
        (T4, "us-east1-b", "n1-standard-8-t4-1", ("us-central1-b", "n1-standard-8-t4-1")),
        (EMULATED, "us-east1-b", "a2-highgpu-1g", ("us-east1-b", "a2-highgpu-1g")),
        (EMULATED, None, "a2-highgpu-1g", ("us-central1-b", "a2-highgpu-1g")),
    ],
)
async def test_gce_the_metadata_server_wins_over_the_file_for_real_devices(
    devices, zone, machine, expected, monkeypatch
):
    async with metadata_server() as server:
        monkeypatch.setenv("GCE_METADATA_HOST", server.address)
        assert await where(devices, zone, machine) == expected


async def test_without_a_metadata_server_the_file_must_give_the_zone(monkeypatch):
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:9")
    assert await where(REAL, "rack-1", "dgx") == ("rack-1", "dgx")
    monkeypatch.setattr(node_identity, "INSTANCE_S", 0.1)
    with pytest.raises(InputError, match="set zone"):
        await where(REAL, None, "dgx")
