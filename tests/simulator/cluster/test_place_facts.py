"""Which machines of a place a plan takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simulator.cluster.cluster import Cluster, Machines, Pool
from simulator.cluster.place_facts import PlaceFacts
from simulator.hardware.catalogue import load_catalogue
from simulator.network.network import MeasuredNetwork

WHOLE = Pool("us-central1-a", "A100-40", "a2-highgpu-4g", 4, 4)
GONE = replace(WHOLE, gpus=0)
HALF = replace(WHOLE, gpus_per_machine=2, gpus=4)


def facts_of(*pools: Pool) -> PlaceFacts:
    return PlaceFacts(Cluster(pools, load_catalogue()), MeasuredNetwork())


@pytest.mark.parametrize(
    ("pools", "size"),
    [((GONE, HALF), 2), ((WHOLE, HALF), 4), ((GONE,), 4), ((replace(WHOLE, gpus=3),), 3)],
)
def test_a_machine_has_the_gpus_of_the_largest_one_that_is_up(
    pools: tuple[Pool, ...], size: int
) -> None:
    assert facts_of(*pools).gpus_per_machine(WHOLE.place) == size


@pytest.mark.parametrize(
    ("pools", "gpus", "machines"),
    [
        ((HALF, WHOLE), 8, ((4, 1), (2, 2))),
        ((replace(WHOLE, gpus=6),), 6, ((4, 1), (2, 1))),
        # What could be rented counts where what is up does not suffice.
        ((replace(HALF, obtainable_gpus=2), replace(GONE, obtainable_gpus=8)), 4, ((2, 2),)),
        (
            (replace(HALF, obtainable_gpus=2), replace(GONE, obtainable_gpus=8)),
            5,
            ((2, 2), (4, 2), (2, 1)),
        ),
        ((GONE,), 4, ()),
    ],
)
def test_machines_that_are_up_come_first_and_large_ones_before_small_ones(
    pools: tuple[Pool, ...], gpus: int, machines: Machines
) -> None:
    *found, (largest, count) = facts_of(*pools).machines(WHOLE.place, gpus)
    assert tuple(found) == machines
    assert (largest, count) == (max((size for size, _ in machines), default=4), gpus)
