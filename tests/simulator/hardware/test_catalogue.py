"""The built-in catalogue: hardware, sources, prices, places and links."""

from __future__ import annotations

import itertools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.documents.problems import InputError
from simulator.hardware.catalogue import Catalogue, load_catalogue
from simulator.hardware.catalogue_overlay import built_in_facts, spelling_key
from simulator.hardware.types import DISTANCES, Link

GPUS = {
    "V100-16", "T4", "A100-40", "A100-80", "L4", "H100-80", "H200-141", "GH-96",
    "RTX-2080", "RTX-3090", "RTX-4090", "Titan-RTX", "cpu",
}  # fmt: skip
GIB = 2**30


@pytest.fixture(scope="module")
def catalogue() -> Catalogue:
    return load_catalogue()


# --- what there is -------------------------------------------------------------------------------


def test_expected_gpus_are_in_the_catalogue(catalogue):
    assert set(catalogue.gpus) == GPUS


def test_gpus_have_sane_figures(catalogue):
    for gpu in catalogue.gpus.values():
        assert 0.9 * gpu.memory_bytes <= gpu.usable_memory_bytes <= gpu.memory_bytes, gpu
        assert 1e9 <= gpu.memory_bandwidth_bytes_per_s <= 1e13, gpu
        assert "fp32" in gpu.peak_flops, gpu
        assert all(1e10 <= rate <= 1e15 for rate in gpu.peak_flops.values()), gpu
        # Dense, accumulating in fp32: nothing here is slower than plain fp32.
        assert min(gpu.peak_flops.values()) == gpu.peak_flops["fp32"], gpu


@pytest.mark.parametrize("old", ["V100-16", "T4", "RTX-2080", "Titan-RTX"])
def test_a_gpu_has_no_rate_for_a_precision_that_it_lacks(catalogue, old):
    assert set(catalogue.gpu(old).peak_flops) == {"fp32", "fp16"}


def test_memory_agrees_with_the_measured_clusters(catalogue, reference):
    listed = json.loads((reference / "network.json").read_text())["gpu_memory_bytes"]
    for name, gib in listed["simulator_GPU_MEMORY_GiB"].items():
        assert catalogue.gpu(name).memory_bytes == gib * GIB, name
    for name in ("A100-40", "GH-96"):  # The others are nominal there too.
        usable_bytes = catalogue.gpu(name).usable_memory_bytes
        assert usable_bytes == pytest.approx(listed["cluster_config"][name], rel=1e-5), name


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("GH200-96", "GH-96"),
        ("gh200", "GH-96"),
        ("V100", "V100-16"),
        ("nvidia-tesla-v100", "V100-16"),
        ("A100-80GB", "A100-80"),
        ("a100_40", "A100-40"),
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("nvidia-l4", "L4"),
        ("nvidia-h100-80gb", "H100-80"),
        ("NVIDIA H200", "H200-141"),
        ("2080Ti", "RTX-2080"),
        ("titan rtx", "Titan-RTX"),
        ("CPU", "cpu"),
    ],
)
def test_other_spellings_of_a_gpu_are_understood(catalogue, spelling, name):
    assert catalogue.gpu_name(spelling) == name
    assert catalogue.gpu(spelling).name == name


def test_no_spelling_is_ambiguous():
    for kind in ("gpu", "machine"):
        assert _find_claimed_twice(kind) == []


def _find_claimed_twice(kind: str) -> list[str]:
    claims: dict[str, set[str]] = {}
    for fact in built_in_facts().values():
        if fact.name[0] == kind:
            for name in (fact.name[1], *fact.values.get("aliases", [])):
                claims.setdefault(spelling_key(name), set()).add(fact.name[1])
    return [name for name, owners in claims.items() if len(owners) > 1]


def test_a_bare_a100_is_ambiguous_and_both_are_offered(catalogue):
    with pytest.raises(InputError, match=r'no GPU "A100".*A100-[48]0.*A100-[48]0'):
        catalogue.gpu("A100")


def test_every_fact_has_a_source_and_a_date(catalogue):
    prices = [price for one in catalogue.machines.values() for price in one.prices.values()]
    links = [link for one in catalogue.machines.values() for link in (one.intra_link, one.nic)]
    facts = [
        *catalogue.gpus.values(), *catalogue.machines.values(), *prices, *links,
        *catalogue.regions.values(), *catalogue.distance_limits.values(),
        *catalogue.egress_by_pair.values(), *catalogue.egress_rules.values(),
    ]  # fmt: skip
    assert len(facts) > 300
    for fact in facts:
        assert len(fact.source) > 10, fact
        assert fact.date[:2] == "20", fact
        assert fact.date[:4].isdigit(), fact


