"""Instances as Google lists them."""

from __future__ import annotations

import pytest
from google.cloud import compute_v1

from sailord.providers.gce.observe import read_instance
from sailord.providers.interface import Pool
from simulator.hardware.catalogue import load_catalogue

ZONE = "https://www.googleapis.com/compute/v1/projects/p/zones/us-central1-a"


def listed(machine: str, card: str, cards: int, **labels: str) -> compute_v1.Instance:
    """An instance of a managed group or node pool: without our labels unless given."""
    return compute_v1.Instance(
        id=1,
        name="group-x1y2",
        zone=ZONE,
        status="RUNNING",
        machine_type=f"{ZONE}/machineTypes/{machine}",
        creation_timestamp="2026-01-02T03:04:05.678-08:00",
        guest_accelerators=[
            compute_v1.AcceleratorConfig(
                accelerator_type=f"{ZONE}/acceleratorTypes/{card}", accelerator_count=cards
            )
        ],
        labels=labels,
    )


@pytest.mark.parametrize(
    ("machine", "card", "cards", "name", "gpu"),
    [
        ("a2-highgpu-1g", "nvidia-tesla-a100", 1, "a2-highgpu-1g", "A100-40"),
        ("a3-highgpu-8g", "nvidia-h100-80gb", 8, "a3-highgpu-8g", "H100-80"),
        ("g2-standard-4", "nvidia-l4", 1, "g2-standard-4", "L4"),
        ("n1-standard-8", "nvidia-tesla-t4", 1, "n1-standard-8-t4-1", "T4"),
    ],
)
def test_gpus_that_a_machine_type_brings_are_no_part_of_its_name(machine, card, cards, name, gpu):
    seen = read_instance(listed(machine, card, cards), {}, load_catalogue())
    assert seen.pool == Pool("us-central1-a", name, gpu, cards, spot=False)


def test_our_label_names_the_machine_type():
    given = listed("n1-standard-8", "nvidia-tesla-t4", 1, **{"sailor-machine": "a2-highgpu-1g"})
    assert read_instance(given, {}, load_catalogue()).pool.machine == "a2-highgpu-1g"
