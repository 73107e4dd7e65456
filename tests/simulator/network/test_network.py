"""Transfer times: curves, flows, caps and provenance."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from simulator.api import load_measurements, network_of
from simulator.cluster.cluster import Cluster, Pool
from simulator.hardware.catalogue import load_catalogue
from simulator.hardware.runtime_constants import platform_of
from simulator.network.curves import Curve, curve_from_bandwidths, make_consistent, seconds_at_flows
from simulator.network.network import MeasuredNetwork, Network
from simulator.spec.plan import Place
from simulator.spec.provenance import MEASURED
from tests.simulator.worlds import GPUS, ZONES, place, random_curve, random_network

EAST, WEST = "us-central1-a", "us-central1-b"
SIZES = (1.0, 500.0, 1e3, 3e3, 1e4, 7e4, 1e5, 9e5, 1e6, 1e7, 1e9)


def network(measured: MeasuredNetwork | None = None, **caps: float) -> Network:
    pairs = {(EAST, WEST): caps["east_west"]} if caps else {}
    return Network(load_catalogue(), measured or MeasuredNetwork(), {}, pairs)


def grows(seconds: list[float]) -> bool:
    """Whether no value is below the one before, apart from rounding."""
    return all(later >= earlier * (1 - 1e-12) for earlier, later in pairwise(seconds))


def between(*, one: str = "V100-16", flows: dict[int, float]) -> MeasuredNetwork:
    """Curves of constant total bandwidth, by the number of flows, inside one zone."""
    end = (EAST, one)
    table = {
        count: curve_from_bandwidths(count, sizes_bytes=(1e3, 1e9), bytes_per_s=(rate, rate))
        for count, rate in flows.items()
    }
    return MeasuredNetwork(between={(end, end): table})


# Curves --------------------------------------------------------------------------------------


def test_curve_returns_measured_points() -> None:
    curve = curve_from_bandwidths(2, sizes_bytes=(1e6, 4e6), bytes_per_s=(1e9, 2e9))
    # Two flows of a megabyte share a gigabyte per second.
    assert curve(1e6) == 2e-3
    assert curve(4e6) == 4e-3
    assert curve(2.5e6) == pytest.approx(3e-3)  # A line in time, not in bandwidth.
    assert curve(8e6) == pytest.approx(8e-3)  # Beyond: at the last rate.
    assert curve(0) == 0
    assert curve(1) == 20e-6  # A message takes a launch and a hop at least.


def test_short_messages_over_a_far_link_take_its_latency() -> None:
    """Curves that begin with a packet know the latency; those that begin with 64 KiB do not."""
    far = Curve(1, (1024.0, 1e6), (15e-3, 25e-3))
    assert far(64) == far(1) == 15e-3
    assert far(0) == 0
    coarse = Curve(1, (65536.0, 1e6), (15e-3, 25e-3))
    assert coarse(6553.6) == pytest.approx(1.5e-3)


def test_curves_of_large_messages_alone_leave_the_latency_to_the_catalogue() -> None:
    here, there = place("V100-16", EAST), place("V100-16", WEST)
    ends = (EAST, "V100-16"), (WEST, "V100-16")
    large = Curve(1, (2.0**24, 2.0**28), (0.15, 2.4))
    far = Curve(1, (1024.0, 2.0**24), (15e-3, 0.15))
    assumed = network().latency(here, there)
    assert 0 < assumed < 1e-3
    assert network(MeasuredNetwork(between={ends: {1: large}})).latency(here, there) == assumed
    assert (
        network(MeasuredNetwork(between={ends: {1: far, 2: large}})).latency(here, there) == 15e-3
    )


def test_curve_time_never_falls_with_size(examples: int) -> None:
    rng = random.Random("curves")
    for _ in range(examples):
        curve = random_curve(rng, rng.choice([1, 2, 4]))
        sizes = sorted([*SIZES, *(10 ** rng.uniform(0, 8) for _ in range(20))])
        seconds = [curve(size) for size in sizes]
        assert grows(seconds)
        assert seconds[0] > 0


def test_curve_time_is_made_monotonic() -> None:
    """A larger message that was measured as faster takes as long as the smaller one."""
    curve = curve_from_bandwidths(1, sizes_bytes=(1e6, 2e6, 4e6), bytes_per_s=(1e8, 1e9, 1e9))
    assert curve.seconds == (1e-2, 1e-2, 1e-2)


# Flows ---------------------------------------------------------------------------------------


def test_consistent_curves_carry_no_less_with_more_flows(examples: int) -> None:
    rng = random.Random("repair")
    for _ in range(examples):
        counts = sorted(rng.sample([1, 2, 3, 4, 8], rng.randint(2, 5)))
        broken = {count: random_curve(rng, count) for count in counts}
        fixed = make_consistent(broken)
        assert list(fixed) == sorted(counts)
        for size in (1e3, 1e4, 1e5, 1e6):
            for fewer, more in pairwise(counts):
                alone, shared = fixed[fewer](size), fixed[more](size)
                assert more * size / shared >= fewer * size / alone * (1 - 1e-12)
                assert alone <= shared * (1 + 1e-12)
            for count in counts:
                # A repair only ever takes a doubt away: no curve becomes slower.
                assert fixed[count](size) <= broken[count](size) * (1 + 1e-12)


def test_consistent_curves_are_unchanged() -> None:
    good = {
        count: curve_from_bandwidths(count, sizes_bytes=(1e3, 1e6), bytes_per_s=(rate, rate))
        for count, rate in ((1, 1e9), (2, 1.5e9), (4, 2e9))
    }
    fixed = make_consistent(good)
    assert fixed == good
    assert not any(curve.notes for curve in fixed.values())


def test_large_correction_adds_a_note() -> None:
    table = {
        1: curve_from_bandwidths(1, sizes_bytes=(1e3, 1e6), bytes_per_s=(1e8, 1e8)),
        4: curve_from_bandwidths(4, sizes_bytes=(1e3, 1e6), bytes_per_s=(1e9, 1e9)),
    }
    fixed = make_consistent(table)
    # One flow took 10 ms for what each of four had in 4 ms.
    assert fixed[1](1e6) == pytest.approx(4e-3)
    assert fixed[1].notes == ("1 flows were slower than 4",)
    end = (EAST, "V100-16")
    here = network(MeasuredNetwork(between={(end, end): fixed}))
    source = here.between_nodes_source(place(), place())
    assert (source.source, source.notes) == ("measured", fixed[1].notes)


def test_total_bandwidth_never_falls_with_flows(examples: int) -> None:
    rng = random.Random("flows")
    for _ in range(examples):
        counts = sorted(rng.sample([1, 2, 4, 8], rng.randint(1, 4)))
        table = make_consistent({count: random_curve(rng, count) for count in counts})
        for size in (1e3, 1e4, 1e6):
            seconds = [
                seconds_at_flows(table, flows=flows, bytes_each=size) for flows in range(1, 20)
            ]
            assert grows(seconds)
            sums = [flows * size / took for flows, took in enumerate(seconds, start=1)]
            known = [total for flows, total in enumerate(sums, start=1) if flows >= counts[0]]
            for fewer, more in pairwise(known):
                assert more >= fewer * (1 - 1e-12)


def test_flows_between_measured_counts_carry_as_much_as_the_smaller_count() -> None:
    here = network(between(flows={1: 1e9, 4: 2e9}))
    asked = {
        flows: here.between_nodes(place(), place(), flows=flows, bytes_each=1e6)
        for flows in (1, 2, 3, 4, 8)
    }
    # At the rate of one flow three would take 3 ms; but they are no slower than among four.
    assert asked == pytest.approx({1: 1e-3, 2: 2e-3, 3: 2e-3, 4: 2e-3, 8: 4e-3})
    few = network(between(flows={1: 1e9, 4: 1.2e9}))
    two = few.between_nodes(place(), place(), flows=2, bytes_each=1e6)
    assert two == pytest.approx(2e-3)  # In sum what one carries, and below the 3.3 ms of four.
    none = network(between(flows={4: 2e9}))
    assert none.between_nodes(place(), place(), flows=1, bytes_each=1e6) == pytest.approx(2e-3)


# Places --------------------------------------------------------------------------------------


def test_measured_curve_overrides_the_catalogue() -> None:
    measured = network(between(flows={1: 5e9}))
    assumed = network()
    one, far = place(), place(zone=WEST)
    assert measured.between_nodes(one, one, flows=1, bytes_each=1e9) == pytest.approx(0.2)
    assert measured.between_nodes_source(one, one).source == "measured"
    assert assumed.between_nodes_source(one, one).source == "analytic"
    # Only the pair that was measured: all others are as before.
    assert measured.between_nodes(one, far, flows=1, bytes_each=1e9) == assumed.between_nodes(
        one, far, flows=1, bytes_each=1e9
    )
    assert measured.between_nodes_source(one, far).source == "analytic"


def test_catalogue_links_by_hand() -> None:
    """Latency plus the slower of the flow's cap and its share of the machine's bandwidth."""
    here = network()
    link = here.catalogue.link("zone", here.machine_type(place("A100-40")))
    size = 1e9
    one = here.between_nodes(place("A100-40"), place("A100-40"), flows=1, bytes_each=size)
    assert one == pytest.approx(link.latency_s + size / link.flow_bytes_per_s)
    many = here.between_nodes(place("A100-40"), place("A100-40"), flows=16, bytes_each=size)
    assert many == pytest.approx(link.latency_s + 16 * size / link.aggregate_bytes_per_s)


def test_longer_distance_is_never_faster() -> None:
    here = network()
    zones = (EAST, WEST, "us-east1-b", "europe-west4-a")
    for gpu in GPUS:
        for size in (1e3, 1e6, 1e9):
            seconds = [
                here.between_nodes(place(gpu), place(gpu, zone), flows=2, bytes_each=size)
                for zone in zones
            ]
            assert grows(seconds), (gpu, size)


def test_time_never_falls_with_bytes_or_flows(examples: int) -> None:
    rng = random.Random("monotone")
    for _ in range(examples):
        here = network(random_network(rng))
        one, other = (place(rng.choice(GPUS), rng.choice(ZONES)) for _ in range(2))
        for flows in (1, 2, 5):
            seconds = [here.between_nodes(one, other, flows=flows, bytes_each=b) for b in SIZES]
            assert grows(seconds)
        for gpus in (2, 3, 4, 8):
            seconds = [here.within_node(one, gpus=gpus, bytes_each=b) for b in SIZES]
            assert grows(seconds)


def test_empty_transfer_takes_no_time() -> None:
    here = network()
    assert here.between_nodes(place(), place(), flows=3, bytes_each=0) == 0
    assert here.within_node(place(), gpus=4, bytes_each=0) == 0
    assert here.within_node(place(), gpus=1, bytes_each=1e9) == 0
    assert here.all_gather(place(), gpus=1, total_bytes=1e9) == 0


def test_zone_cap_limits_all_traffic_between_the_zones() -> None:
    free, capped = network(), network(east_west=1e6)
    one, other = place(), place(zone=WEST)
    asked = {"flows": 2, "bytes_each": 1e6}
    assert free.between_nodes(one, other, **asked) < 0.1  # type: ignore[arg-type]  # words the test chose
    assert capped.between_nodes(one, other, **asked) == 2.0  # type: ignore[arg-type]  # words the test chose
    assert capped.between_nodes(one, other, zone_bytes=5e6, **asked) == 5.0  # type: ignore[arg-type]  # words the test chose
    # The other way has no cap, and neither has what stays at home.
    for pair in ((other, one), (one, one), (other, other)):
        assert capped.between_nodes(*pair, **asked) == free.between_nodes(*pair, **asked)  # type: ignore[arg-type]  # words the test chose


# Within a machine ----------------------------------------------------------------------------


def test_pairs_of_a_machine_share_a_bus_but_not_nvlink() -> None:
    """Measured curves are of pairs that send in one direction; a ring uses both at once."""
    flat = {
        gpus: curve_from_bandwidths(
            gpus // 2, sizes_bytes=(1e3, 1e9), bytes_per_s=(gpus / 2 * 1e9, gpus / 2 * 1e9)
        )
        for gpus in (2, 4)
    }
    here = network(MeasuredNetwork(within={"V100-16": flat, "RTX-3090": flat}))
    assert here.within_node(place("V100-16"), gpus=2, bytes_each=1e9) == pytest.approx(1.0)
    assert here.within_node(place("RTX-3090"), gpus=2, bytes_each=1e9) == pytest.approx(2.0)
    # Three GPUs: as the next larger count that was measured. Eight: twice the pairs of four.
    assert here.within_node(place("V100-16"), gpus=3, bytes_each=1e9) == pytest.approx(1.0)
    assert here.within_node(place("V100-16"), gpus=8, bytes_each=1e9) == pytest.approx(2.0)


def test_collectives_by_hand() -> None:
    """Four GPUs all-gather in three steps of a quarter each; an all-reduce takes twice that."""
    flat = {4: curve_from_bandwidths(2, sizes_bytes=(1e3, 1e9), bytes_per_s=(2e9, 2e9))}
    here = network(MeasuredNetwork(within={"V100-16": flat}))
    assert here.all_gather(place(), gpus=4, total_bytes=1e9) == pytest.approx(3 * 0.25)
    assert here.all_reduce_within(place(), gpus=4, total_bytes=1e9) == pytest.approx(6 * 0.25)


def test_a_ring_over_a_link_of_the_catalogue_is_launched_once() -> None:
    here = network()
    machine = load_catalogue().machine("dgx-v100")
    at = Place("V100-16", "dgx-v100", EAST)
    link = machine.intra_link
    assert (machine.gpus, link.ring_bytes_per_s) == (8, 64.2e9)
    assert link.step_s == pytest.approx(1.25e-6)
    step_s = link.step_s + 1e9 / 4 / link.ring_bytes_per_s
    assert here.all_gather(at, gpus=4, total_bytes=1e9) == pytest.approx(
        link.latency_s + 3 * step_s
    )
    assert here.all_reduce_within(at, gpus=4, total_bytes=1e9) == pytest.approx(
        link.latency_s + 6 * step_s
    )


def test_gpus_of_a_host_share_its_bus_also_between_rings() -> None:
    here = network()
    at = Place("T4", "n1-standard-32-t4-4", EAST)
    link = load_catalogue().machine("n1-standard-32-t4-4").intra_link
    full_s, half_s = (
        here.ring_step_within(at, gpus=gpus, bytes_each=1e9) - link.step_s for gpus in (4, 2)
    )
    assert full_s == pytest.approx(1e9 / 3.8e9)
    assert half_s == pytest.approx(full_s / 2)
    # Two rings of two leave the bus no emptier than one of four.
    two_s = here.all_reduce_within(at, gpus=2, total_bytes=1e9)
    assert two_s == pytest.approx(link.latency_s + 2 * (link.step_s + full_s / 2))


def test_a_kind_without_a_machine_is_in_the_largest_one_of_the_cluster() -> None:
    catalogue = load_catalogue()
    pools = tuple(
        Pool(EAST, "T4", name, catalogue.machine(name).gpus, 8)
        for name in ("n1-standard-32-t4-4", "n1-standard-8-t4-1")
    )
    here = network_of(Cluster(pools, catalogue), MeasuredNetwork())
    assert here.machine_type(Place("T4", "", "")).name == "n1-standard-32-t4-4"
    assert here.machine_type(Place("T4", "n1-standard-8-t4-1", EAST)).gpus == 1


def test_a_ring_enters_a_machine_through_as_many_nics_as_it_has_members_there() -> None:
    here = network()
    one = Place("H200-141", "a3-ultragpu-8g", EAST)
    nic = load_catalogue().machine("a3-ultragpu-8g").nic
    asked = {"flows": 1, "bytes_each": 1e9}
    alone = here.ring_between_nodes(one, one, **asked)  # type: ignore[arg-type]  # words the test chose
    striped = here.ring_between_nodes(one, one, stripes=4, **asked)  # type: ignore[arg-type]  # words the test chose
    efficiency = platform_of("H200-141").ring_efficiency
    assert alone == pytest.approx((nic.latency_s + 1e9 / nic.flow_bytes_per_s) / efficiency)
    assert striped == pytest.approx((nic.latency_s + 0.25e9 / nic.flow_bytes_per_s) / efficiency)


def rings_over(*, gpu: str, is_tcp: bool, agree_with: Network) -> Network:
    """Curves of 1, 2, 4 and 8 flows inside one zone that equal the catalogue's link."""
    at, end = place(gpu), (EAST, gpu)
    link = agree_with.catalogue.link("zone", agree_with.machine_type(at))
    sizes = tuple(1024.0 * 4**power for power in range(9))
    table = {
        flows: Curve(flows, sizes, tuple(link.seconds(s, flows) for s in sizes), is_tcp=is_tcp)
        for flows in (1, 2, 4, 8)
    }
    return network(MeasuredNetwork(between={(end, end): table}))


