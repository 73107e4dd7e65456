"""Finds what else uses a device: a measurement would include other programs, and disturb them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

LOAD_MOST = 0.3
"""A CPU is busy if more than this share of its cores has had work for the last minute."""
MEMORY_MOST_BYTES = 2 << 30
"""A GPU is busy with more memory taken; its driver and an idle process take about 1 GiB."""
UTILISATION_MOST_PCT = 10
"""A GPU is busy if it computed for more of the last second."""
_FORK_SERVER = b"agents.workers.fork_server"


def why_busy(place: torch.device) -> str:
    """Return what uses a device; empty: nothing does, or it is unknown."""
    if place.type == "cuda":
        free, total = torch.cuda.mem_get_info(place)
        uuid = str(torch.cuda.get_device_properties(place).uuid)
        return gpu_users(uuid, own=os.getpid(), used_bytes=total - free)
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


def gpu_users(uuid: str, *, own: int, used_bytes: int, nvml: Any = None) -> str:
    """Say what uses a GPU besides this process.

    In a container NVIDIA's driver may list no processes of others, or refuse to answer. So the
    memory that is taken counts, too, and how much of the time the GPU computes.
    """
    users, busy_pct = _driver_says(uuid, nvml)
    if others := [pid for pid in users if pid != own]:
        return _processes(sorted(others))
    if busy_pct > UTILISATION_MOST_PCT:
        return f"something that computes {busy_pct} % of the time"
    if used_bytes > MEMORY_MOST_BYTES:
        return f"something that has {used_bytes / 2**30:.1f} GiB of its memory"
    return ""


def _driver_says(uuid: str, nvml: Any) -> tuple[list[int], int]:
    """Return the processes on a GPU and its utilisation; what the driver cannot tell is empty."""
    users: list[int] = []
    busy_pct = 0
    try:
        nvml = nvml or import_module("pynvml")
    except ImportError:
        return users, busy_pct
    with suppress(nvml.NVMLError):
        nvml.nvmlInit()
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")
            with suppress(nvml.NVMLError):
                users = [each.pid for each in nvml.nvmlDeviceGetComputeRunningProcesses(handle)]
            busy_pct = int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        finally:
            nvml.nvmlShutdown()
    return users, busy_pct


def _processes(pids: list[int]) -> str:
    if not pids:
        return ""
    shown = ", ".join(map(str, pids[:4])) + (" and more" if len(pids) > 4 else "")
    return f"process {shown}" if len(pids) == 1 else f"processes {shown}"
