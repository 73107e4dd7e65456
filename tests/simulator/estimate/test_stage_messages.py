"""Messages between stages by hand: bytes per hop, contention and gathers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from simulator.estimate.device_groups import DeviceGroups
from simulator.estimate.machine_layout import lay_out
from simulator.estimate.result import Estimate
from simulator.estimate.stage_messages import MessageTimes
from simulator.hardware.runtime_constants import platform_of
from simulator.network.curves import curve_from_bandwidths
from simulator.network.network import MeasuredNetwork
from simulator.spec.job import Job
from simulator.spec.plan import Pipeline, Place, Plan, Stage
from tests.simulator.worlds import GPUS, ZONES, World, place, small_model, stage, world_of

EAST, WEST = "us-central1-a", "us-central1-b"
RATE, INSIDE = 1e9, 4e9
WHOLE, SHARES = "sailor", "megatron-deepspeed"
"""The runtimes that send each rank the whole tensor, or a share of it."""
LAYERS = len(small_model().layers)
SAMPLE_BYTES = 128 * 64 * 4.0
"""Bytes per sample at a boundary: tokens x width x bytes."""


def flat(rate: float) -> dict[int, object]:
    """A link with the total bandwidth ``rate`` for any size and number of flows."""
    return {1: curve_from_bandwidths(1, sizes_bytes=(1.0, 1e12), bytes_per_s=(rate, rate))}


def world(caps: dict[tuple[str, str], float] | None = None, *, runtime: str = SHARES) -> World:
    ends = [(zone, gpu) for zone in ZONES for gpu in GPUS]
    wires = MeasuredNetwork(
        between={(one, other): flat(RATE) for one in ends for other in ends},  # type: ignore[misc]  # a pair of ends, as drawn
        within={"V100-16": flat(INSIDE)},  # type: ignore[dict-item]  # one count of GPUs
    )
    job = Job("fixed", small_model(), 8, 128, precision="fp32", max_tp=4, runtime=runtime)
    return world_of(job, measured=wires, zone_caps=caps or {})


def at(node: str, zone: str = EAST) -> Place:
    return place(zone=zone, node=node)


def pipeline(*stages: tuple[Place, int]) -> Pipeline:
    """Stages at these places with these TP degrees."""
    cuts = [(0, 2), (2, 4), (4, LAYERS)][: len(stages)]
    cuts[-1] = (cuts[-1][0], LAYERS)
    return Pipeline(
        4, tuple(stage(*cut, where, tp=tp) for cut, (where, tp) in zip(cuts, stages, strict=True))
    )


def channels(
    here: World, plan: Plan, p: int = 0, s: int = 0
) -> list[tuple[float, float, float, float]]:
    """Per hop: transfer and gather of the activation, then of the gradient."""
    layout = lay_out(plan, here.estimator.facts.machines)
    hops = layout.groups.hops
    sizes = np.full(len(hops.source), SAMPLE_BYTES)
    messages = MessageTimes(here.network, sends_whole=here.costs.runtime.sends_whole)
    priced = messages.channels(layout, bytes_per_sample=sizes)
    columns = (
        priced.activation_s,
        priced.gather_activation_s,
        priced.gradient_s,
        priced.gather_gradient_s,
    )
    behind = np.array([layout.groups.ids[row][:2] == (p, s) for row in hops.source.tolist()])
    return list(zip(*(column[behind].tolist() for column in columns), strict=True))


def test_one_flow_carries_the_whole() -> None:
    plan = Plan(2, (pipeline((at("a"), 1), (at("b"), 1)),))
    seconds = 2 * SAMPLE_BYTES / RATE
    assert channels(world(), plan) == [pytest.approx((seconds, 0, seconds, 0))]


def test_ranks_send_a_share_each_and_the_receivers_gather() -> None:
    """Four flows of a quarter share the NIC; then three steps of a quarter inside."""
    plan = Plan(2, (pipeline((at("a"), 4), (at("b"), 4)),))
    size = 2 * SAMPLE_BYTES
    gather = 3 * world().network.within_node(place(), gpus=4, bytes_each=size / 4)
    assert gather > 0
    assert channels(world(), plan) == [pytest.approx((size / RATE, gather, size / RATE, gather))]


def test_each_rank_receives_the_whole_and_none_gathers() -> None:
    """Four tensors share the NIC on the way to TP 4, and two on the way back to TP 2."""
    here, size = world(runtime=WHOLE), 2 * SAMPLE_BYTES
    apart = Plan(2, (pipeline((at("a"), 2), (at("b"), 4)),))
    expected = (4 * size / RATE, 0, 2 * size / RATE, 0)
    assert channels(here, apart) == [pytest.approx(expected)]
    near = Plan(2, (pipeline((at("a"), 1), (at("a"), 2)),))
    ahead, back = (
        here.network.within_node(place(), gpus=2, bytes_each=count * size) for count in (2, 1)
    )
    assert channels(here, near) == [pytest.approx((ahead, 0, back, 0))]


def test_ranks_that_share_tokens_send_their_own_or_gather_all_before() -> None:
    """Between equal degrees four flows of a quarter share the NIC, and nobody gathers."""
    here, size = world(runtime=WHOLE), 2 * SAMPLE_BYTES
    alike = Plan(2, (pipeline((at("a"), 4), (at("b"), 4)),), sequence_parallel=True)
    assert channels(here, alike) == [pytest.approx((size / RATE, 0, size / RATE, 0))]
    assert gathered_before(here, alike) == [(0, 0)]
    near = Plan(2, (pipeline((at("a"), 2), (at("a"), 2)),), sequence_parallel=True)
    inside = here.network.within_node(place(), gpus=4, bytes_each=size / 2)
    assert channels(here, near) == [pytest.approx((inside, 0, inside, 0))]
    for degrees in ((4, 2), (1, 4)):
        stages = [(at("a"), degrees[0]), (at("b"), degrees[1])]
        plan = Plan(2, (pipeline(*stages),), sequence_parallel=True)
        assert channels(here, plan) == channels(here, replace(plan, sequence_parallel=False))
        ahead, back = (
            here.network.all_gather(place(), gpus=tp, total_bytes=size) for tp in degrees
        )
        assert gathered_before(here, plan) == [(ahead, back)]
        assert back > 0


def test_what_ranks_gather_before_they_send_holds_up_their_device() -> None:
    here = world(runtime=WHOLE)
    plan = Plan(2, (pipeline((at("a"), 4), (at("b"), 2)),), sequence_parallel=True)
    layout = lay_out(plan, here.estimator.facts.machines)
    first, last = here.estimator.pipeline_times(plan, layout)[0].times
    ((ahead, back),) = gathered_before(here, plan)
    message_s = platform_of("V100-16").message_s
    assert first.send_activation == pytest.approx(message_s + ahead)
    assert last.send_gradient == pytest.approx(message_s + back)


def gathered_before(here: World, plan: Plan) -> list[tuple[float, float]]:
    """Per hop: what the source gathers of the activation, and the target of the gradient."""
    layout = lay_out(plan, here.estimator.facts.machines)
    messages = MessageTimes(here.network, sends_whole=here.costs.runtime.sends_whole)
    sizes = np.full(len(layout.groups.hops.source), SAMPLE_BYTES)
    priced = messages.channels(layout, bytes_per_sample=sizes)
    columns = priced.before_activation_s.tolist(), priced.before_gradient_s.tolist()
    return list(zip(*columns, strict=True))


def test_whole_tensors_of_all_pipelines_share_the_bandwidth_between_zones() -> None:
    cap = RATE / 10
    here = world({(EAST, WEST): cap, (WEST, EAST): cap}, runtime=WHOLE)
    plan = Plan(1, tuple(pipeline((at(f"a{p}"), 1), (at(f"b{p}", WEST), 4)) for p in range(3)))
    for p in range(3):
        expected = (12 * SAMPLE_BYTES / cap, 0, 3 * SAMPLE_BYTES / cap, 0)
        assert channels(here, plan, p) == [pytest.approx(expected)]


def test_only_receivers_with_several_ranks_gather() -> None:
    plan = Plan(1, (pipeline((at("a"), 1), (at("b"), 2)),))
    ((_, gathered, _, gathered_back),) = channels(world(), plan)
    assert gathered == world().network.all_gather(place(), gpus=2, total_bytes=SAMPLE_BYTES) > 0
    assert gathered_back == 0


def test_gather_uses_the_receivers_links() -> None:
    """Activations are gathered where T4s stand, gradients where V100s do."""
    here = world()
    slow = place("T4", node="b")
    plan = Plan(1, (pipeline((at("a"), 2), (slow, 2)),))
    ((_, gathered, _, gathered_back),) = channels(here, plan)
    assert gathered == here.network.all_gather(slow, gpus=2, total_bytes=SAMPLE_BYTES)
    assert gathered_back == here.network.all_gather(place(), gpus=2, total_bytes=SAMPLE_BYTES)
    assert gathered != gathered_back


def test_pipelines_on_one_machine_share_its_nic() -> None:
    """Two stages on machine a send to separate machines, and two on machine b receive."""
    seconds = SAMPLE_BYTES / RATE
    leaving = Plan(1, (pipeline((at("a"), 1), (at("b"), 1)), pipeline((at("a"), 1), (at("c"), 1))))
    arriving = Plan(1, (pipeline((at("a"), 1), (at("b"), 1)), pipeline((at("c"), 1), (at("b"), 1))))
    apart = Plan(1, (pipeline((at("a"), 1), (at("b"), 1)), pipeline((at("c"), 1), (at("d"), 1))))
    for plan, share in ((leaving, 2), (arriving, 2), (apart, 1)):
        for p in (0, 1):
            expected = (share * seconds, 0, share * seconds, 0)
            assert channels(world(), plan, p) == [pytest.approx(expected)]


def test_messages_inside_a_machine_do_not_use_its_nic() -> None:
    plan = Plan(1, (pipeline((at("a"), 1), (at("a"), 1), (at("b"), 1)),))
    here = world()
    inside = here.network.within_node(place(), gpus=2, bytes_each=SAMPLE_BYTES)
    assert channels(here, plan, s=0) == [pytest.approx((inside, 0, inside, 0))]
    seconds = SAMPLE_BYTES / RATE
    assert channels(here, plan, s=1) == [pytest.approx((seconds, 0, seconds, 0))]


def test_traffic_between_two_zones_shares_their_bandwidth() -> None:
    cap = RATE / 10
    here = world({(EAST, WEST): cap})
    plan = Plan(1, tuple(pipeline((at(f"a{p}"), 1), (at(f"b{p}", WEST), 1)) for p in range(3)))
    free = SAMPLE_BYTES / RATE
    for p in range(3):
        # Gradients come back the other way, which has no cap.
        assert channels(here, plan, p) == [pytest.approx((3 * SAMPLE_BYTES / cap, 0, free, 0))]


def test_neighbours_with_different_splits_exchange_shared_samples() -> None:
    """Halves of four samples to a quarter and three quarters: 0-1 | 2-3 against 0 | 1-3."""
    stages = (
        Stage((0, 2), 1, (at("a"), at("b")), "none", (1, 1)),
        Stage((2, LAYERS), 1, (at("c"), at("d")), "none", (1, 3)),
    )
    plan = Plan(4, (Pipeline(4, stages),))
    groups, found = DeviceGroups.of(plan), DeviceGroups.of(plan).hops
    ends = groups.index[found.source], groups.index[found.target], found.samples
    hops = list(zip(*(column.tolist() for column in ends), strict=True))
    assert hops == [(0, 0, 1), (0, 1, 1), (1, 1, 2)]
    assert sum(samples for *_, samples in hops) == 4
    seconds = SAMPLE_BYTES / RATE
    # Two flows leave a, and two arrive at d.
    transfers = [one[0] for one in channels(world(), plan)]
    assert transfers == pytest.approx([2 * seconds, 2 * seconds, 2 * 2 * seconds])


def test_device_times_include_gathers_and_message_overheads() -> None:
    """The middle of three stages sends and receives both ways; the ends only on one side."""
    here = world()
    plan = Plan(1, (pipeline((at("a"), 2), (at("b"), 4), (at("c"), 1)),))
    layout = lay_out(plan, here.estimator.facts.machines)
    (work,) = here.estimator.pipeline_times(plan, layout)
    first, middle, last = work.times
    each = platform_of("V100-16").message_s
    assert each > 0
    two, four = (
        here.network.all_gather(place(), gpus=gpus, total_bytes=SAMPLE_BYTES) for gpus in (2, 4)
    )
    assert (first.receive_activation, first.send_gradient) == (0, 0)
    assert (first.send_activation, first.receive_gradient) == (each, each + two)
    assert (middle.receive_activation, middle.send_activation) == (each + four, each)
    assert (middle.receive_gradient, middle.send_gradient) == (each + four, each)
    assert (last.receive_activation, last.send_gradient) == (each, each)
    assert (last.receive_gradient, last.send_activation) == (0, 0)
    transfers = [(edge.activation, edge.gradient) for edge in work.edges]
    assert transfers == [(pytest.approx(SAMPLE_BYTES / RATE),) * 2] * 2


def test_machines_are_filled_stage_by_stage() -> None:
    """Without names, as Megatron lays out its ranks: replicas of a stage side by side."""
    plan = Plan(1, (pipeline((place(), 2), (place(), 1)),) * 3)
    nodes = lay_out(plan, lambda *_: ((4, 1),)).node_of
    assert [nodes[p, 0, 0][3] for p in range(3)] == [0, 0, 1]
    assert [nodes[p, 1, 0][3] for p in range(3)] == [1, 1, 2]


def test_named_nodes_are_used_as_given() -> None:
    plan = Plan(1, (pipeline((at("x"), 1), (at("y"), 1)), pipeline((at("x"), 1), (at("x"), 1))))
    nodes = lay_out(plan, lambda *_: ((4, 1),)).node_of
    assert nodes[0, 0, 0] == nodes[1, 0, 0] == nodes[1, 1, 0] != nodes[0, 1, 0]


def test_a_pipeline_of_two_machines_waits_for_its_messages() -> None:
    """One micro batch with huge tensors crosses once in each direction."""

    def estimate(rate_share: float) -> Estimate:
        pair = (EAST, WEST)
        here = world({pair: RATE * rate_share, pair[::-1]: RATE * rate_share})
        stages = pipeline((at("a"), 1), (at("b", WEST), 1)).stages
        return here.estimator.estimate(Plan(1, (Pipeline(1, stages),)))

    slow, slower = estimate(1e-6), estimate(0.5e-6)
    each = SAMPLE_BYTES / (RATE * 1e-6)
    assert slower.iteration_s - slow.iteration_s == pytest.approx(2 * each, rel=1e-9)
