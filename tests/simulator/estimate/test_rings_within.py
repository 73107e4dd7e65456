"""Rings between groups on one machine."""

from __future__ import annotations

from dataclasses import replace

from simulator.network.curves import Curve, curve_from_bandwidths
from simulator.spec.plan import Pipeline, Plan
from tests.simulator.estimate.test_gradient_sync import RATE, nodes, sums, wires, world
from tests.simulator.worlds import GPUS, small_model, stage


def within(curves: dict[int, Curve]) -> dict[str, dict[int, Curve]]:
    return dict.fromkeys(GPUS, curves)


def test_rings_of_several_stages_send_from_no_more_gpus_than_a_machine_has() -> None:
    """Three groups of one stage and one of another: four GPUs, and a curve of eight is not read."""
    curves = {
        gpus: curve_from_bandwidths(gpus, sizes_bytes=(1.0, 1e12), bytes_per_s=(rate, rate))
        for gpus, rate in ((2, RATE), (4, RATE), (8, 4 * RATE))
    }
    here, (one,) = world(replace(wires(), within=within(curves))), nodes(1)
    layers = len(small_model().layers)
    alone = tuple(Pipeline(2, (stage(0, layers, one),)) for _ in range(2))
    both = Pipeline(2, (stage(0, 2, one), stage(2, layers, one)))
    found = sums(here, Plan(1, (*alone, both)))
    slower = world(replace(wires(), within=within({4: curves[4]})))
    assert [each.seconds for each in found] == [
        each.seconds for each in sums(slower, Plan(1, (*alone, both)))
    ]
