"""What a network file says, and how its mistakes are reported."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from simulator.documents.problems import InputError
from simulator.hardware.catalogue import load_catalogue
from simulator.network.network import MeasuredNetwork
from simulator.network.network_file import network_from_json

HERE = ("z", "V100-16")
FILE: dict[str, Any] = {
    "sizes_bytes": [1000, 2000],
    "curves": [
        {"id": 7, "bandwidth_GBps": [1.0, 2.0], "coeffs": [0.0, 0.1, 1.0]},
        {"bandwidth_GBps": [4.0, 4.0]},
    ],
    "inter_node": [],
}


def entry(curve: int, gpus: tuple[int, int] = (1, 1), **more: int) -> dict[str, Any]:
    """A measurement between two machines in one zone; ``v100`` is an alias of the GPU."""
    ends = ({"zone": "z", "gpu_type": "v100-16", "gpus": count} for count in gpus)
    return dict(zip(("from", "to"), ends, strict=True)) | {"curve": curve} | more


def read(**changes: Any) -> MeasuredNetwork:
    raw = copy.deepcopy(FILE) | changes
    return network_from_json(raw, place="network.json", catalogue=load_catalogue())


def problems(**changes: Any) -> list[str]:
    with pytest.raises(InputError) as caught:
        read(**changes)
    return [str(problem) for problem in caught.value.problems]


def test_bandwidths_become_seconds_by_size() -> None:
    measured = read(inter_node=[entry(7)])
    curve = measured.between[HERE, HERE][1]
    assert (curve.flows, curve.sizes_bytes) == (1, (1000.0, 2000.0))
    assert curve.seconds == pytest.approx((1e-6, 1e-6))
    assert measured.raw_between[HERE, HERE][1, 1].polynomial == (0.0, 0.1, 1.0)


def test_a_curve_without_a_number_goes_by_its_position() -> None:
    curve = read(inter_node=[entry(1)]).between[HERE, HERE][1]
    assert curve.seconds == pytest.approx((0.25e-6, 0.5e-6))
    assert curve.polynomial is None


def test_unequal_ends_are_for_the_paper_estimator_only() -> None:
    measured = read(inter_node=[entry(7, (2, 4))])
    assert measured.between == {}
    # As many flows as the end with fewer GPUs has.
    assert measured.raw_between[HERE, HERE][2, 4].flows == 2


def test_a_suggested_curve_replaces_a_doubtful_one() -> None:
    measured = read(inter_node=[entry(7, suggested_curve=1)])
    assert measured.between[HERE, HERE][1].seconds == pytest.approx((0.25e-6, 0.5e-6))
    assert measured.raw_between[HERE, HERE][1, 1].seconds == pytest.approx((1e-6, 1e-6))


@pytest.mark.parametrize(("gpus", "flows"), [(2, 1), (4, 2), (1, 1)])
def test_inside_a_machine_half_of_the_gpus_send(gpus: int, flows: int) -> None:
    measured = read(intra_node=[{"gpu_type": "V100-16", "gpus": gpus, "curve": 7}])
    assert {count: curve.flows for count, curve in measured.within["V100-16"].items()} == {
        gpus: flows
    }


def test_prices_and_machine_sizes_go_by_the_names_of_the_catalogue() -> None:
    measured = read(
        egress_usd_per_GB={"zone_to_zone": {"a": {"b": 0.01}}},
        gpu_price_usd_per_hour={"simulations_constants_GPU_PRICES": {"v100-16": {"z": 2}}},
        gpus_per_node={"v100-16": 4},
    )
    assert measured.egress_usd_per_byte == {("a", "b"): pytest.approx(1e-11)}
    assert measured.price_usd_per_gpu_hour == {("V100-16", "z"): 2.0}
    assert measured.gpus_per_node == {"V100-16": 4}


@pytest.mark.parametrize(
    ("key", "inner"),
    [
        ("egress_usd_per_GB", "zone_to_zone"),
        ("gpu_price_usd_per_hour", "simulations_constants_GPU_PRICES"),
    ],
)
def test_prices_that_stand_where_none_are_read_are_reported(key: str, inner: str) -> None:
    (found,) = problems(**{key: {"a": {"b": 0.01}}})
    assert found == (
        f'network.json: {key}: has no "{inner}", where its prices are read; '
        f'write {{"{inner}": ...}} around them'
    )
    read(**{key: {"note": "none yet"}})


@pytest.mark.parametrize("sizes", [None, [1000], [2000, 1000], [0, 1000], "1000"])
def test_sizes_must_grow(sizes: object) -> None:
    assert problems(sizes_bytes=sizes) == [
        "network.json: sizes_bytes: must be a growing list of positive numbers"
    ]


def test_all_mistakes_are_reported_with_their_places() -> None:
    assert problems(curves=[{"bandwidth_GBps": [0.0, 1.0]}, {"id": 1}]) == [
        "network.json: curves[0].bandwidth_GBps: must be a list of positive numbers",
        "network.json: curves[1].bandwidth_GBps: must be a list of positive numbers",
    ]
    short = [{"id": 7, "bandwidth_GBps": [1.0]}]
    intra = [{"gpu_type": "V100-16", "gpus": 2, "curve": 9}]
    found = problems(curves=short, inter_node=[entry(7)], intra_node=intra)
    # The curve is asked for twice: as it was measured, and as it is suggested.
    assert found == [
        *["network.json: inter_node[0]: names curve 7, which is missing or of a wrong length"] * 2,
        "network.json: intra_node[0]: names curve 9, which is missing or of a wrong length",
    ]


def test_a_missing_key_or_a_wrong_type_is_one_problem() -> None:
    assert "the key 'to' is missing" in problems(inter_node=[{"from": {}}])[0]
    assert "wrong type" in problems(inter_node=[7])[0]
    assert "wrong type" in problems(sizes_bytes=[1, 2**1024])[0]


def test_negative_prices_and_counts_below_one_are_reported_with_their_places() -> None:
    found = problems(
        inter_node=[entry(7, (0, 1))],
        intra_node=[{"gpu_type": "V100-16", "gpus": 0, "curve": 7}],
        egress_usd_per_GB={"zone_to_zone": {"a": {"b": -0.01}}},
        gpu_price_usd_per_hour={"simulations_constants_GPU_PRICES": {"v100-16": {"z": -2}}},
        gpus_per_node={"v100-16": 0},
    )
    assert found == [
        "network.json: inter_node[0].from.gpus: is 0; give a number of GPUs of at least 1",
        "network.json: intra_node[0].gpus: is 0; give a number of GPUs of at least 1",
        "network.json: egress_usd_per_GB, a and b: is -0.01; give a price of at least 0",
        "network.json: gpu_price_usd_per_hour, v100-16 and z: is -2; give a price of at least 0",
        "network.json: gpus_per_node.v100-16: is 0; give a number of GPUs of at least 1",
    ]


def test_transport_and_band_of_a_curve_are_read() -> None:
    band = {"low_GBps": [0.8, 1.9], "high_GBps": [1.1, 2.0]}
    tcp = FILE["curves"][0] | {"transport": "tcp"} | band
    here = read(curves=[tcp, FILE["curves"][1]], inter_node=[entry(7)])
    found = here.between[HERE, HERE][1]
    assert found.is_tcp
    # At 1 kB a quarter, at 2 kB a twentieth.
    assert found.relative_error == pytest.approx((0.25 + 1 / 19) / 2)
    plain = read(inter_node=[entry(7)]).between[HERE, HERE][1]
    assert (plain.is_tcp, plain.relative_error) == (False, None)


def test_a_flawed_band_or_transport_is_reported() -> None:
    flawed = FILE["curves"][0] | {"transport": "udp", "low_GBps": [1.0], "high_GBps": [1.0, -1.0]}
    found = problems(curves=[flawed])
    assert 'curves[0].transport: is "udp"; give "nccl" or "tcp"' in found[-1]
    assert [one.split(":")[1].split(".")[1] for one in found[:2]] == ["low_GBps", "high_GBps"]
