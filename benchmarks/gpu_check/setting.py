"""What the parts of the check share: the device, the size of the work, and the clock."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ZONE = "us-central1-a"
UNKNOWN_GPU = "A100-40"
"""GPU kind used for a CPU or an unknown GPU, whose predictions then mean little."""


class SkippedError(Exception):
    """A part cannot run here; the message says why."""


@dataclass(frozen=True, slots=True)
class Setting:
    """How the check runs."""

    device: str
    """``cuda`` or ``cpu``."""
    is_quick: bool
    """Everything once and small, so that a test can run it."""
    out: Path

    @property
    def place(self) -> Any:
        """The device of parts that use one, set up as the runtime does."""
        import torch  # noqa: PLC0415 - the parent works without torch

        from worker.devices.rank_device import set_up  # noqa: PLC0415 - the same

        place = torch.device(self.device, 0) if self.device == "cuda" else torch.device("cpu")
        set_up(place)
        return place

    @property
    def rounds(self) -> int:
        """How often something is timed."""
        return 2 if self.is_quick else 10

    def kind(self) -> tuple[str, bool]:
        """Return the GPU kind in the catalogue, and whether it is this device's."""
        from simulator.documents.problems import InputError  # noqa: PLC0415 - needs numpy
        from simulator.hardware.catalogue import load_catalogue  # noqa: PLC0415 - the same

        if self.device == "cpu":
            return UNKNOWN_GPU, False
        import torch  # noqa: PLC0415 - the parent works without torch

        catalogue, name = load_catalogue(), torch.cuda.get_device_name(0)
        for known in (name, name.removeprefix("NVIDIA ")):
            try:
                return catalogue.gpu_name(known), True
            except InputError:
                continue
        return UNKNOWN_GPU, False


def share_gpu(rank: int) -> None:
    """Let NCCL take this process for one on a machine of its own; call it before NCCL is used.

    NCCL refuses two ranks of one machine on one GPU. Ranks of several machines it connects by
    sockets, so that what it does about lost peers can be seen on one GPU, though not its speed.
    """
    import torch  # noqa: PLC0415 - the parent works without torch

    if torch.cuda.device_count() == 1:
        os.environ.update({"NCCL_HOSTID": f"gpu-check-{rank}", "NCCL_MNNVL_ENABLE": "0"})


def finish(place: Any) -> None:
    """Wait until a device has done all that is queued."""
    import torch  # noqa: PLC0415 - the parent works without torch

    if place.type == "cuda":
        torch.cuda.synchronize(place)


def seconds_of(run: Callable[[], object], place: Any, rounds: int) -> float:
    """Return the median seconds of a call, after two that do not count."""
    for _ in range(2):
        run()
    found = []
    for _ in range(rounds):
        finish(place)
        begin_s = time.perf_counter()
        run()
        finish(place)
        found.append(time.perf_counter() - begin_s)
    return statistics.median(found)


def attempt(run: Callable[[], Any]) -> Any:
    """Return a result, or an error as text, so that the other figures can still be measured."""
    try:
        return run()
    except SkippedError as error:
        return f"skipped: {error}"
    except ModuleNotFoundError as error:
        return f"skipped: the package {error.name} is missing"
    except Exception as error:
        return f"failed: {type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"
