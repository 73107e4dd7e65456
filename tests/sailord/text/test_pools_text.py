"""A running cluster's nodes as a file that `sailorctl plan` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from planner.problem.inventory import lots_of
from sailord.text.pools_text import cluster_file_text
from simulator.cluster.cluster_file import load_cluster
from simulator.cluster.place_facts import PlaceFacts
from simulator.network.network import MeasuredNetwork


def node(zone: str, machine: str = "a2-highgpu-4g", **others: Any) -> dict[str, Any]:
    usual = {"zone": zone, "machine": machine, "gpu": "A100-40", "gpus": 4, "spot": False}
    return {**usual, "state": "ready", **others}


SIZES = {"a2-highgpu-4g": 4, "a2-highgpu-1g": 1}
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
    file.write_text(cluster_file_text(NODES, SIZES))
    pools = load_cluster(file).pools
    found = {(p.zone, p.gpu, p.gpus_per_machine, p.gpus, p.spot) for p in pools}
    assert found == {
        ("us-central1-a", "A100-40", 4, 8, False),
        ("us-central1-a", "A100-40", 4, 4, True),
        ("us-west1-a", "V100-16", 8, 8, False),
    }


def test_cluster_file_names_the_nodes_that_it_leaves_out() -> None:
    text = cluster_file_text(NODES, SIZES)
    assert "# Left out: 1 node, draining." in text
    assert "# Left out: 1 node, without GPUs." in text
    assert "lost" not in text


def test_cluster_file_says_what_it_lacks_of_zones_that_the_catalogue_does_not_know() -> None:
    nodes = [*NODES, node("zone-a", "emulated-large")]
    text = cluster_file_text(nodes, SIZES, {"us-central1-a", "us-west1-a"})
    assert "# Not in the catalogue: zone-a. Copy from sailord's own cluster file" in text
    assert "catalogue:" not in cluster_file_text(NODES, SIZES, {"us-central1-a", "us-west1-a"})


def test_a_machine_type_of_ones_own_is_named() -> None:
    text = cluster_file_text([node("zone-a", "own", gpus=gpus) for gpus in (8, 8, 7)], SIZES)
    assert 'machine = "own"\nmachines = 2\ngpus_left = [7]' in text


def test_a_machine_that_lost_gpus_counts_as_what_is_left(tmp_path: Path) -> None:
    """This holds also where no node of its kind is whole, or where it is named after its GPUs."""
    west = "us-west1-a"
    nodes = [
        *NODES,
        *(node("us-central1-a", gpus=gpus) for gpus in (3, 3, 1)),
        node(west, gpus=2),
        *(node(west, "V100-16x4", gpu="V100-16", gpus=gpus) for gpus in (3, 2)),
        *(node("us-central1-a", "", gpu="T4", gpus=gpus) for gpus in (2, 2, 1)),
    ]
    file = tmp_path / "now.toml"
    file.write_text(cluster_file_text(nodes, SIZES))
    cluster = load_cluster(file)
    found = {
        (lot.zone, lot.machine, lot.spot_gpus): lot.machines
        for lot in lots_of(cluster, PlaceFacts(cluster, MeasuredNetwork()))
    }
    assert found == {
        ("us-central1-a", "a2-highgpu-4g", 4): ((1, 1), (3, 2), (4, 3)),
        (west, "V100-16x8", 0): ((8, 1),),
        (west, "a2-highgpu-4g", 0): ((2, 1),),
        (west, "V100-16x4", 0): ((2, 1), (3, 1)),
        ("us-central1-a", "T4x2", 0): ((1, 1), (2, 2)),
    }
