"""Queries NVIDIA's driver for the facts of each device, through the package ``nvidia-ml-py``.

The package loads without a driver; its first call fails then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

REBOOT = "reboot the machine"
RESET = f"reset it with `nvidia-smi --gpu-reset -i {{index}}`, or {REBOOT}"


class DriverError(Exception):
    """The driver did not answer; the message says why."""


class DriverMissing(DriverError):  # noqa: N818 - names the state of the machine
    """There is no driver, or no package to ask it: to wait does not help."""


class DeviceLost(DriverError):  # noqa: N818 - names the state of the device
    """A device has dropped off the bus, or needs a reset."""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """The driver's facts of one device; ``None``: the device does not support the query."""

    name: str
    """The product name, such as ``NVIDIA A100-SXM4-40GB``."""
    memory_bytes: int
    free_bytes: int
    uncorrected_errors: int | None = None
    """Memory errors since the driver was loaded that ECC could not correct."""
    repair_pending: bool | None = None
    """Broken memory is retired at the next reset."""
    repair_failed: bool | None = None
    """No spare memory is left to replace broken memory."""
    is_divided: bool | None = None
    """It is divided into MIG instances, and cannot be used as a whole."""
    is_prohibited: bool | None = None
    """Its compute mode prohibits all programs."""


def query_driver(nvml: Any = None) -> tuple[DeviceFacts, ...]:
    """Return the facts of all devices; ``nvml`` is the package, or a fake of it."""
    if nvml is None:
        try:
            nvml = import_module("pynvml")
        except ImportError:
            raise DriverMissing("the package nvidia-ml-py is not installed") from None
    try:
        nvml.nvmlInit()
        try:
            count = nvml.nvmlDeviceGetCount()
            return tuple(_fact(nvml, nvml.nvmlDeviceGetHandleByIndex(i)) for i in range(count))
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError_LibraryNotFound:
        raise DriverMissing("no NVIDIA driver is installed: libnvidia-ml is not found") from None
    except (nvml.NVMLError_GpuIsLost, nvml.NVMLError_ResetRequired) as error:
        raise DeviceLost(f"the NVIDIA driver reports: {error}") from None
    except nvml.NVMLError as error:
        raise DriverError(f"the NVIDIA driver reports: {error}") from None


def _fact(nvml: Any, handle: Any) -> DeviceFacts:
    def supported(ask: Callable[[], Any]) -> Any:
        """Return ``None`` where the device or the driver lacks a query."""
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
    # Since Ampere, rows are remapped to spare ones; before, whole pages were retired.
    rows = supported(lambda: nvml.nvmlDeviceGetRemappedRows(handle))
    if rows is None:
        pages = supported(lambda: nvml.nvmlDeviceGetRetiredPagesPendingStatus(handle))
        rows = (None, None, pages, None)
    mig = supported(lambda: nvml.nvmlDeviceGetMigMode(handle))
    mode = supported(lambda: nvml.nvmlDeviceGetComputeMode(handle))
    name = nvml.nvmlDeviceGetName(handle)
    return DeviceFacts(
        name=name.decode() if isinstance(name, bytes) else name,
        memory_bytes=memory.total,
        free_bytes=memory.free,
        uncorrected_errors=errors,
        repair_pending=None if rows[2] is None else bool(rows[2]),
        repair_failed=None if rows[3] is None else bool(rows[3]),
        is_divided=None if mig is None else mig[0] == nvml.NVML_DEVICE_MIG_ENABLE,
        is_prohibited=None if mode is None else mode == nvml.NVML_COMPUTEMODE_PROHIBITED,
    )