# --- machines and prices -------------------------------------------------------------------------


def test_machines_have_known_gpus_and_plausible_links(catalogue):
    for machine in catalogue.machines.values():
        assert machine.gpu in catalogue.gpus, machine
        assert 1 <= machine.gpus <= 16, machine
        assert machine.nic.aggregate_bytes_per_s <= machine.nic_bytes_per_s, machine
        assert machine.intra_link.flow_bytes_per_s <= machine.intra_link.aggregate_bytes_per_s
        assert 0 < machine.intra_link.latency_s < 1e-3, machine


def test_every_gpu_has_a_machine_type(catalogue):
    for gpu in GPUS:
        sizes = [machine.gpus for machine in catalogue.machines_for(gpu)]
        assert sizes, gpu
        assert sizes == sorted(sizes), gpu


def test_expected_machine_types_are_in_the_catalogue(catalogue):
    names = [
        *(f"a2-highgpu-{n}g" for n in (1, 2, 4, 8)), *(f"a2-ultragpu-{n}g" for n in (1, 2, 4, 8)),
        *(f"a3-highgpu-{n}g" for n in (1, 2, 4, 8)), "a2-megagpu-16g", "a3-ultragpu-8g",
        *(f"g2-standard-{n}" for n in (4, 24, 48, 96)),
        *(f"p3.{n}xlarge" for n in (2, 8, 16)), "g4dn.xlarge", "g4dn.12xlarge",
        "p4d.24xlarge", "p4de.24xlarge", "p5.48xlarge",
        "gh200-4", "rtx-3090-8", "titan-rtx-8", "rtx-2080-8", "rtx-4090-8", "local",
    ]  # fmt: skip
    assert [name for name in names if name not in catalogue.machines] == []
    for gpu, counts in {"V100": (1, 2, 4, 8), "T4": (1, 2, 4)}.items():
        cloud = [one.gpus for one in catalogue.machines_for(gpu) if one.price("us-central1")]
        assert tuple(cloud) == counts


def test_only_the_local_host_is_free(catalogue):
    for machine in catalogue.machines.values():
        for price in machine.prices.values():
            if machine.name == "local":
                assert (price.on_demand_usd_per_hour, price.spot_usd_per_hour) == (0, 0)
            else:
                assert price.spot_usd_per_hour is not None
                assert 0 < price.spot_usd_per_hour < price.on_demand_usd_per_hour, machine


@pytest.mark.parametrize(
    ("name", "zone", "usd"),
    [
        ("V100-16", "us-central1-a", 2.860),  # published: n1-standard-8 0.380 + V100 2.48
        ("a2-highgpu-1g", "us-east1-b", 3.673),
        ("a2-highgpu-8g", "us-west1-b", 29.387 / 8),
        ("g2-standard-4", "us-central1-a", 0.7068),
        ("a2-ultragpu-1g", "us-central1-c", 5.069 - 0.041),  # less its local SSD
        ("a3-highgpu-8g", "us-central1-a", (88.49 - 0.66) / 8),  # less its local SSDs
        ("V100-16", "us-east-1c", 3.06),  # of p3.2xlarge
        ("p4d.24xlarge", "eu-west-1b", 23.716 / 8),
    ],
)
def test_prices_of_parts_add_up_to_published_prices(catalogue, name, zone, usd):
    assert catalogue.price_usd_per_gpu_hour(name, zone) == pytest.approx(usd, rel=1e-3)


def test_prices_agree_with_the_paper(catalogue, reference):
    network = json.loads((reference / "network.json").read_text())
    table = network["gpu_price_usd_per_hour"]["simulations_constants_GPU_PRICES"]
    for gpu in ("A100-40", "V100-16"):
        for zone, usd in table[gpu].items():
            if not zone.startswith("europe"):  # where the paper repeats the American price
                assert catalogue.price_usd_per_gpu_hour(gpu, zone) == pytest.approx(usd, rel=1e-5)


def test_unknown_price_is_none(catalogue):
    assert catalogue.price_usd_per_gpu_hour("GH-96", "us-central1-a") is None
    assert catalogue.price_usd_per_gpu_hour("A100-40", "europe-west2-a") is None
    assert catalogue.price_usd_per_gpu_hour("rtx-3090-8", "local", spot=True) is None
    assert catalogue.price_usd_per_gpu_hour("cpu", "europe-west2-a") == 0


