"""Faults of devices in use."""

from __future__ import annotations

from dataclasses import replace

import pynvml
import pytest

from agents.devices.monitor import XidListener, look
from agents.devices.probe import BROKEN, Devices
from tests.agents.running import place
from tests.fakes.nvml import Device, Recorded
from tests.processes import until

A100 = Device("NVIDIA A100-SXM4-40GB", 40_960, mig=[0, 0])
TWO = Devices("A100-40", 2, 312.0, is_emulated=False)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"used_mib": 40_000}, ""),  # Used by the workers.
        ({"mode": 2}, ""),  # Running programs are not affected.
        ({"rows": (1, 0, 1, 0)}, ""),  # A repair that waits for the next reset.
        ({"ecc": 2}, "device 1 had 2 memory errors that ECC could not correct"),
        ({"rows": (0, 1, 1, 0), "ecc": 2}, "device 1 needs a reset"),
        ({"rows": (0, 9, 0, 1)}, "device 1 has broken memory and no spare memory left"),
    ],
    ids=str,
)
def test_a_device_in_use_is_broken_only_if_its_memory_is(changes, said):
    seen = look(TWO, None, Recorded(A100, replace(A100, **changes)))
    assert seen.startswith(said)
    assert bool(seen) == bool(said)


def test_a_missing_device_is_a_fault_and_a_silent_driver_is_not():
    assert look(TWO, None, Recorded(A100)) == "only 1 of 2 devices are left: reboot the machine"
    assert "lost" in look(TWO, None, Recorded(A100, refuses=pynvml.NVMLError_GpuIsLost))
    assert look(TWO, None, Recorded(A100, refuses=pynvml.NVMLError_LibRmVersionMismatch)) == ""


def test_an_xid_is_a_lasting_fault_unless_a_program_caused_it():
    driver = Recorded(A100, replace(A100, ecc=None))
    alarms = XidListener(driver)
    assert driver.registered == [A100], "the second one does not know of events"
    driver.xids = [(0, 31), (0, 43)]
    assert look(TWO, alarms, driver) == ""
    driver.xids = [(0, 13), (1, 79), (0, 48)]
    assert look(TWO, alarms, driver) == "device 1 raised Xid 79: reboot the machine"
    assert look(TWO, alarms, driver) == "device 1 raised Xid 79: reboot the machine"
    alarms.close()
    assert (driver.open, driver.registered) == (0, [])


@pytest.mark.slow
async def test_workers_on_a_broken_device_end_and_a_repaired_node_is_ready_again(tmp_path):
    async with place(tmp_path) as here:
        _, node = await here.train()
        (here.state() / BROKEN).write_text("device 1 is gone\n")
        failed = await until(lambda: here.is_taking("failed"))
        assert (failed.failure, failed.fault) == ("device 1 is gone", "device 1 is gone")

        async def is_withdrawn():
            return [one.state for one in await here.nodes()] == ["joining"]

        await until(is_withdrawn)
        (here.state() / BROKEN).unlink()
        assert (await here.ready()).id == node.id
