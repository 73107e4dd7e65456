"""The self-test makes CUDA contexts; a fake library plays CUDA's part."""

# ruff: noqa: N802 - the names are theirs

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from agents.devices import cuda_trial, probe
from agents.devices.cuda_trial import UVM, cuda_fault, try_cuda
from agents.devices.probe import Devices, self_test
from tests.fakes.nvml import Device, Recorded

NAMES = {100: b"CUDA_ERROR_NO_DEVICE", 2: b"CUDA_ERROR_OUT_OF_MEMORY", 803: b"CUDA_ERROR_MISMATCH"}


@dataclass
class Cuda:
    """A fake of libcuda: how many devices it has, and which call fails how."""

    count: int = 2
    fails: dict[str, int] = field(default_factory=dict)
    alive: set[int] = field(default_factory=set)
    made: int = 0

    def cuInit(self, flags: int) -> int:
        assert flags == 0
        return self.fails.get("init", 0)

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = self.count
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:
        device._obj.value = 10 + index
        return self.fails.get(f"get{index}", 0)

    def cuCtxCreate_v2(self, context: Any, flags: int, device: Any) -> int:
        assert flags == 0
        code = self.fails.get(f"create{device.value - 10}", 0)
        if not code:
            self.made += 1
            context._obj.value = self.made
            self.alive.add(self.made)
        return code

    def cuCtxDestroy_v2(self, context: Any) -> int:
        self.alive.remove(context.value)
        return 0

    def cuGetErrorName(self, code: int, name: Any) -> int:
        if code not in NAMES:
            return 1
        name._obj.value = NAMES[code]
        return 0


@pytest.fixture
def uvm(tmp_path: Path) -> Path:
    (tmp_path / "uvm").touch()
    return tmp_path / "uvm"


@pytest.mark.parametrize(
    ("cuda", "said"),
    [
        (Cuda(), ""),
        (Cuda(fails={"init": 803}), "CUDA cannot begin: CUDA_ERROR_MISMATCH; install the driver's"),
        (Cuda(fails={"init": 7}), "CUDA cannot begin: error 7; "),
        (Cuda(count=1), "CUDA sees 1 of 2 devices; reboot"),
        (Cuda(fails={"get1": 100}), "device 1 gives no CUDA context: CUDA_ERROR_NO_DEVICE; reset"),
        (
            Cuda(fails={"create0": 2, "create1": 2}),
            "device 0 gives no CUDA context: CUDA_ERROR_OUT_OF_MEMORY; reset it with `nvidia-smi"
            " --gpu-reset -i 0`, or reboot the machine; device 1 gives",
        ),
    ],
)
def test_each_failure_of_cuda_is_named_with_its_cure(monkeypatch, uvm, cuda, said):
    asked: list[str] = []
    monkeypatch.setattr(ctypes, "CDLL", lambda name: asked.append(name) or cuda)
    found = cuda_fault(2, uvm=uvm)
    assert found.startswith(said) if said else found == ""
    assert asked == ["libcuda.so.1"]
    assert not cuda.alive, "contexts are destroyed"
    assert said or cuda.made == 2


def test_a_missing_device_file_matters_where_cuda_cannot_begin(tmp_path):
    """Unless a unit forbids it, CUDA makes the file as it begins; on WSL there is none."""
    none = tmp_path / "none"
    found = cuda_fault(2, uvm=none, load=lambda _: Cuda(fails={"init": 999}))
    assert found.startswith(f"{none} cannot be opened: No such file or directory; make it")
    assert cuda_fault(2, uvm=none, load=lambda _: Cuda()) == ""


def test_a_missing_library_is_named(uvm):
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    assert cuda_fault(1, uvm=uvm, load=missing).startswith(
        "CUDA's library cannot be loaded: libcuda.so.1: cannot open shared object file; install"
    )


@pytest.mark.skipif(UVM.exists(), reason="this machine has a driver")
async def test_the_self_test_tries_cuda_in_a_process_of_its_own(monkeypatch, tmp_path):
    """Unless our workers are on the devices, where another context would take their memory."""
    devices = Devices("A100-40", 1, 312.0, is_emulated=False)
    driver = Recorded(Device("NVIDIA A100-SXM4-40GB", 40_960))
    facts = probe.query_driver(driver)
    monkeypatch.setattr(probe, "query_driver", lambda: facts)
    found = await self_test(devices, tmp_path, is_working=False)
    assert found.startswith(
        ("CUDA's library cannot be loaded: ", "/dev/nvidia-uvm cannot be opened")
    )
    assert await self_test(devices, tmp_path, is_working=True) == ""


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise SystemExit(3)", "making a CUDA context ended the process with 3: reboot"),
        ("import time; time.sleep(600)", "no CUDA context was made within 0.2 s: reboot"),
    ],
)
async def test_a_driver_that_kills_or_blocks_the_process_is_no_device(
    monkeypatch, tmp_path, code, said
):
    (tmp_path / "python").write_text(f"#!/usr/bin/env python3\n{code}\n")
    (tmp_path / "python").chmod(0o700)
    monkeypatch.setattr(cuda_trial.sys, "executable", str(tmp_path / "python"))
    if "sleep" in code:
        monkeypatch.setattr(cuda_trial, "TRIAL_S", 0.2)
    assert (await try_cuda(1)).startswith(said)