def test_gpu_price_is_that_of_machines_of_its_size(catalogue):
    def usd(**more: int) -> float | None:
        return catalogue.price_usd_per_gpu_hour("A100-40", "us-central1-a", **more)

    assert usd() == usd(gpus_per_machine=4)
    assert usd(gpus_per_machine=16) == pytest.approx(55.740 / 16, rel=1e-4)
    assert usd(gpus_per_machine=3) == usd()


def test_unlisted_machine_size_is_scaled_from_the_next_larger(catalogue):
    cut, whole = catalogue.machine_for("V100", 3), catalogue.machine_for("V100", 4)
    assert (cut.name, cut.gpu, cut.gpus) == ("V100-16x3", "V100-16", 3)
    assert whole.name == "n1-standard-32-v100-4"
    assert cut.nic_bytes_per_s == pytest.approx(whole.nic_bytes_per_s * 3 / 4)
    assert cut.intra_link == whole.intra_link
    ours, theirs = cut.price("us-central1"), whole.price("us-central1")
    assert ours is not None
    assert theirs is not None
    assert ours.on_demand_usd_per_hour / 3 == pytest.approx(theirs.on_demand_usd_per_hour / 4)
    assert catalogue.machine(cut.name) == cut
    assert catalogue.machine("V100-16x4") is whole


# --- places --------------------------------------------------------------------------------------


def test_distance_is_symmetric(catalogue):
    zones = ["local", *sorted(catalogue.zones)[::7]]
    for a, b in itertools.product(zones, zones):
        assert catalogue.distance(a, b) == catalogue.distance(b, a)
        assert (catalogue.distance(a, b) == "zone") == (a == b)


def test_distances_by_example(catalogue):
    here = "us-central1-a"
    for there, distance in (
        ("us-central1-f", "region"),
        ("us-west1-b", "continent"),
        ("northamerica-northeast1-a", "continent"),
        ("europe-west4-a", "world"),
        ("local", "world"),
    ):
        assert catalogue.distance(here, there) == distance


def test_every_zone_names_its_region(catalogue):
    assert len(catalogue.zones) > 80
    for zone, region in catalogue.zones.items():
        assert region in catalogue.regions
        assert zone == "local" or region in {zone[:-2], zone[:-1]}


def test_declared_zones_have_their_region(catalogue):
    declared = {"rack-a": "cellar", "rack-b": "cellar", "edge": "us-central1"}
    assert catalogue.zone_region("edge", declared) == "us-central1"
    assert catalogue.distance("rack-a", "rack-b", declared) == "region"
    assert catalogue.distance("rack-a", "edge", declared) == "world"
    assert catalogue.distance("edge", "us-central1-b", declared) == "region"
    assert catalogue.egress_usd_per_byte("rack-a", "rack-b", declared) == 0
    assert "not billed by the byte" in catalogue.egress("rack-a", "rack-b", declared).source
    assert catalogue.egress_usd_per_byte("edge", "rack-a", declared) > 0.1 / GIB


def test_egress_by_example(catalogue):
    for a, b, usd_per_gib in (
        ("us-central1-a", "us-central1-a", 0.0),
        ("us-central1-a", "us-central1-b", 0.01),
        ("us-central1-a", "us-west1-b", 0.02),
        ("europe-west4-a", "europe-west1-b", 0.02),
        ("us-central1-a", "europe-west4-a", 0.05),
        ("europe-west4-a", "asia-east1-c", 0.08),
        ("us-east-1a", "us-east-1b", 0.02),
        ("us-east-1a", "us-east-2b", 0.01),
        ("us-west-2c", "eu-west-1a", 0.02),
        ("us-west-2c", "us-west1-b", 0.09),
        ("us-west1-b", "us-west-2c", 0.12),
    ):
        assert catalogue.egress_usd_per_byte(a, b) == pytest.approx(usd_per_gib / GIB)


def test_egress_between_all_continents_of_the_cloud_is_listed(catalogue):
    one_of = {region.continent: zone for zone, region in _cloud_zones(catalogue)}
    assert len(one_of) == 7
    for (a, zone_a), (b, zone_b) in itertools.product(one_of.items(), one_of.items()):
        if a != b:
            egress = catalogue.egress(zone_a, zone_b)
            assert egress is catalogue.egress_by_pair[a, b]
            assert 0.02 <= egress.usd_per_byte * GIB <= 0.14


