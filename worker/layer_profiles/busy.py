"""Why a device is in use, so that measuring it would measure others, too, and disturb them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

LOAD_MOST = 0.3
"""A CPU is busy if more than this share of its cores has had work for the last minute."""
_FORK_SERVER = b"agents.workers.fork_server"


def why_busy(place: torch.device) -> str:
    """Return what uses a device; empty: nothing does, or it is unknown."""
    if place.type == "cuda":
        return gpu_users(str(torch.cuda.get_device_properties(place).uuid), own=os.getpid())
    cores = len(os.sched_getaffinity(0))
    return cpu_users(os.getloadavg()[0], cores, list(training_workers()))


def cpu_users(load: float, cores: int, workers: list[int]) -> str:
    """Say what uses a CPU, from the load of the last minute and the workers of an agent."""
    if workers:
        return f"{_processes(workers)} of an agent on this node"
    if load > LOAD_MOST * cores:
        return f"a load of {load:.1f} on {cores} cores in the last minute"
    return ""


def training_workers(proc: Path = Path("/proc")) -> Iterator[int]:
    """Find the workers of agents: children of a fork server."""
    for folder in sorted(proc.glob("[0-9]*"), key=lambda path: int(path.name)):
        try:
            if _is_forked(folder) and _is_forked(proc / _parent(folder)):
                yield int(folder.name)
        except (OSError, LookupError):
            continue  # It has ended, or belongs to another user.


def _is_forked(folder: Path) -> bool:
    return _FORK_SERVER in (folder / "cmdline").read_bytes().split(b"\0")


def _parent(folder: Path) -> str:
    lines = (folder / "status").read_text(encoding="utf-8").splitlines()
    return next((line.split()[1] for line in lines if line.startswith("PPid:")), "0")


def gpu_users(uuid: str, *, own: int, nvml: Any = None) -> str:
    """Say which other processes compute on a GPU, by NVIDIA's driver."""
    nvml = nvml or import_module("pynvml")
    try:
        nvml.nvmlInit()
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")
            running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError:
        return ""  # A driver that cannot tell, as in some containers.
    return _processes(sorted(each.pid for each in running if each.pid != own))


def _processes(pids: list[int]) -> str:
    if not pids:
        return ""
    shown = ", ".join(map(str, pids[:4])) + (" and more" if len(pids) > 4 else "")
    return f"process {shown}" if len(pids) == 1 else f"processes {shown}"