def test_measured_tcp_links_that_equal_the_catalogue_give_equal_rings() -> None:
    """Measuring a link must not make data parallelism between machines dearer by itself."""
    here, at = network(), place("A100-40")
    there = rings_over(gpu="A100-40", is_tcp=True, agree_with=here)
    for stripes in (1, 2, 4, 8):
        for size in (1e6, 5e7):
            asked = {"flows": 1, "bytes_each": size, "stripes": stripes}
            wanted = here.ring_between_nodes(at, at, **asked)  # type: ignore[arg-type]  # words the test chose
            found = there.ring_between_nodes(at, at, **asked)  # type: ignore[arg-type]  # words the test chose
            assert found == pytest.approx(wanted, rel=1e-6), (stripes, size)


def test_more_channels_never_slow_a_ring_down(examples: int) -> None:
    rng = random.Random("channels")
    end = (EAST, "V100-16")
    for _ in range(examples):
        counts = (1, *sorted(rng.sample([2, 3, 4, 8], 2)))
        curves = {n: replace(random_curve(rng, n), is_tcp=True) for n in counts}
        there = network(MeasuredNetwork(between={(end, end): make_consistent(curves)}))
        for size in (1e3, 1e5, 1e7):
            seconds = [
                there.ring_between_nodes(
                    place(), place(), flows=1, bytes_each=size, stripes=stripes
                )
                for stripes in (8, 5, 4, 2, 1)
            ]
            assert grows(seconds)