def _cloud_zones(catalogue: Catalogue):
    for zone, name in catalogue.zones.items():
        region = catalogue.regions[name]
        if region.provider == "gce":
            yield zone, region


def test_unknown_names_get_a_suggestion(catalogue):
    for ask, answer in (
        (lambda: catalogue.gpu("H10-80"), r'no GPU "H10-80" is known.*"H100-80"'),
        (lambda: catalogue.machine("a2-highgpu-4"), r'no machine type.*"a2-highgpu-4g"'),
        (lambda: catalogue.zone_region("us-centrall-a"), r'no zone.*"us-central1-a"'),
        (lambda: catalogue.zone_region("rak", {"rack": "r"}), r'no zone "rak".*"rack"'),
    ):
        with pytest.raises(InputError, match=answer):
            ask()


# --- links ---------------------------------------------------------------------------------------

rates = st.floats(1e6, 1e12)
links = st.builds(
    Link,
    latency_s=st.floats(0, 1),
    flow_bytes_per_s=rates,
    aggregate_bytes_per_s=rates,
    source=st.just("drawn"),
    date=st.just("2025"),
)


@given(link=links, size=st.floats(0, 1e12), more=st.floats(0, 1e12), flows=st.integers(1, 64))
def test_more_bytes_or_more_flows_never_take_less_time(link, size, more, flows):
    seconds = link.seconds(size, flows)
    assert seconds >= link.latency_s
    assert link.seconds(size + more, flows) >= seconds
    assert link.seconds(size, flows + 1) >= seconds


@given(link=links, size=st.floats(0, 1e12), flows=st.integers(1, 64), factor=st.floats(1, 100))
def test_a_better_link_is_never_slower(link, size, flows, factor):
    wide = Link(
        link.latency_s / factor,
        link.flow_bytes_per_s * factor,
        link.aggregate_bytes_per_s * factor,
        link.source,
        link.date,
    )
    assert wide.seconds(size, flows) <= link.seconds(size, flows)


def test_flows_share_the_aggregate_bandwidth():
    link = Link(0.5, flow_bytes_per_s=10, aggregate_bytes_per_s=25, source="", date="")
    assert link.seconds(100, 1) == 10.5
    assert link.seconds(100, 2) == 10.5
    assert link.seconds(100, 5) == 20.5


def test_longer_distance_is_never_faster(catalogue):
    for machine in catalogue.machines.values():
        for size in (0, 1e5, 1e8):
            for flows in (1, 8):
                seconds = [
                    catalogue.link(distance, machine).seconds(size, flows) for distance in DISTANCES
                ]
                assert seconds == sorted(seconds), machine.name


def test_a_link_between_two_machines_has_the_caps_of_both(catalogue):
    def link(here: str, there: str) -> Link:
        return catalogue.link("zone", catalogue.machine(here), catalogue.machine(there))

    mixed = link("titan-rtx-8", "rtx-3090-8")
    slow = link("rtx-3090-8", "rtx-3090-8")
    assert mixed.aggregate_bytes_per_s == slow.aggregate_bytes_per_s < 0.125e9
    assert mixed == link("rtx-3090-8", "titan-rtx-8")


def test_default_links_are_near_the_measured_curves(catalogue, reference):
    """Within a factor of 1.42 at 1 MiB and more, for one pair of GPUs in one zone."""
    network = json.loads((reference / "network.json").read_text())
    curves = {curve["id"]: curve["bandwidth_GBps"] for curve in network["curves"]}
    machines = {
        "A100-40": "a2-highgpu-4g", "A100-80": "a2-ultragpu-4g", "GH-96": "gh200-4",
        "Titan-RTX": "titan-rtx-8", "RTX-2080": "rtx-2080-8", "RTX-3090": "rtx-3090-8",
    }  # fmt: skip
    seen = 0
    for entry in network["inter_node"]:
        gpu = entry["from"]["gpu_type"]
        if entry["from"] != entry["to"] or entry["from"]["gpus"] != 1 or gpu not in machines:
            continue
        zone = entry["from"]["zone"]
        link = catalogue.link("zone", catalogue.machine(machines[gpu]))
        for size, gbytes_per_s in zip(network["sizes_bytes"], curves[entry["curve"]], strict=True):
            if size >= 2**20:
                seen += 1
                measured_s = size / (gbytes_per_s * 1e9)
                assert abs(math.log(link.seconds(size) / measured_s)) < 0.35, (gpu, zone, size)
    assert seen > 50
