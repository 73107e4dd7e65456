"""A fake of NVIDIA's Python package with recorded answers of its driver for machines with devices.
Constants and errors are the package's own."""

# ruff: noqa: N802 - the names are theirs

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pynvml


@dataclass(frozen=True, slots=True)
class Memory:
    total: int
    free: int


@dataclass(frozen=True, slots=True)
class Device:
    """One device; ``None`` marks an unsupported query."""

    name: str | bytes
    mib: int
    used_mib: int = 450
    """Memory that the driver itself uses."""
    ecc: int | None = 0
    rows: tuple[int, int, int, int] | None = (0, 0, 0, 0)
    retired: int | None = None
    mig: list[int] | None = None
    mode: int = pynvml.NVML_COMPUTEMODE_DEFAULT


class Recorded:
    """A replacement for the module ``pynvml``."""

    def __init__(self, *devices: Device, refuses: type[Exception] | None = None) -> None:
        self.devices = devices
        self.refuses = refuses
        self.open = 0
        self.xids: list[tuple[int, int]] = []
        """Pending events: the device's index, and the error's number."""
        self.registered: list[Device] = []

    def __getattr__(self, name: str) -> Any:
        assert not name.startswith("nvmlDevice"), f"{name} was not written down"
        return getattr(pynvml, name)

    def nvmlInit(self) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlEventSetCreate(self) -> list[Device]:
        return self.registered

    def nvmlDeviceRegisterEvents(self, device: Device, kinds: int, events: list[Device]) -> None:
        assert kinds == pynvml.nvmlEventTypeXidCriticalError
        _known(device.ecc)
        events.append(device)

    def nvmlEventSetWait_v2(self, events: list[Device], timeout_ms: int) -> SimpleNamespace:
        assert (events, timeout_ms) == (self.registered, 0)
        if not self.xids:
            raise pynvml.NVMLError_Timeout
        index, number = self.xids.pop(0)
        return SimpleNamespace(device=index, eventData=number)

    def nvmlEventSetFree(self, events: list[Device]) -> None:
        events.clear()

    def nvmlDeviceGetIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetCount(self) -> int:
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Device:
        return self.devices[index]

    def nvmlDeviceGetName(self, device: Device) -> str | bytes:
        return device.name

    def nvmlDeviceGetMemoryInfo(self, device: Device) -> Memory:
        return Memory(device.mib << 20, (device.mib - device.used_mib) << 20)

    def nvmlDeviceGetTotalEccErrors(self, device: Device, kind: int, since: int) -> int:
        assert (kind, since) == (1, 0), "uncorrected ones since the driver was loaded"
        return _known(device.ecc)

    def nvmlDeviceGetRemappedRows(self, device: Device) -> tuple[int, int, int, int]:
        return _known(device.rows)

    def nvmlDeviceGetRetiredPagesPendingStatus(self, device: Device) -> int:
        return _known(device.retired)

    def nvmlDeviceGetMigMode(self, device: Device) -> list[int]:
        return _known(device.mig)

    def nvmlDeviceGetComputeMode(self, device: Device) -> int:
        return device.mode


def _known(value: Any) -> Any:
    if value is None:
        raise pynvml.NVMLError_NotSupported
    return value