def test_rings_over_curves_of_whole_transfers_and_under_gloo_are_not_divided() -> None:
    for gpu, is_tcp in (("A100-40", False), ("cpu", True)):
        there = rings_over(gpu=gpu, is_tcp=is_tcp, agree_with=network())
        at = place(gpu)
        asked = {"flows": 1, "bytes_each": 5e7}
        alone = there.ring_between_nodes(at, at, **asked)  # type: ignore[arg-type]  # words the test chose
        assert there.ring_between_nodes(at, at, stripes=8, **asked) == alone  # type: ignore[arg-type]  # words the test chose


def test_the_band_of_a_curve_is_the_error_of_its_link() -> None:
    end = (EAST, "V100-16")

    def source(*errors: float | None) -> float:
        table = {
            flows: Curve(flows, (1e3, 1e6), (1.0, 2.0), relative_error=error)
            for flows, error in enumerate(errors, start=1)
        }
        here = network(MeasuredNetwork(between={(end, end): table}))
        return here.between_nodes_source(place(), place()).relative_error

    assert source(0.07) == source(0.03, 0.07) == source(None, 0.07) == 0.07
    assert source(None) == source(0.001) == MEASURED.relative_error


# Money ---------------------------------------------------------------------------------------


def test_egress_is_priced_by_direction_and_free_within_a_zone() -> None:
    here = network(MeasuredNetwork(egress_usd_per_byte={(EAST, WEST): 7e-11}))
    assert here.egress_usd_per_byte(EAST, WEST) == 7e-11
    assert here.egress_usd_per_byte(EAST, EAST) == 0
    back = here.egress_usd_per_byte(WEST, EAST)
    assert back == network().egress_usd_per_byte(WEST, EAST) > 0


