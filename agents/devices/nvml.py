"""What NVIDIA's driver says of each device, through the package ``nvidia-ml-py``.

Everything is asked in one go, so that the rest of the agent judges plain facts. The package loads
without a driver; only its first call finds out that there is none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any


class DriverError(Exception):
    """The driver gives no answer; the message says why, in its own words or ours."""


class DeviceLost(DriverError):  # noqa: N818 - an answer like any other: what the driver says
    """A device cannot be reached any more, or does nothing before a reset."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One device as the driver sees it; what it does not support is ``None``."""

    name: str
    """The product's, as in ``NVIDIA A100-SXM4-40GB``."""
    memory_bytes: int
    free_bytes: int
    uncorrected_errors: int | None = None
    """Since the driver was loaded: bits that ECC found wrong and could not put right."""
    repair_pending: bool | None = None
    """Broken memory is taken out of use at the next reset."""
    repair_failed: bool | None = None
    """There is no spare memory left to put in its place."""
    is_divided: bool | None = None
    """It is cut into slices (MIG), and cannot be used as a whole."""
    is_closed: bool | None = None
    """The operator lets nobody compute on it."""


def ask_driver(nvml: Any = None) -> tuple[Fact, ...]:
    """Return the facts of all devices; ``nvml`` is the package, or what answers like it."""
    if nvml is None:
        try:
            nvml = import_module("pynvml")
        except ImportError:
            raise DriverError("the package nvidia-ml-py is not installed") from None
    try:
        nvml.nvmlInit()
        try:
            count = nvml.nvmlDeviceGetCount()
            return tuple(_fact(nvml, nvml.nvmlDeviceGetHandleByIndex(i)) for i in range(count))
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError_LibraryNotFound:
        raise DriverError("no NVIDIA driver is installed: libnvidia-ml is not found") from None
    except (nvml.NVMLError_GpuIsLost, nvml.NVMLError_ResetRequired) as error:
        raise DeviceLost(f"NVIDIA's driver says: {error}") from None
    except nvml.NVMLError as error:
        raise DriverError(f"NVIDIA's driver says: {error}") from None


def _fact(nvml: Any, handle: Any) -> Fact:
    def supported(ask: Callable[[], Any]) -> Any:
        """Older devices and drivers do not know every question."""
        try:
            return ask()
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
            return None

    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    errors = supported(
        lambda: nvml.nvmlDeviceGetTotalEccErrors(
            handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        )
    )
    # From Ampere on, rows are replaced by spare ones; before, whole pages were retired.
    rows = supported(lambda: nvml.nvmlDeviceGetRemappedRows(handle))
    if rows is None:
        pages = supported(lambda: nvml.nvmlDeviceGetRetiredPagesPendingStatus(handle))
        rows = (None, None, pages, None)
    mig = supported(lambda: nvml.nvmlDeviceGetMigMode(handle))
    mode = supported(lambda: nvml.nvmlDeviceGetComputeMode(handle))
    name = nvml.nvmlDeviceGetName(handle)
    return Fact(
        name=name.decode() if isinstance(name, bytes) else name,
        memory_bytes=memory.total,
        free_bytes=memory.free,
        uncorrected_errors=errors,
        repair_pending=None if rows[2] is None else bool(rows[2]),
        repair_failed=None if rows[3] is None else bool(rows[3]),
        is_divided=None if mig is None else mig[0] == nvml.NVML_DEVICE_MIG_ENABLE,
        is_closed=None if mode is None else mode == nvml.NVML_COMPUTEMODE_PROHIBITED,
    )
