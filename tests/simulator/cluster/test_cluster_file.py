"""Cluster files: pools by machine or GPU kind, declared zones, and mistakes."""

from __future__ import annotations

import copy
import json
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.cluster.cluster import Cluster, Pool, Quota, ZoneLink
from simulator.cluster.cluster_file import cluster_from_document, default_machine_size, load_cluster
from simulator.documents.files import parse_document
from simulator.documents.problems import InputError
from simulator.hardware.catalogue import load_catalogue

ROOT = Path(__file__).resolve().parents[3]
SCHEMAS = resources.files("simulator") / "data/schemas"
VALIDATOR = jsonschema.Draft202012Validator(
    json.loads((SCHEMAS / "cluster.schema.json").read_text(encoding="utf-8"))
)

FULL: dict[str, Any] = {
    "zone": [{"name": "lab-1", "region": "lab"}],
    "pool": [
        {"zone": "us-central1-a", "machine": "a2-highgpu-4g", "machines": 8, "obtainable": 4},
        {"zone": "us-central1-a", "machine": "a2-highgpu-4g", "gpus": 6, "spot": True},
        {
            "zone": "us-central1-b",
            "gpu": "V100-16",
            "gpus_per_machine": 4,
            "gpus": 96,
            "obtainable_gpus": 2,
            "price_usd_per_gpu_hour": 2.86,
        },
        {"zone": "lab-1", "gpu": "GH200-96", "machines": 0, "obtainable": 2},
    ],
    "quota": [{"where": "us-central1", "gpu": "A100-40", "gpus_max": 64}],
    "zone_link": [{"from_zone": "us-central1-a", "to_zone": "lab-1", "gbit_per_s": 8}],
}


def read(raw: dict[str, Any]) -> Cluster:
    document = parse_document(json.dumps(raw).encode(), name="c.json", flaws_raise=False)
    return cluster_from_document(document)


def read_toml(text: str, *, folder: Path = Path()) -> Cluster:
    raw = text.encode()
    return cluster_from_document(
        parse_document(raw, name="cluster.toml", folder=folder, flaws_raise=False)
    )


def one_pool(**pool: Any) -> Pool:
    (found,) = read({"pool": [pool]}).pools
    return found


def test_the_example_has_three_zones() -> None:
    cluster = load_cluster(ROOT / "examples" / "three-zones.toml")
    assert [(p.zone, p.gpu, p.gpus) for p in cluster.pools] == [
        ("us-central1-a", "A100-40", 16),
        ("us-central1-b", "A100-40", 8),
        ("us-west1-a", "V100-16", 16),
    ]
    assert all(pool.price_source == "catalogue" for pool in cluster.pools)


def test_every_key_is_read() -> None:
    VALIDATOR.validate(FULL)
    cluster = read(FULL)
    catalogue = load_catalogue()
    zone = "us-central1-a"
    a100 = ("a2-highgpu-4g", 4)

    def price(spot: bool) -> float | None:
        return catalogue.price_usd_per_gpu_hour("a2-highgpu-4g", zone=zone, spot=spot)

    assert price(True) is not None
    assert price(True) != price(False)
    assert cluster.pools == (
        Pool(zone, "A100-40", *a100, 32, 16, False, price(False), "catalogue"),
        Pool(zone, "A100-40", *a100, 6, 0, True, price(True), "catalogue"),
        Pool("us-central1-b", "V100-16", "V100-16x4", 4, 96, 2, False, 2.86, "c.json"),
        Pool("lab-1", "GH-96", "GH-96x4", 4, 0, 8, False, None, "unknown"),
    )
    assert cluster.zone_regions == (("lab-1", "lab"),)
    assert cluster.quotas == (Quota("us-central1", "A100-40", 64),)
    assert cluster.zone_links == (ZoneLink("us-central1-a", "lab-1", 1e9),)


def test_local_zone_always_exists() -> None:
    pool = one_pool(zone="local", machine="local", machines=4)
    assert (pool.gpu, pool.gpus, pool.price_usd_per_gpu_hour) == ("cpu", 4, 0.0)
    assert one_pool(zone="local", gpu="cpu", gpus=3).gpus_per_machine == 1


def test_gpus_need_not_fill_their_machines() -> None:
    pool = one_pool(zone="us-central1-a", gpu="A100-40", gpus_per_machine=4, gpus=2)
    assert (pool.gpus, pool.gpus_per_machine) == (2, 4)
    pool = one_pool(zone="us-central1-a", gpu="A100-40", gpus_per_machine=4, gpus=9)
    assert (pool.gpus, pool.gpus_per_machine) == (9, 4)