# The reference network -----------------------------------------------------------------------


def test_reference_network_is_consistent(reference: Path) -> None:
    """On every measured link, time and total bandwidth grow with bytes and flows."""
    catalogue = load_catalogue()
    measured = load_measurements(reference, catalogue=catalogue).network
    assert measured.between
    assert measured.within
    for table in measured.between.values():
        for size in (1e5, 1e6, 1e8):
            seconds = [
                seconds_at_flows(table, flows=flows, bytes_each=size) for flows in sorted(table)
            ]
            assert grows(seconds)
            sums = [flows / took for flows, took in zip(sorted(table), seconds, strict=True)]
            for fewer, more in pairwise(sums):
                assert more >= fewer * (1 - 1e-12)
    here = Network(catalogue, measured)
    for (zone, gpu), other in measured.between:
        one, there = Place(gpu, "", zone), Place(other[1], "", other[0])
        seconds = [here.between_nodes(one, there, flows=4, bytes_each=b) for b in SIZES]
        assert grows(seconds)


def test_polynomial_is_not_clamped() -> None:
    curve = Curve(1, (1e6, 2e6), (1.0, 2.0), polynomial=(0.0, 1.0, -5.0))
    assert curve.polynomial_bytes_per_s(1e6) == -5e9
    assert curve(1e6) == 1.0
    assert replace(curve, polynomial=None)(1e6) == 1.0
