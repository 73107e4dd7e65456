"""Watches devices in use for faults: the driver's error counters, and its Xid events.

Counters report broken memory, an Xid any other fault. Some Xids only say that a program failed,
which the exit of the program tells better.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from agents.devices.nvml import REBOOT, DeviceLost, DriverError, query_driver
from agents.devices.probe import Devices, describe_missing, emulated_fault, faults

LOOK_S = 2.0
PROGRAM_XIDS = frozenset({13, 31, 43, 45, 68, 109})
"""Xids that a program's own fault raises on a healthy device."""
EVENTS_MAX = 100
"""Events that are read in one look."""


@dataclass(eq=False)
class XidListener:
    """The driver's Xid events from now on; ``nvml`` is its package."""

    nvml: Any
    broken: str = ""
    """The first Xid of a broken device, described: no counter will report it later."""
    _set: Any = field(init=False)

    def __post_init__(self) -> None:
        nvml = self.nvml
        nvml.nvmlInit()
        self._set = nvml.nvmlEventSetCreate()
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            with contextlib.suppress(nvml.NVMLError_NotSupported):
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self._set)

    def look(self) -> str:
        """Read the events since the last look; return what is broken, or an empty text."""
        for _ in range(EVENTS_MAX):
            try:
                event = self.nvml.nvmlEventSetWait_v2(self._set, 0)
            except self.nvml.NVMLError:
                break  # No event waits, or the driver fails and the next query says why.
            if event.eventData not in PROGRAM_XIDS and not self.broken:
                self.broken = f"{self._name(event.device)} raised Xid {event.eventData}: {REBOOT}"
        return self.broken

    def _name(self, handle: Any) -> str:
        try:
            return f"device {self.nvml.nvmlDeviceGetIndex(handle)}"
        except self.nvml.NVMLError:
            return "a device that is lost"

    def close(self) -> None:
        """Stop listening."""
        self.nvml.nvmlEventSetFree(self._set)
        self.nvml.nvmlShutdown()


@contextlib.contextmanager
def listen_for_xids(devices: Devices) -> Iterator[XidListener | None]:
    """Listen to the Xids of real devices; ``None``: the driver reports none."""
    if devices.is_emulated:
        yield None
        return
    nvml = import_module("pynvml")
    listener = None
    with contextlib.suppress(nvml.NVMLError):
        listener = XidListener(nvml)
    try:
        yield listener
    finally:
        if listener is not None:
            with contextlib.suppress(nvml.NVMLError):
                listener.close()


async def wait_broken(devices: Devices, state: Path, listener: XidListener | None) -> str:
    """Look at the devices every ``LOOK_S``; return what is broken, once something is."""
    while True:
        if devices.is_emulated:
            broken = emulated_fault(state)
        else:
            broken = await asyncio.to_thread(look, devices, listener)
        if broken:
            return broken
        await asyncio.sleep(LOOK_S)


def look(devices: Devices, listener: XidListener | None, nvml: Any = None) -> str:
    """Say what is broken. A driver that does not answer is no proof of a broken device."""
    heard = "" if listener is None else listener.look()
    try:
        facts = query_driver(nvml)
    except DeviceLost as error:
        return str(error)
    except DriverError:
        return heard
    if len(facts) < devices.count:
        return describe_missing(len(facts), devices)
    counted = [
        f"device {index} {fault}"
        for index, fact in enumerate(facts)
        if fact.uncorrected_errors or fact.repair_failed
        for fault in faults(fact, index, is_working=True)
    ]
    return "; ".join([*counted, heard] if heard else counted)
