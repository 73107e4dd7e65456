"""Links that sailord measured replace those of the folder of measurements; its rest stays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from simulator.api import load_measurements
from simulator.hardware.catalogue import load_catalogue

MIB = 1 << 20


def network(receivers: list[str], gbytes_per_s: float) -> str:
    def end(zone: str) -> dict[str, object]:
        return {"zone": zone, "gpu_type": "A100-40", "gpus": 1}

    document = {
        "sizes_bytes": [MIB, 2 * MIB],
        "curves": [{"id": 0, "bandwidth_GBps": [gbytes_per_s] * 2}],
        "inter_node": [{"from": end("zone-a"), "to": end(to), "curve": 0} for to in receivers],
        "egress_usd_per_GB": {"zone_to_zone": {"zone-a": {"zone-b": 0.08}}},
    }
    return json.dumps(document)


@pytest.mark.parametrize("has_folder", [True, False])
def test_measured_links_take_precedence(tmp_path: Path, has_folder: bool):
    folder = tmp_path / "profiles"
    folder.mkdir()
    (folder / "network.json").write_text(network(["zone-b", "zone-c"], 1.0))
    links = tmp_path / "network.json"
    links.write_text(network(["zone-b"], 2.0))
    found = load_measurements(
        folder if has_folder else None, catalogue=load_catalogue(None), links=links
    ).network
    rates = {receiver[0]: MIB / curves[1](MIB) for (_, receiver), curves in found.between.items()}
    expected = {"zone-b": 2e9} | ({"zone-c": 1e9} if has_folder else {})
    assert rates == pytest.approx(expected)
    assert bool(found.egress_usd_per_byte) == has_folder