def test_gpu_kind_alone_gets_the_default_machine_size() -> None:
    catalogue = load_catalogue()
    assert default_machine_size("A100-40", catalogue) == 8  # though one of 16 exists
    assert default_machine_size("GH-96", catalogue) == 4
    assert default_machine_size("cpu", catalogue) == 1
    assert one_pool(zone="us-central1-a", gpu="A100-40", gpus=16).machine == "A100-40x8"


def test_catalogue_file_is_relative_to_the_cluster_file(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        '[price.a2-highgpu-4g.us-central1]\non_demand_usd_per_hour = 4.0\nsource = "a contract"\n'
        'date = "2025"\n'
    )
    text = 'catalogue = "mine.toml"\n[[pool]]\nzone = "us-central1-a"\n'
    text += 'machine = "a2-highgpu-4g"\nmachines = 1\n'
    assert read_toml(text, folder=tmp_path).pools[0].price_usd_per_gpu_hour == 1.0
    with pytest.raises(InputError) as caught:
        read_toml(text.replace("mine", "yours") + "spott = true", folder=tmp_path)
    assert [problem.place for problem in caught.value.problems] == [
        "cluster.toml: catalogue: yours.toml",
        "cluster.toml: [[pool]] 1",
    ]


def test_all_mistakes_are_reported_with_place_and_cure() -> None:
    text = """
        [[pool]]
        zone = "us-central1-A"
        machine = "a2-highgpu-4"
        machines = 2
        gpus = 8
        price_usd_per_gpu_hour = -1
        [[pool]]
        zone = "local"
        gpu = "A100-4O"
        [[pool]]
        zone = "local"
        machine = "local"
        gpu = "T4"
        gpus_per_machine = 2
        machines = true
        [[pool]]
        gpus = 1
        [[quota]]
        where = "us-centrl1"
        gpu = "T4"
        gpus_max = 1.5
        [[zone_link]]
        from_zone = "local"
        to_zone = "local"
        gbit_per_s = 0
        [[pol]]
    """
    with pytest.raises(InputError) as caught:
        read_toml(text)
    problems = caught.value.problems
    assert [f"{p.place.removeprefix('cluster.toml: ')}: {p.what}" for p in problems] == [
        '[[pool]] 1: zone: no zone "us-central1-A" is known',
        '[[pool]] 1: machine: no machine type "a2-highgpu-4" is known',
        "[[pool]] 1: gpus: is given together with machines",
        "[[pool]] 1: price_usd_per_gpu_hour: is -1",
        '[[pool]] 2: gpu: no GPU "A100-4O" is known',
        "[[pool]] 2: gives no number of machines or GPUs",
        "[[pool]] 3: gpu: is T4, but local has cpu",
        "[[pool]] 3: gpus_per_machine: is 2, but local has 1",
        "[[pool]] 3: machines: is true",
        "[[pool]] 4: zone: is missing",
        "[[pool]] 4: names neither a machine nor a gpu",
        '[[quota]] 1: where: no zone or region "us-centrl1" is known',
        "[[quota]] 1: gpus_max: is 1.5",
        "[[zone_link]] 1: gbit_per_s: is 0",
        'cluster.toml: has an unknown key "pol"',
    ]
    cures = [problem.cure for problem in problems]
    assert all(cures)
    assert '"us-central1-a"' in cures[0]
    assert '"a2-highgpu-4g"' in cures[1]
    assert '"A100-40"' in cures[4]
    assert cures[-1] == 'did you mean "pool"?'


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"quota": [{"where": "local", "gpu": "cpu", "gpus_max": 1}]}, "holds no [[pool]]"),
        ({"pool": []}, "pool: is an empty list"),
        ({"pool": {}}, "pool: is a table; give a list of tables"),
        ({"pool": [7]}, "pool[0]: is 7; give a table"),
        (
            {"pool": [{"zone": "local", "gpu": "cpu", "gpus": 0}]},
            "pool[0]: has no GPU and none is obtainable",
        ),
        (
            {"pool": [{"zone": "local", "gpu": "cpu", "gpus": 1}] * 2},
            "pool[1]: repeats cpux1 in local",
        ),
        ({**FULL, "zone": FULL["zone"] * 2}, 'zone[1].name: "lab-1" is declared twice'),
        (
            {**FULL, "zone": [*FULL["zone"], {"name": "us-west1-a", "region": "lab"}]},
            'zone[1].region: zone "us-west1-a" is in region "us-west1" in the catalogue',
        ),
        (
            {**FULL, "zone_link": FULL["zone_link"] * 2},
            "zone_link[1]: repeats the link from us-central1-a to lab-1",
        ),
        (
            {**FULL, "zone_link": [{"from_zone": "local", "to_zone": "local", "gbit_per_s": 1}]},
            'zone_link[0].to_zone: is "local" as well',
        ),
    ],
)
def test_invalid_cluster_is_reported(raw: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as caught:
        read(raw)
    assert said in str(caught.value)


def test_declared_zone_is_known() -> None:
    raw = {"pool": [{"zone": "mars-1", "gpu": "T4", "gpus": 1}]}
    with pytest.raises(InputError, match='no zone "mars-1" is known'):
        read(raw)
    assert read({**raw, "zone": [{"name": "mars-1", "region": "mars"}]}).pools[0].zone == "mars-1"


def test_schemas_are_valid() -> None:
    found = [entry for entry in SCHEMAS.iterdir() if entry.name.endswith(".schema.json")]
    assert len(found) >= 8
    for entry in found:
        jsonschema.Draft202012Validator.check_schema(json.loads(entry.read_text("utf-8")))


@pytest.mark.parametrize("name", ["gpus", "machines", "network", "prices", "regions"])
def test_built_in_catalogue_fits_its_schema(name: str) -> None:
    data = resources.files("simulator") / "data"
    schema = json.loads((SCHEMAS / "catalogue.schema.json").read_text("utf-8"))
    document = parse_document((data / f"{name}.toml").read_bytes(), name=name)
    jsonschema.Draft202012Validator(schema).validate(document.data)


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 9),
    st.integers(),
    st.floats(),
    st.text(max_size=4),
    st.sampled_from(["local", "us-west1-a", "cpu", "T4", "a2-highgpu-8g", "lab-1"]),
    st.lists(st.integers(0, 3), max_size=2),
    st.dictionaries(st.sampled_from(["zone", "gpu"]), st.text(max_size=3), max_size=2),
)


