"""Chooses and sets up a rank's device, and recognises its errors."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention

DeviceType = Literal["cpu", "cuda"]
_BF16_SINCE = (8, 0)
"""The first compute capability with bf16 in hardware; before, torch emulates it slowly."""

_cuda: Any = torch.cuda  # torch's type stubs leave some of it untyped.


class DeviceMissingError(RuntimeError):
    """A rank has no GPU although its agent found one."""


def rank_device(number: int, promised: DeviceType | None) -> torch.device:
    """Return the device of a rank; ``promised`` is the kind of device that its agent found."""
    # Counting devices initialises none of them.
    is_gpu = promised == "cuda" or (promised is None and torch.cuda.device_count() > number)
    return torch.device("cuda", number) if is_gpu else torch.device("cpu")


def set_up(device: torch.device) -> None:
    """Select a GPU for this thread, and allow TF32 for fp32 matrix products, as the planner
    assumes.

    A rank that finds no GPU where there is one must not compute on the CPU: its peers would wait
    for it in groups of GPUs.
    """
    if device.type != "cuda":
        return
    count = torch.cuda.device_count()
    if device.index >= count:
        raise DeviceMissingError(
            f"device {device.index}: the agent found this GPU, and torch sees {count} "
            f"(built for CUDA {torch.version.cuda}); look at nvidia-smi and the driver's version, "
            "then restart the agent"
        )
    _cuda.set_device(device)
    allow_tf32()


def allow_tf32() -> None:
    """Let matrix products and convolutions in fp32 run as TF32 on GPUs that have it."""
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True


def finish_computing() -> None:
    """Wait for what this thread has queued on its GPU, but for no receive requested ahead.

    Synchronising the whole device would wait for those too: for peers that may wait for this rank.
    """
    _cuda.current_stream().synchronize()


def has_bf16(device: torch.device) -> bool:
    """Return whether a device computes in bf16; if not, it uses fp32, as the planner assumes."""
    return device.type != "cuda" or _cuda.get_device_capability(device) >= _BF16_SINCE


def has_flash(attention: SDPAParams) -> bool:
    """Return whether fused attention takes grouped heads: on a GPU only flash attention does.

    It needs a GPU that has it, 16 bits, and no mask. Elsewhere torch would silently compute and
    keep all scores, for which plans have no memory.
    """
    return attention.query.device.type != "cuda" or can_use_flash_attention(attention)


def to_device(value: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Move a tensor without waiting for the device.

    A copy from pageable memory would wait for all work queued on it.
    """
    if device.type == "cuda" and value.device.type == "cpu":
        value = value.pin_memory().to(device, non_blocking=True)
    return value.to(device=device, dtype=dtype)


def device_error(error: BaseException) -> str | None:
    """Return what went wrong on this rank's own device, if something did."""
    text = str(error)
    lower = text.lower()
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in lower:
        return "out of memory"
    if "cuda error" in lower or "cudnn error" in lower or "cublas error" in lower:
        return "a CUDA error"
    return None


def device_failure(
    error: BaseException, *, rank: int, device: torch.device, activity: str
) -> str | None:
    """Return one sentence on an error of the rank's own device; ``None``: it is another error."""
    word = device_error(error)
    if word is None:
        return None
    # The rest of torch's message is about the settings of its allocator.
    first = str(error).partition("\n")[0].partition(" Including non-PyTorch memory")[0].rstrip(".")
    return f"{word} on {device} of rank {rank}, {activity}: {first}"
