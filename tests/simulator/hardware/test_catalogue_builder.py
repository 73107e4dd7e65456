"""A user's file can change any fact of the catalogue; its mistakes are reported at once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from simulator.documents.problems import InputError
from simulator.hardware.catalogue import Catalogue, load_catalogue

GIB = 2**30


@pytest.fixture(scope="module")
def catalogue() -> Catalogue:
    return load_catalogue()


def overridden(tmp_path: Path, text: str) -> Catalogue:
    path = tmp_path / "my.toml"
    path.write_text(text, encoding="utf-8")
    return load_catalogue(path)


def problems_of(tmp_path: Path, text: str) -> list[str]:
    with pytest.raises(InputError) as caught:
        overridden(tmp_path, text)
    return [str(problem) for problem in caught.value.problems]


def test_user_file_changes_one_figure_and_keeps_the_rest(tmp_path, catalogue):
    mine = overridden(tmp_path, "[gpu.A100-40GB]\nusable_memory_gib = 38.5\n")
    gpu, before = mine.gpu("A100-40"), catalogue.gpu("A100-40")
    assert gpu.usable_memory_bytes == 38.5 * GIB
    assert gpu.memory_bytes == before.memory_bytes
    assert gpu.source.startswith("my.toml (usable_memory_gib), else NVIDIA A100")
    assert gpu.date == "undated"
    assert catalogue.gpu("A100-40") is load_catalogue().gpu("A100-40")
    assert mine.gpu("T4") == catalogue.gpu("T4")


def test_user_file_adds_gpu_machine_zone_and_prices(tmp_path):
    mine = overridden(
        tmp_path,
        """
        [gpu.RTX-5090]
        aliases = ["5090"]
        memory_gib = 32
        usable_memory_gib = 31.3
        memory_bandwidth_gbytes_per_s = 1792
        tflops = { fp32 = 104.8, bf16 = 209.5, fp16 = 209.5 }
        source = "NVIDIA Blackwell whitepaper"
        date = "2025-01"
        [machine.cellar-box]
        gpu = "5090"
        gpus = 2
        link = "pcie4-host"
        nic = "ethernet"
        nic_gbit_per_s = 10
        [price.cellar-box.cellar]
        on_demand_usd_per_hour = 0.4
        [region.cellar]
        continent = "europe"
        zones = ["rack-1", "rack-2"]
        [zone.attic]
        region = "cellar"
        [egress.cellar.us-central1]
        usd_per_gib = 0.03
        [egress.rack-1.rack-2]
        usd_per_gib = 0.5
        [distance.continent]
        aggregate_gbytes_per_s = 0.25
        """,
    )
    assert mine.machine_for("5090", 2).name == "cellar-box"
    assert mine.price_usd_per_gpu_hour("RTX-5090", "attic") == 0.2
    assert mine.price_usd_per_gpu_hour("RTX-5090", "attic", spot=True) is None
    assert mine.distance("rack-1", "europe-west4-a") == "continent"
    assert mine.link("continent", mine.machine("cellar-box")).aggregate_bytes_per_s == 0.25e9
    assert mine.egress_usd_per_byte("rack-2", "us-central1-b") == 0.03 / GIB
    assert mine.egress_usd_per_byte("rack-1", "rack-2") == 0.5 / GIB
    assert mine.egress_usd_per_byte("rack-2", "rack-1") == 0
    assert mine.gpu("5090").source == "NVIDIA Blackwell whitepaper"


def test_a_price_of_egress_may_name_places_of_two_kinds(tmp_path):
    text = """
        [region.cellar]
        continent = "europe"
        zones = ["rack-1"]
        [egress.us-central1-a.cellar]
        usd_per_gib = 0.01
        [egress.us-central1.rack-1]
        usd_per_gib = 0.02
        [egress.north-america.cellar]
        usd_per_gib = 0.03
        [egress.us-east1.europe]
        usd_per_gib = 0.04
        """
    mine = overridden(tmp_path, text)
    for here, there, usd in (
        ("us-central1-a", "rack-1", 0.01),
        ("us-central1-b", "rack-1", 0.02),
        ("us-west1-a", "rack-1", 0.03),
        ("us-east1-b", "rack-1", 0.04),
        ("us-east1-b", "europe-west4-a", 0.04),
        ("us-west1-a", "europe-west4-a", 0.05),
        ("europe-west4-a", "rack-1", 0.12),
        ("rack-1", "us-central1-a", 0.0),
    ):
        assert mine.egress_usd_per_byte(here, there) == pytest.approx(usd / GIB), (here, there)


def test_user_price_overrides_the_sum_of_parts(tmp_path):
    text = '[price.A2_HIGHGPU_1G."us-central1"]\non_demand_usd_per_hour = 2\n'
    mine = overridden(tmp_path, text)
    assert mine.price_usd_per_gpu_hour("a2-highgpu-1g", "us-central1-a") == 2
    assert mine.price_usd_per_gpu_hour("a2-highgpu-1g", "us-west1-b") == pytest.approx(3.673387)


def test_user_file_extends_lists_and_inner_tables(tmp_path, catalogue):
    text = '[gpu.V100-16]\naliases = ["volta"]\ntflops = { fp32 = 14.0 }\n'
    mine = overridden(tmp_path, text)
    assert mine.gpu("VOLTA") == mine.gpu("nvidia-tesla-v100")
    before = catalogue.gpu("V100-16").peak_flops
    assert mine.gpu("volta").peak_flops == {**before, "fp32": 14e12}


def test_documented_example_can_be_loaded(tmp_path):
    text = (Path(__file__).resolve().parents[3] / "docs" / "catalogue.md").read_text(
        encoding="utf-8"
    )
    (example,) = re.findall(r"```toml\n(.*?)```", text, flags=re.DOTALL)
    mine = overridden(tmp_path, example)
    assert mine.price_usd_per_gpu_hour("lab-box", "rack-1") == 0.225
    assert mine.egress_usd_per_byte("rack-2", "europe-west4-a") == 0
    # The price of the GPU changed, that of its host did not.
    price = mine.price_usd_per_gpu_hour("a2-highgpu-8g", "us-central1-a")
    assert price == pytest.approx(1.47 + 5.91582 / 8)


def test_all_mistakes_of_a_file_are_reported_at_once(tmp_path):
    told = problems_of(
        tmp_path,
        """
        [gpu.A100-40]
        memory_gib = -40
        memry = 3
        tflops = { fp8 = 1 }
        [gpu.new]
        memory_gib = "24"
        [machine.a2-highgpu-1g]
        gpus = 1.5
        link = "nvlink33"
        [price.a2-highgpu-1gg.us-central1]
        on_demand_usd_per_hour = true
        [host.n1.us-centrall1]
        vcpus = 96
        on_demand_usd_per_hour = 1
        [zone.attic]
        region = "celar"
        [egress.us-central1.mars]
        usd_per_gib = -0.1
        [distance.galaxy]
        latency_us = 1
        """,
    )
    for part in (
        "my.toml: [gpu.A100-40] memory_gib: is -40",
        'my.toml: [gpu.A100-40]: has an unknown key "memry"',
        'my.toml: [gpu.A100-40] tflops: has no precision "fp8"',
        'my.toml: [gpu.new] memory_gib: is "24"',
        "my.toml: [gpu.new] tflops: is missing",
        "my.toml: [machine.a2-highgpu-1g] gpus: is 1.5",
        'my.toml: [machine.a2-highgpu-1g] link: "nvlink33" is not known; did you mean "nvlink3"',
        "my.toml: [price.a2-highgpu-1gg.us-central1] on_demand_usd_per_hour: is true",
        'my.toml: [price.a2-highgpu-1gg.us-central1]: "a2-highgpu-1gg" is not known; did you mean',
        'my.toml: [host.n1.us-centrall1]: "us-centrall1" is not known; did you mean "us-central1"',
        'my.toml: [zone.attic] region: "celar" is not known',
        'my.toml: [egress.us-central1.mars]: "mars" is not known',
        "my.toml: [egress.us-central1.mars] usd_per_gib: is -0.1",
        'my.toml: [distance.galaxy]: "galaxy" is not known',
    ):
        assert any(part in problem for problem in told), (part, told)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("[gpus.T4]\nmemory_gib = 1\n", r'\[gpus\].*is not a kind of fact.*"gpu"'),
        ("gpu = 3\n", r"\[gpu\].*is not a table.*\[gpu.NAME\]"),
        ("[egress.local]\nusd_per_gib = 1\n", r"\[egress.local.usd_per_gib\].*is not a table"),
        ("[gpu.T4]\nmemory_gib = nan\n", r"\[gpu.T4\] memory_gib"),
        ("[gpu.T4]\nmemory_gib = inf\n", r"\[gpu.T4\] memory_gib"),
        ("[gpu.T4]\nusable_memory_gib = 17\n", r"\[gpu.T4\] usable_memory_gib"),
        ("[gpu.T4]\naliases = [1]\n", r"\[gpu.T4\] aliases"),
        ('[gpu.T4]\naliases = ["H100"]\n', r"\[gpu.T4\] aliases.*already means H100-80"),
        ("[gpu.T4\n", r"my.toml"),
    ],
)
def test_invalid_file_is_reported_with_its_place(tmp_path, text, answer):
    assert any(re.search(answer, problem) for problem in problems_of(tmp_path, text))


def test_missing_file_is_reported(tmp_path):
    with pytest.raises(InputError, match=r"absent\.toml"):
        load_catalogue(tmp_path / "absent.toml")


VALUES = ["0", "-1", "1", "7.5", "1e400", "nan", "inf", "true", '"x"', '""', "[]", "[1]", "{}"]


@pytest.mark.parametrize("table", ["gpu.T4", "machine.local", "link.pcie3", "host.n1.nowhere"])
@pytest.mark.parametrize(
    "key", ["memory_gib", "gpus", "latency_us", "tflops", "aliases", "source", "date", "unheard-of"]
)
def test_any_value_is_accepted_or_reported(tmp_path, table, key):
    told = 0
    for value in VALUES:
        try:
            overridden(tmp_path, f"[{table}]\n{key} = {value}\n")
        except InputError as error:
            told += 1
            places = {problem.place.partition(":")[0] for problem in error.problems}
            assert places == {"my.toml"}, error  # noqa: PT017  # being taken is right as well
    assert told >= len(VALUES) - 3  # At most 1, 7.5 and a text can be right.