@st.composite
def damaged(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a cluster with one to three values replaced, removed or added."""
    raw: dict[str, Any] = copy.deepcopy(FULL)
    for _ in range(draw(st.integers(1, 3))):
        section = draw(st.sampled_from([*FULL, draw(st.text(max_size=5))]))
        tables = raw.get(section)
        if not isinstance(tables, list) or not tables or draw(st.integers(0, 9)) == 0:
            raw[section] = draw(VALUES)
            continue
        index = draw(st.integers(0, len(tables) - 1))
        table = tables[index]
        if not isinstance(table, dict) or draw(st.integers(0, 9)) == 0:
            tables[index] = draw(VALUES)
            continue
        key = draw(st.sampled_from([*sorted(table), "gpu", "machine", "x"]))
        if draw(st.booleans()):
            table.pop(key, None)
        else:
            table[key] = draw(VALUES)
    return raw


@pytest.mark.chaos
@given(damaged())
def test_damaged_cluster_is_read_or_rejected(raw: dict[str, Any]) -> None:
    try:
        read(raw)
    except InputError as error:
        str(error).encode()
    else:
        VALIDATOR.validate(raw)


def test_machines_that_lost_gpus_are_pools_of_their_own(tmp_path: Path) -> None:
    text = '[[pool]]\nzone = "us-central1-a"\nmachine = "a2-highgpu-4g"\nmachines = 0\n'
    (tmp_path / "left.toml").write_text(text + "gpus_left = [1, 3, 3]\n")
    VALIDATOR.validate(tomllib.loads(text + "gpus_left = [1, 3, 3]\n"))
    whole, *left = load_cluster(tmp_path / "left.toml").pools
    assert (whole.gpus_per_machine, whole.gpus) == (4, 0)
    assert [(pool.gpus_per_machine, pool.gpus) for pool in left] == [(3, 6), (1, 1)]
    assert {pool.machine for pool in left} == {"a2-highgpu-4g"}
    assert {pool.price_source for pool in left} == {whole.price_source}
    (tmp_path / "whole.toml").write_text(text + "gpus_left = [2, 4]\n")
    with pytest.raises(InputError, match=r"gpus_left.*is 4, and its machines have 4 GPUs"):
        load_cluster(tmp_path / "whole.toml")
