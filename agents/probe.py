"""The devices of this machine: what they are, and whether they can be used."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from simulator.catalogue import load_catalogue
from simulator.errors import InputError, Problem, Problems

EMULATED = re.compile(r"([1-9][0-9]?)x([A-Za-z0-9][A-Za-z0-9._-]*)\Z")
NO_DEVICE = "give the machine an NVIDIA GPU with its driver, or use --emulate 2xA100-40"
FREE_BYTES_MIN = 64 << 20


@dataclass(frozen=True, slots=True)
class Devices:
    """So many GPUs of one kind."""

    gpu: str
    count: int
    tflops: float
    """Declared: the best of the catalogue's rates for it."""
    is_emulated: bool


def read_emulated(text: str) -> Devices:
    """Read ``2xA100-40``: devices that are not there, with the speed of those that could be."""
    match = EMULATED.match(text)
    if match is None:
        what = f"is {text[:40]!r}"
        raise InputError(Problem("--emulate", what, "give how many of what, as in 2xA100-40"))
    return _devices(match[2], int(match[1]), is_emulated=True, place="--emulate")


def probe() -> Devices:
    """Ask the driver; ``InputError`` says that there is no GPU, or what cannot be used."""
    try:
        nvml: Any = import_module("pynvml")
    except ImportError:
        raise InputError(Problem("devices", "nvidia-ml-py is not installed", NO_DEVICE)) from None
    try:
        nvml.nvmlInit()
        try:
            handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
            names = [_text(nvml.nvmlDeviceGetName(handle)) for handle in handles]
            sizes = [round(nvml.nvmlDeviceGetMemoryInfo(h).total / 1e9) for h in handles]
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        raise InputError(Problem("devices", f"the driver says: {error}", NO_DEVICE)) from None
    if not names:
        raise InputError(Problem("devices", "the driver knows no GPU", NO_DEVICE))
    problems = Problems()
    if len(set(names)) > 1:
        problems.add("devices", f"are of several kinds: {', '.join(sorted(set(names)))}")
    problems.raise_if_any()
    return _devices(_known_name(names[0], sizes[0]), len(names), is_emulated=False, place="devices")


def _known_name(name: str, gigabytes: int) -> str:
    """Find what the catalogue calls the GPU that the driver names at length."""
    catalogue = load_catalogue()
    words = set(re.split(r"[\s-]+", name.upper()))
    fits = [
        known
        for known, gpu in catalogue.gpus.items()
        if known.upper().partition("-")[0] in words
        and abs(gpu.memory_bytes / 1e9 - gigabytes) < 0.15 * gigabytes
    ]
    return min(fits, key=lambda known: (len(known), known)) if fits else name


def _devices(name: str, count: int, *, is_emulated: bool, place: str) -> Devices:
    catalogue = load_catalogue()
    try:
        known = catalogue.gpu_name(name)
    except InputError as error:
        problems = Problems()
        problems.take(error, place=place)
        raise InputError(problems.found) from None
    peak_flops = max(catalogue.gpu(known).peak_flops.values())
    return Devices(known, count, peak_flops / 1e12, is_emulated)


async def self_test(devices: Devices, state: Path) -> str:
    """Try what workers will need; return why the node is not ready, or nothing."""
    try:
        trial = state / "trial"
        trial.write_bytes(bytes(1 << 16))
        trial.unlink()
    except OSError as error:
        return f"{state} cannot be written: {error.strerror}"
    if devices.is_emulated:
        return ""
    return await asyncio.to_thread(_try_devices, devices)


def _try_devices(devices: Devices) -> str:
    nvml: Any = import_module("pynvml")
    try:
        nvml.nvmlInit()
        try:
            for index in range(devices.count):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                if nvml.nvmlDeviceGetMemoryInfo(handle).free < FREE_BYTES_MIN:
                    return f"device {index} has no free memory: something else uses it"
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        return f"the driver says: {error}"
    return ""


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name
