"""The device that is measured: its clock, its allocator, and what it is called.

Work on a GPU runs behind the host, so a moment of it is an event in its queue. On a CPU it is the
host's clock. The only GPU measured so far is one H200 (docs/gpu.md).
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from simulator.documents.problems import InputError, Problem
from simulator.hardware.catalogue import Catalogue
from worker.devices.rank_device import set_up
from worker.host_memory import free_host_bytes
from worker.layer_profiles.growing_batches import DoesNotFitError
from worker.profiling.compute_time import core_seconds

T = TypeVar("T")

_MEMORY_KEPT_FREE = 0.1
"""Share of a CPU's memory to leave free, since a process that takes too much is killed."""


class Device(Protocol):
    """A device on which layers are measured."""

    place: torch.device
    kind: str
    """Its name in the catalogue."""
    name: str
    driver: str
    queued: int
    """How many rounds are queued before the host waits for them."""

    def mark(self) -> Any:
        """Record the moment at which the work queued so far will be done; do not wait."""

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """Wait for the last mark, and return the seconds between neighbours."""

    def host_now(self) -> float:
        """Return the host's seconds."""

    def bytes_over(self, run: Callable[[], T]) -> tuple[T, int]:
        """Run something; return its result and by how many bytes it raised the memory at most."""

    def check_fits(self, needed_bytes: float) -> None:
        """Raise ``DoesNotFitError`` where trying would be dangerous."""


def open_device(wanted: str | None, kind: str | None, catalogue: Catalogue) -> Device:
    """Return the device to measure: ``cpu``, ``cuda``, or by default a GPU if there is one."""
    has_gpu = torch.cuda.is_available()
    if wanted == "cuda" and not has_gpu:
        what, cure = "torch sees no GPU here", "give --device cpu, or measure where one is"
        raise InputError(Problem("--device", what, cure))
    if wanted == "cuda" or (wanted is None and has_gpu):
        return CudaDevice(kind, catalogue)
    return CpuDevice("cpu" if kind is None else _check_kind(kind, catalogue))


def _check_kind(kind: str, catalogue: Catalogue) -> str:
    try:
        return catalogue.gpu_name(kind)
    except InputError as error:
        problem = error.problems[0]
        raise InputError(Problem("--kind", problem.what, problem.cure)) from None


class CpuDevice:
    """The CPU, with as many threads as torch uses."""

    def __init__(self, kind: str = "cpu", *, free_bytes: Callable[[], float] | None = None) -> None:
        self.place = torch.device("cpu")
        self.kind = kind
        self.name = f"{_cpu_name()}, {torch.get_num_threads()} threads"
        self.driver = platform.release()
        self.queued = 1
        self._free_bytes = free_bytes or free_host_bytes
        self.bytes_over(lambda: None)  # The first time takes seconds.

    def mark(self) -> float:
        # Time in which this thread waited for a core belongs to other programs.
        return time.perf_counter() - core_seconds()[1]

    def seconds(self, marks: Sequence[float]) -> list[float]:
        return [end - begin for begin, end in pairwise(marks)]

    def host_now(self) -> float:
        return self.mark()

    def bytes_over(self, run: Callable[[], T]) -> tuple[T, int]:
        return peak_of(run)

    def check_fits(self, needed_bytes: float) -> None:
        free = (1 - _MEMORY_KEPT_FREE) * self._free_bytes()
        if needed_bytes > free:
            raise DoesNotFitError(_describe_lack(needed_bytes, free))


def _describe_lack(needed: float, free: float) -> str:
    return f"it takes about {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free"


def peak_of(run: Callable[[], T]) -> tuple[T, int]:
    """Run something on the CPU; return its result and the most bytes of tensors that it held."""
    # The allocator tells the profiler of each tensor that it makes or frees.
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], profile_memory=True) as recorded:
        result = run()
    results = recorded.profiler.kineto_results if recorded.profiler is not None else None
    assert results is not None, "the profiler was on"
    events = [event for event in results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return result, peak


class CudaDevice:
    """The current NVIDIA GPU."""

    def __init__(self, kind: str | None, catalogue: Catalogue) -> None:
        index = torch.cuda.current_device()
        self.place = torch.device("cuda", index)
        set_up(self.place)  # As in training: fp32 runs as TF32.
        self.name = torch.cuda.get_device_name(index)
        self.kind = (
            _check_kind(kind, catalogue) if kind is not None else _gpu_kind(self.name, catalogue)
        )
        self.driver = f"CUDA {torch.version.cuda}"
        self.queued = 8

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch does not type it
        event.record()
        return event

    def seconds(self, marks: Sequence[torch.cuda.Event]) -> list[float]:
        marks[-1].synchronize()
        return [begin.elapsed_time(end) / 1e3 for begin, end in pairwise(marks)]

    def host_now(self) -> float:
        return time.perf_counter()

    def bytes_over(self, run: Callable[[], T]) -> tuple[T, int]:
        before = torch.cuda.memory_allocated(self.place)
        torch.cuda.reset_peak_memory_stats(self.place)
        result = run()
        return result, torch.cuda.max_memory_allocated(self.place) - before

    def check_fits(self, needed_bytes: float) -> None:
        """The driver refuses what does not fit, so nothing is refused here."""


def _gpu_kind(name: str, catalogue: Catalogue) -> str:
    for known in (name, name.removeprefix("NVIDIA ")):
        try:
            return catalogue.gpu_name(known)
        except InputError:
            continue
    cure = "name its kind with --kind, or add this name to one in a file for --catalogue"
    raise InputError(Problem("--device", f"{name} is not in the catalogue", cure))


@contextmanager
def refusing_too_much(device: Device) -> Iterator[None]:
    """Turn an allocator's refusal into ``DoesNotFitError``, and give its memory back."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        text = str(error).partition("\n")[0]
        refused = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if not refused and "DefaultCPUAllocator" not in text:
            raise
        reason = text.partition(". ")[0]
    else:
        return
    # Outside of the handler, whose traceback holds the tensors.
    if device.place.type == "cuda":
        torch.cuda.empty_cache()
    raise DoesNotFitError(reason)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
