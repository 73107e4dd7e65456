"""Makes a CUDA context on each device: ``python -m agents.devices.cuda_trial COUNT``.

NVML answers although CUDA cannot be used: without ``/dev/nvidia-uvm``, with a CUDA library of
another version, or on a device that hangs. The trial runs in a process of its own, since a context
takes memory for as long as its process lives, and a broken driver may block.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agents.devices.nvml import REBOOT, RESET

UVM = Path("/dev/nvidia-uvm")
TRIAL_S = 90.0
"""Time limit for all devices together; without persistence mode each takes seconds."""
END_S = 5.0
LOAD_UVM = "make it at each boot: `nvidia-modprobe -u -c=0`"
SAME_VERSION = "install the driver's own CUDA library (libcuda1, or libnvidia-compute)"


async def try_cuda(count: int) -> str:
    """Return why CUDA cannot be used on these devices, or an empty text."""
    # Order devices as NVML does, whose numbers our messages have.
    environment = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "agents.devices.cuda_trial", str(count),
        env={**environment, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        async with asyncio.timeout(TRIAL_S):
            output, _ = await child.communicate()
    except TimeoutError:
        return f"no CUDA context was made within {TRIAL_S:g} s: {REBOOT}"
    finally:
        if child.returncode is None:
            child.kill()
            with contextlib.suppress(TimeoutError):  # It may be blocked in the driver.
                async with asyncio.timeout(END_S):
                    await child.communicate()
    if child.returncode != 0:
        return f"making a CUDA context ended the process with {child.returncode}: {REBOOT}"
    return output.decode("utf-8", "replace").strip()


def cuda_fault(count: int, *, uvm: Path = UVM, load: Callable[[str], Any] | None = None) -> str:
    """Make and destroy a context on each device; return what is wrong, or an empty text.

    ``uvm`` only explains why CUDA cannot begin: CUDA may make that file itself, and WSL has none.
    """
    lack = ""
    try:
        os.close(os.open(uvm, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        lack = f"{uvm} cannot be opened: {error.strerror}; {LOAD_UVM}"
    try:
        cuda = (ctypes.CDLL if load is None else load)("libcuda.so.1")
    except OSError as error:
        return f"CUDA's library cannot be loaded: {error}; {SAME_VERSION}"
    if code := cuda.cuInit(0):
        return lack or f"CUDA cannot begin: {_name(cuda, code)}; {SAME_VERSION}, or {REBOOT}"
    found = ctypes.c_int()
    if code := cuda.cuDeviceGetCount(ctypes.byref(found)):
        return f"CUDA cannot count the devices: {_name(cuda, code)}; {REBOOT}"
    if found.value != count:
        return f"CUDA sees {found.value} of {count} devices; {REBOOT}"
    faults = (_context_fault(cuda, index) for index in range(count))
    return "; ".join(fault for fault in faults if fault)


def _context_fault(cuda: Any, index: int) -> str:
    device, context = ctypes.c_int(), ctypes.c_void_p()
    code = (
        cuda.cuDeviceGet(ctypes.byref(device), index)
        or cuda.cuCtxCreate_v2(ctypes.byref(context), 0, device)
        or cuda.cuCtxDestroy_v2(context)
    )
    reset = RESET.format(index=index)
    return f"device {index} gives no CUDA context: {_name(cuda, code)}; {reset}" if code else ""


def _name(cuda: Any, code: int) -> str:
    name = ctypes.c_char_p()
    if cuda.cuGetErrorName(code, ctypes.byref(name)) or name.value is None:
        return f"error {code}"
    return name.value.decode("ascii", "replace")


if __name__ == "__main__":
    sys.stdout.write(cuda_fault(int(sys.argv[1])))
