"""What uses a device is found before it is measured."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from worker.layer_profiles.device_users import cpu_users, gpu_users, training_workers


def test_a_loaded_cpu_is_busy() -> None:
    assert cpu_users(0.5, 2, []) == ""
    assert cpu_users(0.7, 2, []) == "a load of 0.7 on 2 cores in the last minute"


def test_a_worker_of_an_agent_makes_a_node_busy() -> None:
    assert cpu_users(0.0, 2, [7]) == "process 7 of an agent on this node"
    shown = "processes 1, 2, 3, 4 and more of an agent on this node"
    assert cpu_users(0.0, 2, [1, 2, 3, 4, 5]) == shown


def write_process(proc: Path, pid: int, parent: int, *command: str) -> None:
    folder = proc / str(pid)
    folder.mkdir()
    (folder / "cmdline").write_bytes(b"\0".join(word.encode() for word in command) + b"\0")
    (folder / "status").write_text(f"Name:\tpython\nPPid:\t{parent}\n")


def test_workers_are_the_children_of_a_fork_server(tmp_path: Path) -> None:
    server = ("python", "-m", "agents.workers.fork_server", "/run/x")
    write_process(tmp_path, 1, 0, "init")
    write_process(tmp_path, 20, 1, *server)
    write_process(tmp_path, 100, 20, *server)
    write_process(tmp_path, 30, 20, "python", "other")
    (tmp_path / "40").mkdir()  # It has ended.
    assert list(training_workers(tmp_path)) == [100]


class FakeNvml:
    """NVIDIA's driver with one GPU, on which some processes compute."""

    class NVMLError(Exception):
        """As the driver raises it."""

    def __init__(self, *pids: int, fails: bool = False, hides: bool = False, pct: int = 0) -> None:
        self.pids, self.fails, self.hides, self.pct = pids, fails, hides, pct
        self.asked = ""

    def nvmlInit(self) -> None:  # noqa: N802 - the driver's name
        if self.fails:
            raise self.NVMLError

    def nvmlShutdown(self) -> None:  # noqa: N802 - the driver's name
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802 - the driver's name
        self.asked = uuid
        return uuid

    def nvmlDeviceGetComputeRunningProcesses(self, _: str) -> list[Any]:  # noqa: N802 - the driver's name
        if self.hides:
            raise self.NVMLError
        return [SimpleNamespace(pid=pid) for pid in self.pids]

    def nvmlDeviceGetUtilizationRates(self, _: str) -> Any:  # noqa: N802 - the driver's name
        return SimpleNamespace(gpu=self.pct)


def users(nvml: FakeNvml, *, uuid: str = "abc", used_gib: float = 0.6) -> str:
    return gpu_users(uuid, own=5, used_bytes=int(used_gib * 2**30), nvml=nvml)


def test_other_processes_make_a_gpu_busy() -> None:
    nvml = FakeNvml(5, 9)
    assert users(nvml) == "process 9"
    assert nvml.asked == "GPU-abc"
    assert users(FakeNvml(5), uuid="GPU-abc") == ""


@pytest.mark.parametrize("hides", [False, True], ids=["lists none", "refuses to list"])
def test_a_gpu_whose_processes_are_hidden_is_busy_if_it_computes(hides: bool) -> None:
    """As in a container, whose processes the driver does not list."""
    assert users(FakeNvml(hides=hides, pct=93)) == "something that computes 93 % of the time"
    assert users(FakeNvml(hides=hides, pct=3)) == ""


@pytest.mark.parametrize("fails", [False, True])
def test_taken_memory_makes_a_gpu_busy_even_if_the_driver_cannot_tell(fails: bool) -> None:
    found = users(FakeNvml(fails=fails), used_gib=41.0)
    assert found == "something that has 41.0 GiB of its memory"
    assert users(FakeNvml(9, fails=True)) == ""
