"""Writes safetensors files one tensor at a time."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from worker.checkpoint.by_tensor.write_snapshot import write_at

_DTYPES = {torch.float32: "F32", torch.float64: "F64"}
_ALIGN = 8


def write_safetensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    read: Callable[[str], Tensor],
) -> None:
    """Write tensors of these names and shapes; each is read when its turn comes."""
    head: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        offsets[name] = begin
        head[name] = {
            "dtype": _DTYPES[dtype],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN)
    with path.open("wb", buffering=0) as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        first = file.tell()
        os.truncate(file.fileno(), first + end)
        for name, begin in offsets.items():
            write_at(file.fileno(), read(name), first + begin)
