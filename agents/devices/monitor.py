"""Devices that break while they are in use: what the driver counts, and what it cries out.

Counters say that memory is broken; an Xid is the driver's word on anything else. Some Xids only
say that a program went wrong, which its own exit tells better.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from agents.devices.nvml import DeviceLost, DriverError, ask_driver
from agents.devices.probe import ANEW, Devices, faults, few_left, told_broken

LOOK_S = 2.0
OF_PROGRAMS = frozenset({13, 31, 43, 45, 68, 109})
"""Xids that a program's own fault brings about on a device that is sound."""
WAITING_MAX = 100
"""So many cries are heard in one look."""


@dataclass(eq=False)
class Alarms:
    """The driver's cries about devices, from now on; ``nvml`` is its package."""

    nvml: Any
    broken: str = ""
    """The first that spoke of a broken device, in words: no counter will say so later."""
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
        """Hear what has come since the last look; return what is broken, or nothing."""
        for _ in range(WAITING_MAX):
            try:
                event = self.nvml.nvmlEventSetWait_v2(self._set, 0)
            except self.nvml.NVMLError:
                break  # Nothing waits, or the driver will say why when it is asked for facts.
            if event.eventData not in OF_PROGRAMS and not self.broken:
                self.broken = f"{self._name(event.device)} raised Xid {event.eventData}: {ANEW}"
        return self.broken

    def _name(self, handle: Any) -> str:
        try:
            return f"device {self.nvml.nvmlDeviceGetIndex(handle)}"
        except self.nvml.NVMLError:
            return "a device that is lost"

    def close(self) -> None:
        """Hear no more."""
        self.nvml.nvmlEventSetFree(self._set)
        self.nvml.nvmlShutdown()


@contextlib.contextmanager
def listening(devices: Devices) -> Iterator[Alarms | None]:
    """Hear the alarms of devices that are there; ``None``: the driver raises none."""
    if devices.is_emulated:
        yield None
        return
    nvml = import_module("pynvml")
    alarms = None
    with contextlib.suppress(nvml.NVMLError):
        alarms = Alarms(nvml)
    try:
        yield alarms
    finally:
        if alarms is not None:
            with contextlib.suppress(nvml.NVMLError):
                alarms.close()


async def until_broken(
    devices: Devices, state: Path, alarms: Alarms | None, *, every_s: float = LOOK_S
) -> str:
    """Look now and then at devices in use; return what is broken, once something is."""
    while True:
        if devices.is_emulated:
            broken = told_broken(state)
        else:
            broken = await asyncio.to_thread(look, devices, alarms)
        if broken:
            return broken
        await asyncio.sleep(every_s)


def look(devices: Devices, alarms: Alarms | None, nvml: Any = None) -> str:
    """Say what broke. A driver that does not answer says nothing of what computes."""
    heard = "" if alarms is None else alarms.look()
    try:
        facts = ask_driver(nvml)
    except DeviceLost as error:
        return str(error)
    except DriverError:
        return heard
    if len(facts) < devices.count:
        return few_left(len(facts), devices)
    counted = [
        f"device {index} {fault}"
        for index, fact in enumerate(facts)
        if fact.uncorrected_errors or fact.repair_failed
        for fault in faults(fact, index, is_working=True)
    ]
    return "; ".join([*counted, heard] if heard else counted)
