"""Faster links, GPUs and layers never make an estimate slower.

A case is named by its seed; ``world_and_plan(seed)`` draws it again.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from simulator.cluster.place_facts import PlaceFacts
from simulator.estimate.event_estimator import EventEstimator
from simulator.hardware.catalogue import Catalogue
from simulator.hardware.types import Link
from simulator.layer_costs.layer_costs import LayerCosts
from simulator.layer_costs.profile import Profile, Timing
from simulator.network.curves import Curve
from simulator.network.network import Network
from tests.simulator.worlds import cases, every_pool, with_links, world_and_plan, world_of

ROUNDING = 1e-12


def faster_link(link: Link) -> Link:
    return replace(
        link,
        latency_s=link.latency_s / 2,
        flow_bytes_per_s=2 * link.flow_bytes_per_s,
        aggregate_bytes_per_s=2 * link.aggregate_bytes_per_s,
    )


def faster_links(catalogue: Catalogue) -> Catalogue:
    """Every link carries twice as much, inside machines and between them."""

    def twice(rate: float | None) -> float | None:
        return None if rate is None else 2 * rate

    return with_links(
        catalogue,
        faster_link,
        lambda reach: replace(
            reach,
            latency_s=reach.latency_s / 2,
            flow_bytes_per_s=twice(reach.flow_bytes_per_s),
            aggregate_bytes_per_s=twice(reach.aggregate_bytes_per_s),
        ),
    )


def faster_curve(curve: Curve) -> Curve:
    return replace(curve, seconds=tuple(seconds / 2 for seconds in curve.seconds))


def faster_network(network: Network) -> Network:
    measured = network.measured
    return replace(
        network,
        catalogue=faster_links(network.catalogue),
        measured=replace(
            measured,
            between={
                ends: {flows: faster_curve(curve) for flows, curve in table.items()}
                for ends, table in measured.between.items()
            },
            within={
                gpu: {gpus: faster_curve(curve) for gpus, curve in table.items()}
                for gpu, table in measured.within.items()
            },
        ),
        zone_caps={zones: 2 * cap for zones, cap in network.zone_caps.items()},
    )


@pytest.mark.sim
def test_double_bandwidth_is_never_slower(examples: int) -> None:
    """The layers' times stay: what was measured with collectives inside says nothing of links."""
    quicker = 0
    for seed in cases("bandwidth", examples):
        _, world, plan = world_and_plan(seed)
        before = world.estimator.estimate(plan).iteration_s
        facts = PlaceFacts(world.cluster, world.measured)
        judge = EventEstimator(world.costs, faster_network(world.network), facts)
        after = judge.estimate(plan).iteration_s
        assert after <= before * (1 + ROUNDING), seed
        quicker += after < 0.999 * before
    assert quicker > examples // 3


@pytest.mark.sim
def test_double_bandwidth_speeds_up_computed_layers(examples: int) -> None:
    for seed in cases("collectives", examples):
        _, world, plan = world_and_plan(seed)
        network = faster_network(world.network)
        costs = {
            wires: LayerCosts(world.job, profile=None, catalogue=wires.catalogue, network=wires)
            for wires in (world.network, network)
        }
        facts = PlaceFacts(world.cluster, world.measured)
        slow, fast = (
            EventEstimator(costs[wires], wires, facts).estimate(plan).iteration_s
            for wires in (world.network, network)
        )
        assert fast <= slow * (1 + ROUNDING), seed


def faster_gpus(catalogue: Catalogue) -> Catalogue:
    return replace(
        catalogue,
        gpus={
            name: replace(
                gpu,
                peak_flops={precision: 2 * rate for precision, rate in gpu.peak_flops.items()},
                memory_bandwidth_bytes_per_s=2 * gpu.memory_bandwidth_bytes_per_s,
            )
            for name, gpu in catalogue.gpus.items()
        },
    )


@pytest.mark.sim
def test_double_gpu_speed_is_never_slower(examples: int) -> None:
    quicker = 0
    for seed in cases("flops", examples):
        _, world, plan = world_and_plan(seed)
        slow, fast = (
            world_of(
                world.job,
                cluster=every_pool(catalogue),
                measured=world.measured,
                zone_caps=dict(world.network.zone_caps),
            )
            .estimator.estimate(plan)
            .iteration_s
            for catalogue in (world.cluster.catalogue, faster_gpus(world.cluster.catalogue))
        )
        assert fast <= slow * (1 + ROUNDING), seed
        quicker += fast < slow
    assert quicker > examples // 3


def faster_profile(profile: Profile) -> Profile:
    return replace(
        profile,
        timings={
            key: Timing(t.forward_s / 2, t.backward_s / 2, t.optimizer_s / 2, t.notes)
            for key, t in profile.timings.items()
        },
    )


@pytest.mark.sim
def test_halved_measurements_are_never_slower(examples: int) -> None:
    measured = 0
    for seed in cases("measurements", examples):
        _, world, plan = world_and_plan(seed)
        if world.profile is None:
            continue
        measured += 1
        before = world.estimator.estimate(plan).iteration_s
        # A hook takes the same host time whatever the GPU, so it could eat more of a fast layer:
        # then the corrected time falls by more than half, and that is no slower either.
        quick = world_of(
            world.job,
            measured=world.measured,
            profile=faster_profile(world.profile),
            zone_caps=dict(world.network.zone_caps),
        )
        assert quick.estimator.estimate(plan).iteration_s <= before * (1 + ROUNDING), seed
    assert measured >= examples // 4
