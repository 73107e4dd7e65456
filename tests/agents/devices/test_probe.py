"""Finding and testing devices."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pynvml
import pytest
from click.testing import CliRunner

from agents.devices.nvml import DriverError, query_driver
from agents.devices.probe import Devices, faults, read_emulated, recognise, self_test
from agents.main import INVALID_INPUT, main
from agents.service import FAILED
from simulator.documents.problems import InputError
from simulator.hardware.catalogue import load_catalogue
from tests.agents.running import ROOT
from tests.fakes.nvml import Device, Recorded

A100 = Device("NVIDIA A100-SXM4-40GB", 40_960, mig=[0, 0])
CATALOGUE = load_catalogue(None)


@pytest.mark.parametrize(
    ("name", "mib", "known"),
    [
        # Names and memory as nvidia-smi prints them.
        ("Tesla V100-SXM2-16GB", 16_384, "V100-16"),
        ("Tesla V100-SXM2-16GB", 16_160, "V100-16"),
        ("Tesla V100-PCIE-16GB", 16_384, "V100-16"),
        ("Tesla T4", 15_360, "T4"),
        ("Tesla T4", 16_127, "T4"),  # With ECC off.
        ("NVIDIA A100-SXM4-40GB", 40_960, "A100-40"),
        ("A100-SXM4-40GB", 40_536, "A100-40"),
        ("NVIDIA A100-PCIE-40GB", 40_960, "A100-40"),
        ("NVIDIA A100-SXM4-80GB", 81_920, "A100-80"),
        ("NVIDIA A100 80GB PCIe", 81_920, "A100-80"),
        ("NVIDIA L4", 23_034, "L4"),
        ("NVIDIA H100 80GB HBM3", 81_559, "H100-80"),
        ("NVIDIA H200", 143_771, "H200-141"),
        ("NVIDIA GH200 480GB", 97_871, "GH-96"),
        ("NVIDIA GeForce RTX 2080 Ti", 11_264, "RTX-2080"),
        ("NVIDIA GeForce RTX 3090", 24_576, "RTX-3090"),
        ("NVIDIA GeForce RTX 4090", 24_564, "RTX-4090"),
        ("NVIDIA TITAN RTX", 24_576, "Titan-RTX"),
        (b"TITAN RTX", 24_220, "Titan-RTX"),
    ],
)
def test_products_are_found_by_the_drivers_names(name, mib, known):
    devices = recognise(query_driver(Recorded(*[Device(name, mib)] * 2)), CATALOGUE)
    assert (devices.gpu, devices.count, devices.is_emulated) == (known, 2, False)
    assert devices.tflops == max(CATALOGUE.gpu(known).peak_flops.values()) / 1e12


@pytest.mark.parametrize(
    ("name", "mib", "said"),
    [
        # Similar products with another speed or memory.
        ("Tesla V100-SXM2-32GB", 32_768, 'unknown GPU "Tesla V100-SXM2-32GB"'),
        ("NVIDIA L40S", 46_068, 'unknown GPU "NVIDIA L40S"'),
        ("NVIDIA H100 PCIe", 81_559, 'unknown GPU "NVIDIA H100 PCIe"'),
        ("NVIDIA H100 NVL", 95_830, 'unknown GPU "NVIDIA H100 NVL"'),
        ("NVIDIA A10", 23_028, 'unknown GPU "NVIDIA A10"'),
        ("NVIDIA GeForce RTX 2080", 8_192, 'unknown GPU "NVIDIA GeForce RTX 2080"'),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4_864, "unknown GPU"),
        ("GRID A100-20C", 20_480, "unknown GPU"),
        ("NVIDIA A100-SXM4-40GB", 20_480, "has 20.0 GiB, but A100-40 has 39.4 GiB"),
    ],
)
def test_a_similar_product_is_not_mistaken_for_a_known_one(name, mib, said):
    with pytest.raises(InputError) as caught:
        recognise(query_driver(Recorded(Device(name, mib))), CATALOGUE)
    assert said in str(caught.value)
    assert "aliases" in str(caught.value)


def test_a_catalogue_alias_makes_a_product_known(tmp_path):
    (tmp_path / "own.toml").write_text('[gpu.H100-80]\naliases = ["NVIDIA H100 PCIe"]\n')
    facts = query_driver(Recorded(Device("NVIDIA H100 PCIe", 81_559)))
    assert recognise(facts, load_catalogue(tmp_path / "own.toml")).gpu == "H100-80"


def test_the_recorded_queries_exist_in_the_package():
    """Each recorded query is a function of the package."""
    asked = [name for name in vars(Recorded) if name.startswith("nvml")]
    assert len(asked) == 16
    assert [name for name in asked if not callable(getattr(pynvml, name, None))] == []


def test_the_driver_is_shut_down_after_every_query():
    recorded = Recorded(replace(A100, rows=None, retired=1))
    assert query_driver(recorded)[0].repair_pending is True
    assert recorded.open == 0
    with pytest.raises(DriverError, match="GPU is lost"):
        query_driver(Recorded(A100, refuses=pynvml.NVMLError_GpuIsLost))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, []),
        ({"ecc": None, "rows": None, "retired": None, "mig": None}, []),
        ({"rows": (3, 1, 0, 0)}, []),  # Replaced by spare rows.
        ({"rows": (0, 1, 1, 0), "ecc": 2}, ["needs a reset"]),
        ({"rows": (0, 9, 0, 1)}, ["no spare memory left"]),
        ({"rows": None, "retired": 1}, ["needs a reset"]),
        ({"ecc": 2}, ["had 2 memory errors that ECC could not correct"]),
        ({"mig": [1, 1]}, ["divided into MIG"]),
        ({"mode": 2}, ["compute mode that prohibits"]),
        ({"used_mib": 20_000}, ["has 20.5 of 40.0 GiB free"]),
        ({"ecc": 1, "mode": 2}, ["ECC", "compute mode"]),
    ],
    ids=str,
)
def test_each_fault_of_a_device_comes_with_its_cure(changes, said):
    (fact,) = query_driver(Recorded(replace(A100, **changes)))
    found = faults(fact, 3, is_working=False)
    assert len(found) == len(said)
    assert all(words in fault for words, fault in zip(said, found, strict=True))


def test_memory_used_by_our_workers_is_no_fault():
    (fact,) = query_driver(Recorded(replace(A100, used_mib=40_000)))
    assert faults(fact, 0, is_working=True) == []
    assert len(faults(fact, 0, is_working=False)) == 1


def test_all_devices_must_be_of_one_kind():
    with pytest.raises(InputError, match="reports no GPU"):
        recognise(query_driver(Recorded()), CATALOGUE)
    mixed = Recorded(A100, Device("Tesla T4", 15_360))
    with pytest.raises(InputError, match="several kinds: NVIDIA A100-SXM4-40GB, Tesla T4"):
        recognise(query_driver(mixed), CATALOGUE)


def test_emulated_devices_are_read_from_the_option():
    assert read_emulated("2xA100-40", CATALOGUE) == Devices("A100-40", 2, 312.0, True)
    for wrong in ("A100-40", "0xA100-40", "2x", "2xA100-41", "100xT4"):
        with pytest.raises(InputError, match="--emulate"):
            read_emulated(wrong, CATALOGUE)


async def test_the_self_test_needs_a_writable_state_folder(tmp_path):
    emulated = read_emulated("1xT4", CATALOGUE)
    assert await self_test(emulated, tmp_path, is_working=False) == ""
    gone = await self_test(emulated, tmp_path / "gone", is_working=False)
    assert gone == f"{tmp_path / 'gone'} cannot be written: No such file or directory"


def has_driver() -> bool:
    try:
        query_driver()
    except DriverError:
        return False
    return True


def test_a_driver_that_does_not_answer_is_asked_by_the_next_start(tmp_path, monkeypatch):
    """At boot its module may still be loaded; after exit code 2 systemd starts nothing again."""
    config = tmp_path / "agent.toml"
    config.write_text('cluster_name = "c"\nstate = "s"\nkey = "key"\nstore = "unix:///x"\n')
    absent = Recorded(A100, refuses=pynvml.NVMLError_DriverNotLoaded)
    monkeypatch.setattr("agents.devices.nvml.import_module", lambda _: absent)
    monkeypatch.setattr("agents.main.begin_log", lambda *_: None)
    for command, code in (("run", FAILED), ("check", INVALID_INPUT)):
        done = CliRunner().invoke(main, [command, "--config", str(config)])
        assert done.exit_code == code
        assert "devices: the NVIDIA driver reports: Driver Not Loaded; look whether" in done.stderr


@pytest.mark.skipif(has_driver(), reason="there is a driver")
def test_without_a_driver_the_error_names_the_cure(tmp_path):
    (tmp_path / "key").write_text("k" * 64)
    (tmp_path / "key").chmod(0o600)
    config = tmp_path / "agent.toml"
    config.write_text('cluster_name = "c"\nstate = "s"\nkey = "key"\nstore = "unix:///x"\n')
    done = subprocess.run(
        [sys.executable, "-m", "agents.main", "run", "--config", config],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "no NVIDIA driver is installed" in done.stderr
    assert 'emulate = "2xA100-40"' in done.stderr
    assert "Traceback" not in done.stderr
