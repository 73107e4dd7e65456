"""A running cluster's nodes as a file that `sailorctl plan` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sailord.text.pools_text import cluster_file_text
from simulator.cluster.cluster_file import load_cluster


def node(zone: str, machine: str = "a2-highgpu-4g", **others: Any) -> dict[str, Any]:
    usual = {"zone": zone, "machine": machine, "gpu": "A100-40", "gpus": 4, "spot": False}
    return {**usual, "state": "ready", **others}


NODES = [
    node("us-central1-a"),
    node("us-central1-a", state="slow"),
    node("us-central1-a", spot=True),
    node("us-west1-a", "", gpu="V100-16", gpus=8),
    node("us-west1-a", state="draining"),
    node("us-west1-a", state="lost"),
    node("us-west1-a", "", gpu="", gpus=0),
]


def test_usable_nodes_are_pools_that_a_plan_can_be_made_for(tmp_path: Path) -> None:
    file = tmp_path / "now.toml"
    file.write_text(cluster_file_text(NODES))
    pools = load_cluster(file).pools
    found = {(p.zone, p.gpu, p.gpus_per_machine, p.gpus, p.spot) for p in pools}
    assert found == {
        ("us-central1-a", "A100-40", 4, 8, False),
        ("us-central1-a", "A100-40", 4, 4, True),
        ("us-west1-a", "V100-16", 8, 8, False),
    }


def test_what_is_left_out_is_told() -> None:
    text = cluster_file_text(NODES)
    assert "# Left out: 1 node, draining." in text
    assert "# Left out: 1 node, without GPUs." in text
    assert "lost" not in text
