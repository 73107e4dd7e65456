"""What machine this is: devices, driver, versions, memory."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check.setting import Setting, attempt


def run(setting: Setting) -> dict[str, Any]:
    """Describe the machine."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "cores": os.cpu_count(),
        "memory_gib": _memory_gib(),
        "snapshot_memory_gib": attempt(lambda: shutil.disk_usage("/dev/shm").free / 2**30),
    }
    if setting.device == "cuda":
        found["driver"] = attempt(_driver)
        found["NCCL"] = attempt(_nccl)
        found["devices"] = [_device(index) for index in range(torch.cuda.device_count())]
        found["kind"], found["kind_is_known"] = setting.kind()
        count = torch.cuda.device_count()
        found["peer_access"] = [
            [torch.cuda.can_device_access_peer(a, b) for b in range(count) if b != a]
            for a in range(count)
        ]
    return found


def _nccl() -> str:
    version: Callable[[], tuple[int | str, ...]] = torch.cuda.nccl.version
    return ".".join(map(str, version()))


def _device(index: int) -> dict[str, Any]:
    facts = torch.cuda.get_device_properties(index)
    free, whole = torch.cuda.mem_get_info(index)
    return {
        "name": facts.name,
        "memory_gib": whole / 2**30,
        "free_gib": free / 2**30,
        "capability": f"{facts.major}.{facts.minor}",
        "multiprocessors": facts.multi_processor_count,
        "bf16_in_hardware": torch.cuda.is_bf16_supported(including_emulation=False),
    }


def _driver() -> str:
    return Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0]


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
